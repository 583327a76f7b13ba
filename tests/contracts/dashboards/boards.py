"""The four dashboards: Overview, Ranks, RPC, Recovery."""

from __future__ import annotations

from rolecall import telemetry
from rolecall.job import registry
from tests.contracts.dashboards.jobs import ROWS
from tests.contracts.dashboards.panels import Panel, Row, dashboard, graph, number, table, timeline
from tests.contracts.dashboards.queries import (
    JOB,
    RANK,
    RANKS,
    against_median,
    gang,
    mean,
    per_second,
    quantile,
    ranked,
    rate,
    state,
    total,
)

WATCHED = {name: registry.get(name).watch for name in registry.JOBS}
WORKING = 'rolecall_worker_state{state="running"}'
ACTIVE = 'rolecall_gang_state{state=~"gathering|running|draining|stopping"}'
AGE = total("(time() - rolecall_checkpoint_timestamp_seconds)", how="max")
CURVES = [(total(f"rolecall_{one.curve}", how="max"), f"{JOB} {one.curve_label}") for one in WATCHED.values()]
RATES = [(per_second(one.rate), f"{JOB} {one.rate_label}") for one in WATCHED.values()]
LEFT = [(total(f"rolecall_{one.left}", how="max"), JOB) for one in WATCHED.values() if one.left]
LOSSES = [total(f"rolecall_{name}", how="max") for name in ("rl_baseline_loss", "ps_loss", "rnn_loss", "hybrid_loss")]
SENT, RECEIVED = (per_second(f"rpc_{way}_bytes_total", "method") for way in ("sent", "received"))
RECOVERIES = total("increase(rolecall_recovery_seconds_bucket[1h])", "le")
EPOCHS = [total(f"rolecall_{name}", how="max") for name in ("ps_epoch", "rnn_epoch", "hybrid_epoch")]


def _range(expr: str) -> str:
    """Between the greatest and the least of a job's ranks."""
    return f"{total(expr, how='max')} - {total(expr, how='min')}"


def _compared(title: str, about: str, expr: str) -> Panel:
    return graph(title, "percentunit", about, (against_median(expr), RANK), width=8)


OVERVIEW = dashboard(
    "rolecall-overview",
    "Rolecall: overview",
    "What runs, how far it is, how fast it goes and what it has learned.",
    [
        Row("What runs", [
            number("Jobs in training", "none", "Jobs that have neither finished nor failed.",
                   f"count({total(ACTIVE, how='max')} == 1) or vector(0)"),
            number("Ranks up", "none", "Ranks that answered the last scrape.", f"count({RANKS}) or vector(0)"),
            number("Ranks at work", "none", "Ranks whose worker is part of a running generation.",
                   f"sum({ranked(WORKING)})"),
            number("Alerts", "none", "Rolecall's alerts that fire.",
                   'count(ALERTS{alertname=~"Rolecall.+",alertstate="firing",job=~"$job"}) or vector(0)'),
            number("Oldest newest checkpoint", "s", "What a kill of a rank 0 would cost at worst.", f"max({AGE})"),
            number("Evaluating", "none", "Ranks whose evaluation the training waits for.",
                   f"sum({ranked('rolecall_evaluating')})"),
            table("Jobs", "A line a job: its gang's state, and how far it is.",
                  ("", "none", total("rolecall_gang_state", "state", how="max") + " == 1"),
                  ("step", "none", total("rolecall_step", how="max")),
                  ("generation", "none", total("rolecall_generation", how="max")),
                  ("ranks", "none", gang("rolecall_gang_members")),
                  ("checkpoint", "s", AGE),
                  ("up", "s", total("(time() - rolecall_up_since_seconds)", how="max")), width=14),
            table("Alerts", "Pending and firing. The runbook is linked in Prometheus's own page of alerts.",
                  ("", "none", 'ALERTS{alertname=~"Rolecall.+",job=~"$job"}'),
                  hide=("__name__", "instance", "pod", "container", "endpoint", "service"), width=10),
        ]),
        Row("How it goes", [
            graph("Steps", "ops", "Steps of rank 0 (iterations, updates) a second; 0 while it returns to a checkpoint.",
                  (f"clamp_min({total('deriv(rolecall_step[$__rate_interval])', how='max')}, 0)", JOB)),
            graph("Throughput", "ops", "What each job counts as its work, a second.", *RATES),
            graph("Step", "none", "Falls where a kill cost what came after the newest checkpoint.",
                  (total("rolecall_step", how="max"), JOB)),
            graph("Score", "none", "The return of rl, the accuracy of ps and hybrid, the perplexity of rnn.", *CURVES,
                  least=None),
            graph("Loss", "none", "Training loss; of rl, the baseline's.", *((one, JOB) for one in LOSSES), least=None),
            graph("Epoch", "none", "The epoch in hand.", *((one, JOB) for one in EPOCHS)),
            graph("Time left", "s", "As estimated from the speed so far; rl ends when it is solved.", *LEFT),
            graph("Losses that are not finite", "none", "Steps refused for it. MAX_FAILURES in a row end the job.",
                  (total("rolecall_nonfinite_losses_total"), JOB)),
        ]),
        *ROWS,
    ],
)  # fmt: skip

