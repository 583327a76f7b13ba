"""A row of panels for each job: where a step's time goes, and what only this job measures. What all jobs share (score,
loss, throughput, time left) is in the overview's own panels.
"""

from __future__ import annotations

from tools.dashboards.panels import Row, graph
from tools.dashboards.queries import JOB, RANK, mean, per_second, quantile, ranked, rate, total


def _gauges(**legends: str) -> list[tuple[str, str]]:
    """Gauges of one rank each, by their names without the prefix."""
    return [(total(f"rolecall_{name}", how="max"), f"{JOB} {legend}") for name, legend in legends.items()]


def _means(*histograms: str) -> list[tuple[str, str]]:
    """The means of histograms. `rl_update_seconds` is labelled `update`."""
    return [(mean(name), f"{JOB} {name.split('_', 1)[1].rsplit('_', 1)[0]}") for name in histograms]


def _quantiles(histogram: str, *by: str) -> list[tuple[str, str]]:
    """The median and the 95th percentile of a histogram, by labels."""
    legend = " ".join([JOB, "_".join(f"{{{{{label}}}}}" for label in by)]).rstrip()
    return [(quantile(share, histogram, *by), f"{legend} p{100 * share:g}") for share in (0.5, 0.95)]


RL = Row(
    "rl",
    [
        graph("Environment steps", "ops", "Steps that observers take in all environments, per second.",
              (per_second("rl_env_steps_total"), JOB)),
        graph("Returns", "none", "Mean of the last 100 episodes; lowest mean of an observer in the last iteration; "
              "the tutorial's running reward.",
              *_gauges(rl_return_mean="mean", rl_return_last="worst observer", rl_return_running="running"),
              least=None),
        graph("Episodes", "ops", "Completed episodes per second.", (per_second("rl_episodes_total"), JOB)),
        graph("Episode length", "none", "Mean steps of the last 100 episodes.", *_gauges(rl_episode_steps="steps")),
        graph("Losses", "none", "Policy and value loss of the last update.",
              *_gauges(rl_policy_loss="policy", rl_baseline_loss="value"), least=None),
        graph("Policy entropy", "none", "In nats. Near 0, of Box actions far below, the policy no longer explores.",
              *_gauges(rl_policy_entropy_nats="entropy"), least=None),
        graph("KL divergence", "none", "In nats, of the policy that learns from the one that acted.",
              *_gauges(rl_kl_nats="KL")),
        graph("Clipped samples", "percentunit", "Share of an update's samples whose ratio is beyond CLIP_RATIO.",
              *_gauges(rl_clipped_ratio="clipped")),
        graph("Explained variance", "percentunit", "Of the returns, by the values before the update. At 0 or below "
              "the values tell nothing.",
              *_gauges(rl_explained_variance_ratio="explained"), least=None),
        graph("Passes", "none", "Over an update's samples: EPOCHS, or fewer where TARGET_KL ends them.",
              *_gauges(rl_update_passes="passes")),
        graph("Policy lag", "none", "Updates between the policy that acted and the one that learns from it.",
              *_quantiles("rl_policy_age_versions")),
        graph("Iteration time", "s", "Mean time of an iteration's rollouts and of its update.",
              *_means("rl_rollout_seconds", "rl_update_seconds")),
        graph("Inference time", "s", "Time of one forward pass, by role.", *_quantiles("rl_inference_seconds", "role")),
        graph("Inference batch", "none", "Mean number of observations in one forward pass, by role.",
              (mean("rl_inference_batch_observations", "role"), JOB + " {{role}}")),
    ],
    folded=True,
)  # fmt: skip

