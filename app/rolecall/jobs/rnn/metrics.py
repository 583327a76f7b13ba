"""The metrics of `rnn`. The metrics of remote calls have the bytes and the latency of each call, by method."""

from __future__ import annotations

from rolecall import Metric


def _time(name: str, meaning: str, role: str) -> Metric:
    return Metric("histogram", f"rnn_{name}_seconds", meaning, roles=(role,))


METRICS = (
    Metric("gauge", "rnn_grad_norm", "Global gradient norm of the last step, before clipping.", roles=("ps",)),
    Metric(
        "counter",
        "rnn_gradient_bytes_total",
        "Bytes of gradients sent and received by the backward pass, computed from shapes.",
        labels=("direction",),
        roles=("ps",),
    ),
    _time("embedding", "Duration of a micro-batch's embedding lookup.", "ps"),
    _time("decoder", "Duration of a micro-batch's logits, loss and their gradients.", "ps"),
    _time("lstm", "Duration of a micro-batch's forward pass through the LSTM.", "trainer"),
    _time("wait", "Time per step in which the ps waits for the trainer in the forward pass.", "ps"),
    _time("backward", "Duration of a step's backward pass through both ranks.", "ps"),
    _time("optimizer", "Duration of a step's clipping and optimizer updates on both ranks.", "ps"),
)
