"""A row of panels for each job: throughput, learning curves, and where a step's time goes."""

from __future__ import annotations

from tests.contracts.dashboards.panels import Row, graph
from tests.contracts.dashboards.queries import JOB, RANK, mean, per_second, quantile, ranked, rate, total


def _gauges(**legends: str) -> list[tuple[str, str]]:
    """Gauges of one rank each, by their names without the prefix."""
    return [(total(f"rolecall_{name}", how="max"), f"{JOB} {legend}") for name, legend in legends.items()]


def _means(*histograms: str) -> list[tuple[str, str]]:
    """The mean of histograms such as rl_update_seconds, under what stands between the job and the unit."""
    return [(mean(one), f"{JOB} {one.split('_', 1)[1].rsplit('_', 1)[0]}") for one in histograms]


def _spread(histogram: str, *by: str) -> list[tuple[str, str]]:
    own = " ".join([JOB, *(f"{{{{{label}}}}}" for label in by)])
    return [(quantile(share, histogram, *by), f"{own} p{100 * share:g}") for share in (0.5, 0.95)]


RL = Row(
    "rl",
    [
        graph("Environment steps", "ops", "Steps of all environments a second: taken by observers, and learned from.",
              (per_second("rl_env_steps_total"), JOB + " taken"),
              (per_second("rl_samples_total"), JOB + " learned from")),
        graph("Return", "none", "The running return, the last iteration's worst observer, and what counts as solved.",
              *_gauges(rl_return_running="running", rl_return_last="last", rl_return_threshold="solved"), least=None),
        graph("Episodes and iterations", "ops", "Episodes that ended, and iterations (rollouts and update), a second.",
              (per_second("rl_episodes_total"), JOB + " episodes"),
              (per_second("rl_iterations_total"), JOB + " iterations")),
        graph("Loss", "none", "Of the last update.",
              *_gauges(rl_policy_loss="policy", rl_baseline_loss="baseline"), least=None),
        graph("Entropy of the policy", "none", "In nats; near 0 the policy has settled and explores no more.",
              *_gauges(rl_policy_entropy_nats="entropy")),
        graph("Age of the policy that acted", "none", "Updates between the policy that acted and the one that learns.",
              *_spread("rl_policy_age_versions")),
        graph("An iteration", "s", "Mean time of an iteration's rollouts and of its update.",
              *_means("rl_rollout_seconds", "rl_update_seconds")),
        graph("Inference", "s", "Time of one forward pass, by role.", *_spread("rl_inference_seconds", "role")),
        graph("Batch of an inference", "none", "Observations in one forward pass, by role.",
              (mean("rl_inference_batch_observations", "role"), JOB + " {{role}}")),
    ],
    folded=True,
)  # fmt: skip

PS = Row(
    "ps",
    [
        graph("Samples", "ops", "Training samples a second: gradients computed by the trainers, and applied.",
              (per_second("ps_computed_samples_total"), JOB + " computed"),
              (per_second("ps_samples_total"), JOB + " applied")),
        graph("Loss", "none", "Mean training loss since the log's last line.", *_gauges(ps_loss="loss")),
        graph("Accuracy", "percentunit", "Share classified right: of the test data, and of the last batch.",
              *_gauges(ps_accuracy_ratio="test", ps_train_accuracy_ratio="training")),
        graph("A trainer's time", "percentunit", "Share of its time that a trainer computes, and that it stands still.",
              (ranked(rate("ps_compute_seconds_sum")), RANK + " computes"),
              (ranked(rate("ps_wait_seconds_sum")), RANK + " waits")),
        graph("A batch", "s", "Time of a batch's forward and backward pass, and how long a trainer waits for the next.",
              *_means("ps_compute_seconds", "ps_wait_seconds")),
        graph("Update of a shard", "s", "Time that a server needs for an update of its parameters.",
              *_spread("ps_update_seconds", "role", "ordinal")),
        graph("Staleness", "none", "Updates between the parameters a gradient was computed with and those it came to.",
              *_spread("ps_staleness_updates")),
        graph("Updates", "ops", "Updates of the parameters a second.", (per_second("ps_updates_total"), JOB)),
        graph("Refused and dropped", "ops", "Gradients staler than MAX_STALENESS; trainers that an update did without.",
              (per_second("ps_gradients_refused_total"), JOB + " gradients refused"),
              (per_second("ps_trainers_dropped_total"), JOB + " trainers dropped")),
    ],
    folded=True,
)  # fmt: skip

RNN = Row(
    "rnn",
    [
        graph("Tokens", "ops", "Training tokens a second.", (per_second("rnn_tokens_total"), JOB)),
        graph("Loss", "none", "Mean training loss of a token since the log's last line, in nats.",
              *_gauges(rnn_loss="loss")),
        graph("Perplexity", "none", "Of the validation text, after each epoch.", *_gauges(rnn_perplexity="perplexity")),
        graph("Norm of the gradient", "none", "Of all parameters on both ranks, before clipping.",
              *_gauges(rnn_grad_norm="norm")),
        graph("The trainer's step", "s", "Mean time of a step's parts on the trainer; lstm: of one micro-batch.",
              *_means("rnn_wait_seconds", "rnn_backward_seconds", "rnn_optimizer_seconds", "rnn_lstm_seconds")),
        graph("The server's part", "s", "Mean time of a micro-batch's lookup, and of its logits, loss and gradients.",
              *_means("rnn_embedding_seconds", "rnn_decoder_seconds")),
        graph("Gradients of the backward pass", "Bps", "As computed: torch's own messages are not counted.",
              (per_second("rnn_gradient_bytes_total", "direction"), JOB + " {{direction}}")),
    ],
    folded=True,
)  # fmt: skip

HYBRID = Row(
    "hybrid",
    [
        graph("Samples", "ops", "Training samples a second.", (per_second("hybrid_samples_total"), JOB)),
        graph("Loss", "none", "Mean training loss since the log's last line.", *_gauges(hybrid_loss="loss")),
        graph("Accuracy", "percentunit", "Share of the test samples classified right, after each epoch.",
              *_gauges(hybrid_accuracy_ratio="test")),
        graph("Rows of the table", "ops", "Rows a second: looked up as often as they were, and updated once a step.",
              (per_second("hybrid_lookups_total"), JOB + " looked up"),
              (per_second("hybrid_rows_total"), JOB + " updated")),
        graph("Standing still", "percentunit", "Share of its time that a rank waits, by what for.",
              (ranked(rate("hybrid_stall_seconds_total")), RANK + " {{cause}}")),
        graph("A trainer's step", "percentunit", "Share of its time in each phase; backward has its all-reduce.",
              (ranked(rate("hybrid_phase_seconds_total")), RANK + " {{phase}}")),
        graph("Lookup and update", "s", "Mean time of pooling one trainer's bags, and of a step's update of the table.",
              *_means("hybrid_lookup_seconds", "hybrid_update_seconds")),
        graph("Skew of the trainers", "s", "From a step's first gradient of the table to its last.",
              *_spread("hybrid_skew_seconds")),
        graph("All-reduce", "s", "Mean time of an all-reduce of dense gradients, which is looked at now and then.",
              (ranked("rolecall_hybrid_allreduce_seconds"), RANK)),
    ],
    folded=True,
)  # fmt: skip

ROWS = (RL, PS, RNN, HYBRID)
