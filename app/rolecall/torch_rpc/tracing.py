"""Torch's collectives as spans of a worker's trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rolecall.record.recorder import Span, recorder

COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
}


def watch_collectives() -> None:
    """Makes torch's collectives spans while this rank records."""
    for function, name in COLLECTIVES.items():
        original = getattr(dist, function)
        if not hasattr(original, "traced"):
            setattr(dist, function, _collective(original, name))


def _collective(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any, **values: Any) -> Any:
        if not recorder.on:
            return function(*args, **values)
        tensors = (each for each in (*args, *values.values()) if isinstance(each, torch.Tensor))
        span = recorder.begin(name, bytes=sum(each.nbytes for each in tensors))
        try:
            work = function(*args, **values)
        except Exception as error:
            span.end(error)
            raise
        if work is None:
            span.end()
        else:
            _end_with(work, span)
        return work

    traced.traced = True  # type: ignore[attr-defined]
    return traced


def _end_with(work: Any, span: Span) -> None:
    """Ends `span` with an asynchronous collective."""
    try:
        work.get_future().add_done_callback(lambda _: span.end())
    except RuntimeError:  # of a backend, or a collective, without futures
        span.attributes["end"] = "not known"
        span.end()
