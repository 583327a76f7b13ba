"""Optimizers without torch's compiler.

torch's optimizers import torch._dynamo at their first use, only to have it leave them alone. That import takes more of
a new rank's start than Rolecall itself. A program that compiles has imported it already, and gets torch's own way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"
MARK = "__dynamo_disable"  # where torch._compile keeps what it calls in place of a function


def lighten() -> None:
    """From now on torch's optimizers do not import torch._dynamo. Where torch's private names are others, they do."""
    for method in vars(Optimizer).values():
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and not hasattr(plain, MARK):
            setattr(plain, MARK, _unmarked(plain, method))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if step is not None and step.__code__.co_name == "_use_grad":
            kind.step = _without_gradient(step)


def _unmarked(plain: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if COMPILER not in sys.modules:
            return plain(*args, **options)
        vars(plain).pop(MARK, None)
        return method(*args, **options)

    return call


def _without_gradient(step: Any) -> Callable[..., Any]:
    """An optimizer's `step`, as torch wraps it, but for a mark for the compiler."""

    @functools.wraps(step)
    def call(self: Optimizer, *args: Any, **options: Any) -> Any:
        if COMPILER in sys.modules:
            return step(self, *args, **options)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step.__wrapped__(self, *args, **options)

    return call