RANKS_BOARD = dashboard(
    "rolecall-ranks",
    "Rolecall: ranks",
    "Every rank: whether it is up, what it does, who is slower than the others, and memory.",
    [
        Row("State", [
            table("Ranks", "A line a rank that answered the last scrape.",
                  ("", "none", ranked("rolecall_worker_state") + " == 1"),
                  ("generation", "none", ranked("rolecall_generation")),
                  ("starts", "none", ranked("rolecall_worker_starts_total")),
                  ("memory", "bytes", ranked("rolecall_worker_resident_bytes")),
                  ("up", "s", ranked("(time() - rolecall_up_since_seconds)")),
                  hide=("exported_job", "container", "endpoint")),
            timeline("Up", "Whether the rank answers. One that left is no target any more, and has no band.",
                     ("down", "up"), (ranked("up"), RANK)),
            timeline("Worker", "What the rank's worker does.", telemetry.WORKER_STATES,
                     (state("worker_state", telemetry.WORKER_STATES), RANK)),
        ]),
        Row("Generations", [
            graph("Generation", "none", "Of each rank; 0 for none.", (ranked("rolecall_generation"), RANK)),
            graph("Skew of generations", "none", "Between the ranks at work: above 0 for more than moments, one lags.",
                  (_range("(rolecall_generation > 0)"), JOB)),
            graph("Skew of policies", "none", "rl: updates between the newest and the oldest policy in use.",
                  (_range("rolecall_rl_policy_version"), JOB)),
        ]),
        Row("Stragglers", [
            _compared("rl: speed of observers", "Environment steps a second, against the median of all observers.",
                      rate("rl_env_steps_total")),
            _compared("ps: speed of trainers", "Samples computed a second, against the median of all trainers.",
                      rate("ps_computed_samples_total")),
            _compared("hybrid: work of trainers",
                      "Time at work a second, against the median: the one with the most is who the others wait for.",
                      f"sum by (namespace, instance) ({rate('hybrid_phase_seconds_total')})"),
        ]),
        Row("Memory and starts", [
            graph("Worker", "bytes", "Resident memory of the worker process.",
                  (ranked("rolecall_worker_resident_bytes"), RANK)),
            graph("Supervisor", "bytes", "Resident memory of the supervisor process.",
                  (ranked("rolecall_supervisor_resident_bytes"), RANK)),
            graph("Workers started", "none", "By each rank, since its supervisor started.",
                  (ranked("rolecall_worker_starts_total"), RANK)),
        ]),
    ],
)  # fmt: skip

