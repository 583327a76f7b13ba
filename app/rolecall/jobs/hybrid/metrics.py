"""The metrics of `hybrid`. Bytes and latency of each call are in the metrics of remote calls, by method."""

from __future__ import annotations

from rolecall import Metric

FAST = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


def _time(name: str, meaning: str, role: str) -> Metric:
    return Metric("histogram", f"hybrid_{name}_seconds", meaning, buckets=FAST, roles=(role,))


METRICS = (
    Metric("counter", "hybrid_lookups_total", "Rows that were looked up, each as often as it was.", roles=("ps",)),
    Metric("counter", "hybrid_rows_total", "Rows that were updated, each once a step.", roles=("ps",)),
    Metric("counter", "hybrid_stall_seconds_total", "Time in which a rank stood still, by cause.", labels=("cause",),
           roles=("ps", "trainer")),
    _time("lookup", "Time of pooling one trainer's bags.", "ps"),
    _time("update", "Time of a step's update of the table.", "ps"),
    _time("skew", "Time from a step's first gradient of the table to its last.", "ps"),
    Metric("counter", "hybrid_phase_seconds_total", "Time spent in a phase of steps: dense (forward pass), backward "
           "(with its all-reduce), optimizer.", labels=("phase",),
           roles=("trainer",)),
    Metric("gauge", "hybrid_allreduce_seconds", "Mean time of an all-reduce of dense gradients, which is looked at now "
           "and then.", roles=("trainer",)),
)  # fmt: skip