PS = Row(
    "ps",
    [
        graph("Samples computed", "ops", "Samples whose gradients the trainers compute, per second.",
              (per_second("ps_computed_samples_total"), JOB)),
        graph("Training accuracy", "percentunit", "Share of the last batch that is classified correctly.",
              *_gauges(ps_train_accuracy_ratio="training")),
        graph("Trainer utilization", "percentunit", "Share of its time that a trainer computes, and that it waits.",
              (ranked(rate("ps_compute_seconds_sum")), RANK + " computes"),
              (ranked(rate("ps_wait_seconds_sum")), RANK + " waits")),
        graph("Batch time", "s", "Mean time of a batch's forward and backward pass, and of the wait for the next.",
              *_means("ps_compute_seconds", "ps_wait_seconds")),
        graph("Shard update time", "s", "Time in which a server updates its parameters.",
              *_quantiles("ps_update_seconds", "role", "ordinal")),
        graph("Staleness", "none", "Updates between the parameters of a gradient and those that it is applied to.",
              *_quantiles("ps_staleness_updates")),
        graph("Refused and dropped", "ops", "Gradients staler than MAX_STALENESS; trainers left out of an update.",
              (per_second("ps_gradients_refused_total"), JOB + " gradients refused"),
              (per_second("ps_trainers_dropped_total"), JOB + " trainers dropped")),
        graph("Bytes", "Bps", "Gradients that trainers send (up), parameters that they receive (down), as they travel.",
              (per_second("ps_payload_bytes_total", "direction"), JOB + " {{direction}}")),
        graph("Round time", "s", "With UPDATE_MODE=local: mean time of a round's inner steps.",
              *_means("ps_round_seconds")),
        graph("Hidden exchange", "percentunit", "With UPDATE_MODE=local: share of its time that a trainer computes "
              "while an exchange is under way.",
              (ranked(rate("ps_hidden_seconds_total")), RANK)),
    ],
    folded=True,
)  # fmt: skip

RNN = Row(
    "rnn",
    [
        graph("Gradient norm", "none", "Global norm of the parameters on both ranks, before clipping.",
              *_gauges(rnn_grad_norm="norm")),
        graph("Trainer step", "s", "Mean time of the parts of a step on the trainer; lstm: of one micro-batch.",
              *_means("rnn_wait_seconds", "rnn_backward_seconds", "rnn_optimizer_seconds", "rnn_lstm_seconds")),
        graph("Server time", "s", "Mean time of a micro-batch's lookup, and of its logits, loss and gradients.",
              *_means("rnn_embedding_seconds", "rnn_decoder_seconds")),
        graph("Backward traffic", "Bps", "Computed size of the gradients; torch does not count these messages.",
              (per_second("rnn_gradient_bytes_total", "direction"), JOB + " {{direction}}")),
    ],
    folded=True,
)  # fmt: skip

HYBRID = Row(
    "hybrid",
    [
        graph("Table rows", "ops", "Rows per second: every lookup counts, and an updated row counts once a step.",
              (per_second("hybrid_lookups_total"), JOB + " looked up"),
              (per_second("hybrid_rows_total"), JOB + " updated")),
        graph("Stalls", "percentunit", "Share of its time that a rank waits, by cause.",
              (ranked(rate("hybrid_stall_seconds_total")), RANK + " {{cause}}")),
        graph("Trainer step", "percentunit", "Share of its time in each phase; backward includes the all-reduce.",
              (ranked(rate("hybrid_phase_seconds_total")), RANK + " {{phase}}")),
        graph("Lookup and update", "s", "Mean time to pool one trainer's bags, and to update the table in a step.",
              *_means("hybrid_lookup_seconds", "hybrid_update_seconds")),
        graph("Trainer skew", "s", "Time between a step's first and last gradient of the table.",
              *_quantiles("hybrid_skew_seconds")),
        graph("All-reduce", "s", "Mean time of an all-reduce of dense gradients, sampled now and then.",
              (ranked("rolecall_hybrid_allreduce_seconds"), RANK)),
        graph("Rows of a hashed table", "none", "With TABLE=hashed: the rows that each server has.",
              (ranked("rolecall_hybrid_table_rows"), RANK)),
        graph("Births and evictions", "ops", "With TABLE=hashed: rows per second that ids are given and lose.",
              (per_second("hybrid_births_total"), JOB + " births"),
              (per_second("hybrid_evictions_total", "reason"), JOB + " {{reason}}")),
        graph("Filter", "percentunit", "With TABLE=hashed: the share of the frequency filter that is taken.",
              (ranked("rolecall_hybrid_filter_fill"), RANK)),
        graph("Rows of the disk", "ops", "With TABLE_MEMORY: rows per second that are read from disk and written back.",
              (per_second("hybrid_disk_rows_total", "direction"), JOB + " {{direction}}")),
    ],
    folded=True,
)  # fmt: skip

ROWS = (RL, PS, RNN, HYBRID)
