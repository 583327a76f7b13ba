"""The metrics of `rnn`. Bytes and latency of each call are in the metrics of remote calls, by method."""

from __future__ import annotations

from rolecall import Metric


def _time(name: str, meaning: str, role: str) -> Metric:
    return Metric("histogram", f"rnn_{name}_seconds", meaning, roles=(role,))


METRICS = (
    Metric("gauge", "rnn_grad_norm", "Global norm of the last step's gradient before clipping.", roles=("trainer",)),
    Metric("counter", "rnn_gradient_bytes_total", "Gradients that the backward pass sends and receives, as computed.",
           labels=("direction",), roles=("trainer",)),
    _time("embedding", "Time of a micro-batch's lookup.", "ps"),
    _time("decoder", "Time of a micro-batch's logits, loss and their gradients.", "ps"),
    _time("lstm", "Time of a micro-batch's forward pass through the LSTM.", "trainer"),
    _time("wait", "Time in which the trainer waits for the ps in a step's forward pass.", "trainer"),
    _time("backward", "Time of a step's distributed backward pass.", "trainer"),
    _time("optimizer", "Time of a step's clipping and optimizers, on both ranks.", "trainer"),
)  # fmt: skip
