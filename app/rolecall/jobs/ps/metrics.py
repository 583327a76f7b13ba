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
    Metric("counter", "ps_trainers_dropped_total", "Trainers that were lost from a generation.", roles=("rank 0",)),
    Metric("histogram", "ps_update_seconds", "Time of one update of a shard.", buckets=FAST, roles=("ps",)),
    Metric("counter", "ps_computed_samples_total", "Training samples whose gradients were computed.",
           roles=("trainer",)),
    Metric("histogram", "ps_compute_seconds", "Time of a batch's forward and backward pass.", buckets=Metric.DURATION,
           roles=("trainer",)),
    Metric("histogram", "ps_wait_seconds", "Time that a trainer waited for parameters or a batch.", buckets=FAST,
           roles=("trainer",)),
)  # fmt: skip