RPC = dashboard(
    "rolecall-rpc",
    "Rolecall: RPC",
    "Remote calls by method, as their callers see them.",
    [
        Row("Calls", [
            graph("Calls", "ops", "Remote calls made a second, by method and the caller's role.",
                  (per_second("rpc_calls_total", "role", "method"), JOB + " {{role}} {{method}}"), width=12),
            graph("Failures", "ops", "Calls a second that failed: the peer ended, was silent for too long, or raised.",
                  (per_second("rpc_failures_total", "role", "method"), JOB + " {{role}} {{method}}"), width=12),
            graph("Share that fails", "percentunit", "Failures over calls.",
                  (f"{per_second('rpc_failures_total', 'method')} / {per_second('rpc_calls_total', 'method')}",
                   JOB + " {{method}}"), width=12),
            graph("Rendezvous", "s", "How long a generation's connecting took on each rank; the newest one.",
                  (ranked("rolecall_rpc_connect_seconds"), RANK), width=12),
        ]),
        Row("Latency", [
            graph("Median", "s", "From the call to its answer, half of the calls.",
                  (quantile(0.5, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("95 of 100", "s", "95 % of the calls are answered within that.",
                  (quantile(0.95, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("99 of 100", "s", "99 % of the calls are answered within that.",
                  (quantile(0.99, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("Mean by rank", "s", "Of all calls that a rank makes: who stands out is slow, or calls one that is.",
                  (mean("rpc_latency_seconds", "role", "ordinal"), RANK), width=12),
            graph("Calls under way", "none", "On average (latency times rate).",
                  (per_second("rpc_latency_seconds_sum", "method"), JOB + " {{method}}"), width=12),
        ]),
        Row("Bytes", [
            graph("Sent", "Bps", "Payload of calls: tensors, arrays, bytes.",
                  (SENT, JOB + " {{method}}")),
            graph("Received", "Bps", "Payload of answers.",
                  (RECEIVED, JOB + " {{method}}")),
            graph("Payload of a call", "bytes", "Sent and received, over calls.",
                  (f"({SENT} + {RECEIVED}) / {per_second('rpc_calls_total', 'method')}", JOB + " {{method}}")),
        ]),
    ],
)  # fmt: skip

RECOVERY = dashboard(
    "rolecall-recovery",
    "Rolecall: recovery",
    "Restarts by cause, how long they take, and what a kill would cost.",
    [
        Row("The gang", [
            timeline("Gang", "What rank 0's coordinator does.", telemetry.GANG_STATES,
                     (state("gang_state", telemetry.GANG_STATES), JOB)),
            graph("Ranks", "none", "Ranks at work, ranks that are in, and ranks that a start waits for, by role.",
                  (gang("rolecall_gang_members", "role"), JOB + " {{role}} at work"),
                  (gang("rolecall_gang_registered", "role"), JOB + " {{role}} in"),
                  (gang("rolecall_gang_wanted", "role"), JOB + " {{role}} needed"), width=12),
        ]),
        Row("Restarts", [
            graph("Restarts", "none", "Generations that ended, and elastic ranks lost, by cause, in five minutes.",
                  (f"sum by (namespace, job, cause) ({ranked('increase(rolecall_gang_restarts_total[5m])')}) > 0",
                   JOB + " {{cause}}")),
            graph("Workers that ended early", "none", "By rank and cause, in five minutes.",
                  (f"{ranked('increase(rolecall_worker_restarts_total[5m])')} > 0", RANK + " {{cause}}")),
            graph("Generations", "none", "Started since rank 0 was.", (total("rolecall_gang_generations_total"), JOB)),
            graph("Recovery", "s", "From the end of a generation to the first step of the next, in an hour.",
                  (f"histogram_quantile(0.5, {RECOVERIES})", JOB + " p50"),
                  (f"histogram_quantile(0.95, {RECOVERIES})", JOB + " p95")),
            graph("Recovery, mean", "s", "Since rank 0 was started.",
                  (f"{total('rolecall_recovery_seconds_sum')} / {total('rolecall_recovery_seconds_count')}", JOB)),
            graph("Rank 0 not reached", "ops", "Requests to rank 0's control port a second that got no answer.",
                  (ranked(rate("gang_unreachable_total")), RANK)),
        ]),
        Row("Checkpoints", [
            graph("Age of the newest", "s", "What a kill of rank 0 would cost now, and what was asked for.", (AGE, JOB),
                  (total("rolecall_checkpoint_interval_seconds", how="max"), JOB + " asked for")),
            graph("Time to write", "s", "Mean, and the slowest of 20.", (mean("checkpoint_seconds"), JOB + " mean"),
                  (quantile(0.95, "checkpoint_seconds"), JOB + " p95")),
            graph("Could not be written", "none", "Since rank 0 was started.",
                  (total("rolecall_checkpoint_failures_total"), JOB)),
        ]),
        Row("Strangers and damage", [
            graph("Refused", "ops", "Requests to the control port that were refused, by reason, a second.",
                  (per_second("gang_refused_total", "reason"), JOB + " {{reason}}"), width=12),
            graph("Metric files dropped", "none", "Torn by a kill in the middle of a write; their counts begin anew.",
                  (ranked("rolecall_metric_files_dropped_total"), RANK), width=12),
        ]),
    ],
)  # fmt: skip

BOARDS = {"overview": OVERVIEW, "ranks": RANKS_BOARD, "rpc": RPC, "recovery": RECOVERY}
