"""The four dashboards: Overview, Ranks, RPC, Recovery."""

from __future__ import annotations

from rolecall import telemetry
from tools.dashboards.jobs import ROWS
from tools.dashboards.panels import Panel, Row, dashboard, graph, number, table, timeline
from tools.dashboards.queries import (
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

WORKING = 'rolecall_worker_state{state="running"}'
ACTIVE = 'rolecall_gang_state{state=~"gathering|running|draining|stopping"}'
AGE = total("(time() - rolecall_checkpoint_timestamp_seconds)", how="max")
SENT, RECEIVED = (per_second(f"rpc_{way}_bytes_total", "method") for way in ("sent", "received"))
WEIGHTS, SAVED = per_second("weights_bytes_total", "name"), per_second("weights_saved_bytes_total", "name")
RECOVERIES = total("increase(rolecall_recovery_seconds_bucket[1h])", "le")
JOINS = total("increase(rolecall_gang_join_seconds_bucket[1h])", "le")


def _of_rank_0(metric: str) -> str:
    """A metric that only rank 0 has."""
    return total(f"rolecall_{metric}", how="max")


def _range(expr: str, *by: str) -> str:
    """Between the greatest and the least of a job's ranks, or of those that agree in `by` as well."""
    return f"{total(expr, *by, how='max')} - {total(expr, *by, how='min')}"


def _compared(title: str, about: str, expr: str) -> Panel:
    return graph(title, "percentunit", about, (against_median(expr), RANK), width=8)


OVERVIEW = dashboard(
    "rolecall-overview",
    "Rolecall: overview",
    "What runs, its progress, speed, score and loss.",
    [
        Row("Status", [
            number("Active jobs", "none", "Jobs that have neither finished nor failed.",
                   f"count({total(ACTIVE, how='max')} == 1) or vector(0)"),
            number("Ranks up", "none", "Ranks that answered the last scrape.", f"count({RANKS}) or vector(0)"),
            number("Ranks training", "none", "Ranks with a worker in a running generation.",
                   f"sum({ranked(WORKING)})"),
            number("Alerts", "none", "Firing alerts of Rolecall.",
                   'count(ALERTS{alertname=~"Rolecall.+",alertstate="firing",job=~"$job"}) or vector(0)'),
            number("Checkpoint age", "s", "The most training that a kill of a rank 0 would cost now.", f"max({AGE})"),
            number("Evaluating", "none", "Ranks whose evaluation pauses training.",
                   f"sum({ranked('rolecall_evaluating')})"),
            table("Jobs", "State and progress of each job.",
                  ("", "none", total("rolecall_gang_state", "state", how="max") + " == 1"),
                  ("", "none", total("rolecall_job_info", "score", "unit", how="max")),
                  ("step", "none", total("rolecall_step", how="max")),
                  ("generation", "none", total("rolecall_generation", how="max")),
                  ("ranks", "none", gang("rolecall_gang_members")),
                  ("checkpoint", "s", AGE),
                  ("up", "s", total("(time() - rolecall_up_since_seconds)", how="max")), width=14),
            table("Alerts", "Pending and firing. Prometheus's own page of alerts links to the runbook.",
                  ("", "none", 'ALERTS{alertname=~"Rolecall.+",job=~"$job"}'),
                  hide=("__name__", "instance", "pod", "container", "endpoint", "service"), width=10),
        ]),
        Row("Progress", [
            graph("Steps", "ops", "Steps of rank 0 per second; 0 while it returns to a checkpoint.",
                  (f"clamp_min({total('deriv(rolecall_step[$__rate_interval])', how='max')}, 0)", JOB)),
            graph("Throughput", "ops", "Work done by training per second, in the unit that the table of jobs names.",
                  (per_second("done_total"), JOB)),
            graph("Step", "none", "Falls where a kill cost the steps after the newest checkpoint.",
                  (_of_rank_0("step"), JOB)),
            graph("Score", "none", "Return, accuracy, perplexity: the table of jobs says which; and the goal.",
                  (_of_rank_0("score"), JOB), (_of_rank_0("goal"), JOB + " goal"), least=None),
            graph("Loss", "none", "Mean training loss. The row of rl has its losses.",
                  (_of_rank_0("loss"), JOB), least=None),
            graph("Values", "none", "Further values that a job logs by name.",
                  (total("rolecall_value", "name", how="max"), JOB + " {{name}}"), least=None),
            graph("Calls", "ops", "Remote calls between the job's ranks, by method, per second.",
                  (per_second("rpc_calls_total", "method"), JOB + " {{method}}")),
            graph("Epoch", "none", "Current epoch, counted from 1.", (_of_rank_0("epoch"), JOB)),
            graph("Time left", "s", "Estimated from the speed so far.", (_of_rank_0("left_seconds"), JOB)),
            graph("Non-finite losses", "none", "Refused steps. MAX_FAILURES in a row end the job.",
                  (total("rolecall_nonfinite_losses_total"), JOB)),
        ]),
        *ROWS,
    ],
)  # fmt: skip

RANKS_BOARD = dashboard(
    "rolecall-ranks",
    "Rolecall: ranks",
    "Every rank: state, generation, stragglers and memory.",
    [
        Row("State", [
            table("Ranks", "Ranks that answered the last scrape.",
                  ("", "none", ranked("rolecall_worker_state") + " == 1"),
                  ("generation", "none", ranked("rolecall_generation")),
                  ("starts", "none", ranked("rolecall_worker_starts_total")),
                  ("memory", "bytes", ranked("rolecall_worker_resident_bytes")),
                  ("up", "s", ranked("(time() - rolecall_up_since_seconds)")),
                  hide=("exported_job", "container", "endpoint")),
            timeline("Up", "Whether the rank answers. A rank that left is no longer a target and has no band.",
                     ("down", "up"), (ranked("up"), RANK)),
            timeline("Worker", "State of the rank's worker.", telemetry.WORKER_STATES,
                     (state("worker_state", telemetry.WORKER_STATES), RANK)),
            timeline("Phase", "What the worker does that is no step.", telemetry.PHASES,
                     (state("phase", telemetry.PHASES), RANK)),
        ]),
        Row("Generations", [
            graph("Generation", "none", "Generation of each rank; 0 for none.", (ranked("rolecall_generation"), RANK)),
            graph("Generation skew", "none", "Between training ranks. A rank lags if this stays above 0.",
                  (_range("(rolecall_generation > 0)"), JOB)),
        ]),
        Row("Stragglers", [
            _compared("Observer speed (rl)", "Environment steps per second, relative to the median observer.",
                      rate("rl_env_steps_total")),
            _compared("Trainer speed (ps)", "Computed samples per second, relative to the median trainer.",
                      rate("ps_computed_samples_total")),
            _compared("Trainer load (hybrid)",
                      "Busy time, relative to the median. The others wait for the trainer with the most.",
                      f"sum by (namespace, instance) ({rate('hybrid_phase_seconds_total')})"),
        ]),
        Row("Memory and restarts", [
            graph("Worker", "bytes", "Resident memory of the worker process.",
                  (ranked("rolecall_worker_resident_bytes"), RANK)),
            graph("Supervisor", "bytes", "Resident memory of the supervisor process.",
                  (ranked("rolecall_supervisor_resident_bytes"), RANK)),
            graph("Workers started", "none", "Per rank, since its supervisor started.",
                  (ranked("rolecall_worker_starts_total"), RANK)),
            graph("Workers attached", "none", "How often a live worker joined a generation, per rank.",
                  (ranked("rolecall_worker_attaches_total"), RANK)),
            graph("Time to attach", "s", "Mean, from the order to join a generation until the worker runs in it.",
                  (f"({ranked('rolecall_worker_attach_seconds_sum')}) / "
                   f"({ranked('rolecall_worker_attach_seconds_count')})", RANK)),
            graph("Spares", "none", "Spare workers that are loaded (SPARES).",
                  (ranked("rolecall_spare_workers"), RANK)),
        ]),
    ],
)  # fmt: skip

RPC = dashboard(
    "rolecall-rpc",
    "Rolecall: RPC",
    "Remote calls by method, measured by their callers; queues and weights.",
    [
        Row("Calls", [
            graph("Calls", "ops", "Remote calls per second, by method and role of the caller.",
                  (per_second("rpc_calls_total", "role", "method"), JOB + " {{role}} {{method}}"), width=12),
            graph("Failures", "ops", "Failed calls per second: the peer ended, exceeded the deadline or raised.",
                  (per_second("rpc_failures_total", "role", "method"), JOB + " {{role}} {{method}}"), width=12),
            graph("Between roles", "ops", "Remote calls per second, by caller and callee. A method of two is in both.",
                  (total(f"(rolecall_rpc_callee * on (instance, method) group_left () {rate('rpc_calls_total')})",
                         "role", "callee"), JOB + " {{role}} to {{callee}}"), width=12),
            graph("Failure ratio", "percentunit", "Failed calls over calls.",
                  (f"{per_second('rpc_failures_total', 'method')} / {per_second('rpc_calls_total', 'method')}",
                   JOB + " {{method}}"), width=12),
            graph("Rendezvous", "s", "Time in which each rank connected to the newest generation.",
                  (ranked("rolecall_rpc_connect_seconds"), RANK), width=12),
        ]),
        Row("Latency", [
            graph("Median", "s", "Time from call to answer, 50th percentile.",
                  (quantile(0.5, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("p95", "s", "Time from call to answer, 95th percentile.",
                  (quantile(0.95, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("p99", "s", "Time from call to answer, 99th percentile.",
                  (quantile(0.99, "rpc_latency_seconds", "method"), JOB + " {{method}}")),
            graph("Mean by rank", "s", "Of all calls of a rank. An outlier is slow itself or calls a slow peer.",
                  (mean("rpc_latency_seconds", "role", "ordinal"), RANK), width=12),
            graph("Calls in flight", "none", "Mean (latency times rate).",
                  (per_second("rpc_latency_seconds_sum", "method"), JOB + " {{method}}"), width=12),
        ]),
        Row("Bytes", [
            graph("Sent", "Bps", "Payload of calls: tensors, arrays, bytes.",
                  (SENT, JOB + " {{method}}")),
            graph("Received", "Bps", "Payload of answers.",
                  (RECEIVED, JOB + " {{method}}")),
            graph("Payload per call", "bytes", "Sent and received bytes over calls.",
                  (f"({SENT} + {RECEIVED}) / {per_second('rpc_calls_total', 'method')}", JOB + " {{method}}")),
        ]),
        Row("Queues and weights", [
            graph("Queue depth", "none", "Items in a queue, and the most that it may have. A full one waits for those "
                  "who get, an empty one for those who put.",
                  (total("rolecall_queue_depth", "name"), JOB + " {{name}}"),
                  (total("rolecall_queue_size", "name"), JOB + " {{name}} size")),
            graph("Items", "ops", "Items put into a queue per second.",
                  (per_second("queue_items_total", "name"), JOB + " {{name}}")),
            graph("Waiting", "none", "Mean number of puts that wait for room, and of gets that wait for an item. A "
                  "wait counts when it ends.",
                  (per_second("queue_wait_seconds_total", "name", "method"), JOB + " {{name}} {{method}}")),
            graph("Versions behind", "none", "Versions between the newest weights and the oldest that a rank has.",
                  (_range("rolecall_weights_version", "name"), JOB + " {{name}}")),
            graph("Age of samples", "none", "Versions between the weights that made a sample and those that learn from "
                  "it: what the job logs as `age`.",
                  (total('rolecall_value{name="age"}', how="max"), JOB)),
            graph("Time to receive", "s", "Mean time from a publication until a rank has all of it.",
                  (mean("weights_seconds", "name"), JOB + " {{name}}")),
            graph("Weights", "Bps", "Bytes of weights that all ranks receive per second.",
                  (WEIGHTS, JOB + " {{name}}"), width=12),
            graph("Saved", "percentunit", "Share of the weights' bytes that did not travel: unchanged, or narrower.",
                  (f"{SAVED} / ({SAVED} + {WEIGHTS})", JOB + " {{name}}"), width=12),
        ]),
    ],
)  # fmt: skip

RECOVERY = dashboard(
    "rolecall-recovery",
    "Rolecall: recovery",
    "Restarts by cause, recovery time, joins and checkpoints.",
    [
        Row("The gang", [
            timeline("Gang", "State of rank 0's coordinator.", telemetry.GANG_STATES,
                     (state("gang_state", telemetry.GANG_STATES), JOB)),
            graph("Ranks", "none", "Members of the generation, registered ranks, ranks that a start waits for.",
                  (gang("rolecall_gang_members", "role"), JOB + " {{role}} members"),
                  (gang("rolecall_gang_registered", "role"), JOB + " {{role}} registered"),
                  (gang("rolecall_gang_wanted", "role"), JOB + " {{role}} wanted"), width=12),
        ]),
        Row("Restarts", [
            graph("Restarts", "none", "Ended generations and lost elastic ranks, by cause, in five minutes.",
                  (f"sum by (namespace, job, cause) ({ranked('increase(rolecall_gang_restarts_total[5m])')}) > 0",
                   JOB + " {{cause}}")),
            graph("Worker restarts", "none", "By rank and cause, in five minutes.",
                  (f"{ranked('increase(rolecall_worker_restarts_total[5m])')} > 0", RANK + " {{cause}}")),
            graph("Generations", "none", "Since rank 0 started.", (total("rolecall_gang_generations_total"), JOB)),
            graph("Recovery", "s", "Time from the end of a generation to the first step of the next, over an hour.",
                  (f"histogram_quantile(0.5, {RECOVERIES})", JOB + " p50"),
                  (f"histogram_quantile(0.95, {RECOVERIES})", JOB + " p95")),
            graph("Mean recovery", "s", "Since rank 0 started.",
                  (f"{total('rolecall_recovery_seconds_sum')} / {total('rolecall_recovery_seconds_count')}", JOB)),
            graph("Joins", "none", "Members that joined a running generation, in five minutes.",
                  (f"{total('increase(rolecall_gang_joins_total[5m])')} > 0", JOB)),
            graph("Time to join", "s", "Time from a member's order to load a worker until it has joined, over an hour.",
                  (f"histogram_quantile(0.5, {JOINS})", JOB + " p50"),
                  (f"histogram_quantile(0.95, {JOINS})", JOB + " p95")),
            graph("Stays", "none", "Members whose worker stayed alive from one generation to the next, since rank 0 "
                  "started.", (total("rolecall_gang_stays_total"), JOB)),
            graph("Stalls", "s", "Seconds that joins and losses cost the others' steps, by cause, in five minutes.",
                  (f"sum by (namespace, job, cause) ({ranked('increase(rolecall_stalled_seconds_total[5m])')})",
                   JOB + " {{cause}}")),
            graph("Rank 0 unreachable", "ops", "Requests to rank 0's coordinator without an answer, per second.",
                  (ranked(rate("gang_unreachable_total")), RANK)),
        ]),
        Row("Checkpoints", [
            graph("Age", "s", "Age of the newest checkpoint, and CHECKPOINT_INTERVAL.", (AGE, JOB),
                  (total("rolecall_checkpoint_interval_seconds", how="max"), JOB + " interval")),
            graph("Time to write", "s", "Mean and 95th percentile.", (mean("checkpoint_seconds"), JOB + " mean"),
                  (quantile(0.95, "checkpoint_seconds"), JOB + " p95"),
                  (total("rolecall_disk_wait_seconds", how="max"), JOB + " longest file under way")),
            graph("Failures", "none", "Checkpoints that could not be written, or copied, since rank 0 started.",
                  (total("rolecall_checkpoint_failures_total"), JOB),
                  (total("rolecall_checkpoint_copy_failures_total"), JOB + " copies")),
        ]),
        Row("Tunnels", [
            graph("Connections", "none", "Connections with peers that pass through a rank's tunnel.",
                  (ranked("rolecall_tunnel_connections"), RANK)),
            graph("Data", "Bps", "Through a rank's tunnel, both ways, per second.",
                  (ranked(rate("tunnel_bytes_total")), RANK)),
            graph("Sent away", "ops", "Strangers, and members that asked for what is not announced, per second.",
                  (per_second("tunnel_refused_total", "reason"), JOB + " {{reason}}")),
        ]),
        Row("Refusals and damage", [
            graph("Refused", "ops", "Refused requests to the coordinator per second, by reason.",
                  (per_second("gang_refused_total", "reason"), JOB + " {{reason}}"), width=12),
            graph("Metric files dropped", "none", "Files that a kill tore during a write. Their counts restart.",
                  (ranked("rolecall_metric_files_dropped_total"), RANK), width=12),
        ]),
    ],
)  # fmt: skip

BOARDS = {"overview": OVERVIEW, "ranks": RANKS_BOARD, "rpc": RPC, "recovery": RECOVERY}
