"""The metrics of `ps`. Bytes and latency of each exchange are in the metrics of remote calls, by method."""

from __future__ import annotations

from rolecall import Metric

STALENESS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

METRICS = (
    Metric("gauge", "ps_train_accuracy_ratio", "Share of the last update's samples classified correctly.",
           roles=("rank 0",)),
    Metric("histogram", "ps_staleness_updates",
           "Updates between the parameters that a gradient was computed with and those it arrived at.",
           buckets=STALENESS, roles=("rank 0",)),
    Metric("counter", "ps_gradients_refused_total", "Gradients staler than MAX_STALENESS.", roles=("rank 0",)),
    Metric("counter", "ps_gradients_late_total", "Gradients that came after their update (BACKUP_TRAINERS).",
           roles=("rank 0",)),
    Metric("counter", "ps_gradients_dropped_total",
           "Late gradients that were dropped, because their batches had been handed out again.", roles=("rank 0",)),
    Metric("counter", "ps_trainers_dropped_total", "Trainers that were lost from a generation.", roles=("rank 0",)),
    Metric("histogram", "ps_update_seconds", "Time of one update of a shard.", buckets=FAST, roles=("ps",)),
    Metric("counter", "ps_payload_bytes_total", "Gradients that trainers send (up) and parameters that they receive "
           "(down), as they travel, in bytes.", labels=("direction",), roles=("trainer",)),
    Metric("counter", "ps_computed_samples_total", "Training samples whose gradients were computed.",
           roles=("trainer",)),
    Metric("histogram", "ps_compute_seconds", "Time of a batch's forward and backward pass.", buckets=Metric.DURATION,
           roles=("trainer",)),
    Metric("histogram", "ps_round_seconds", "Time of the inner steps of a round (UPDATE_MODE=local).",
           buckets=Metric.DURATION, roles=("trainer",)),
    Metric("counter", "ps_hidden_seconds_total",
           "Time that a trainer computed while an exchange of its differences was under way (UPDATE_MODE=local).",
           roles=("trainer",)),
    Metric("histogram", "ps_wait_seconds", "Time that a trainer waited for parameters or a batch.", buckets=FAST,
           roles=("trainer",)),
)  # fmt: skip
