"""Waits for torch's futures as spans of a trace: they tell a call that is waited for from one under way beside work."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from rolecall.record.recorder import recorder

WAIT = "wait"


def watch() -> None:
    """Has the waits of this process be spans while it records."""
    # what `rpc_async` and `collect_all` return; the class of torch.futures is one of its own above it
    kind: Any = torch._C.Future
    original = kind.wait
    if hasattr(original, "traced"):
        return

    @functools.wraps(original)
    def wait(self: Any) -> Any:
        if not recorder.on or self.done():
            return original(self)
        start = time.monotonic_ns()
        try:
            return original(self)
        finally:
            recorder.since(start, WAIT)

    wait.traced = True  # type: ignore[attr-defined]
    kind.wait = wait
