"""Optimizers and DistributedDataParallel without torch's compiler.

Both import torch._dynamo at their first use, only to have it leave them alone. That import takes more of a new rank's
start than Rolecall itself. A program that compiles has imported it already, and gets torch's own way.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

COMPILER = "torch._dynamo"
MARK = "__dynamo_disable"  # where torch._compile keeps what it calls in place of a function


def skip_dynamo_import() -> None:
    """From now on torch's optimizers and DistributedDataParallel do not import torch._dynamo. Where torch's private
    names are others, they do.
    """
    forward = getattr(vars(DistributedDataParallel).get("_inside_ddp_forward"), "__wrapped__", None)
    for method in [*vars(Optimizer).values(), forward]:
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and not hasattr(plain, MARK):
            setattr(plain, MARK, _unmarked(plain, method))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) and issubclass(kind, Optimizer) else None
        if step is not None and step.__code__.co_name == "_use_grad":
            kind.step = _without_gradient(step)
    if COMPILER not in sys.modules:
        vars(torch)["_dynamo"] = _Deferred(COMPILER, utils=_Deferred(f"{COMPILER}.utils", get_optimize_ddp_mode=_mode))


def _mode() -> str:
    return "ddp_optimizer"  # torch's default, which only who has imported the compiler can change


class _Deferred:
    """Stands for the module `name`, which is imported once something else than `known` is asked for."""

    def __init__(self, name: str, **known: object) -> None:
        self.__dict__ = {**known, "_name": name}

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


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
