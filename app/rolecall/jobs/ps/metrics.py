"""The metrics of `ps`. The metrics of remote calls have the bytes and the latency of each exchange, by method."""

from __future__ import annotations

from rolecall import Metric

WEIGHTS = "parameters"  # their name in metrics
STALENESS_UPDATES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
FAST_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
LEAD, TRAINER = ("rank 0",), ("trainer",)


def _time(name: str, meaning: str, roles: tuple[str, ...], buckets: tuple[float, ...] = Metric.DURATION) -> Metric:
    return Metric("histogram", f"ps_{name}_seconds", meaning, buckets=buckets, roles=roles)


METRICS = (
    Metric("gauge", "ps_train_accuracy_ratio", "Training accuracy of the last update's samples, 0 to 1.", roles=LEAD),
    Metric(
        "histogram",
        "ps_staleness_updates",
        "Updates of the parameters between a gradient's computation and its arrival.",
        buckets=STALENESS_UPDATES,
        roles=LEAD,
    ),
    Metric(
        "counter", "ps_gradients_refused_total", "Gradients rejected because they exceed MAX_STALENESS.", roles=LEAD
    ),
    Metric("counter", "ps_trainers_dropped_total", "Trainers lost from a running generation.", roles=LEAD),
    _time("update", "Time of one update of a shard.", ("ps",), FAST_SECONDS),
    Metric(
        "counter",
        "ps_payload_bytes_total",
        "Encoded bytes of gradients sent (up) and parameters received (down) by trainers.",
        labels=("direction",),
        roles=TRAINER,
    ),
    Metric("counter", "ps_computed_samples_total", "Training samples whose gradients were computed.", roles=TRAINER),
    _time("compute", "Time of a batch's forward and backward pass.", TRAINER),
    _time("round", "Time of the inner steps of a round (UPDATE_MODE=local).", TRAINER),
    Metric(
        "counter",
        "ps_hidden_seconds_total",
        "Computation that overlaps the exchange of differences (UPDATE_MODE=local).",
        roles=TRAINER,
    ),
    _time("wait", "Time in which a trainer waits for parameters or a batch.", TRAINER, FAST_SECONDS),
)
