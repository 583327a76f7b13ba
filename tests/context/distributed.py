"""The program of `across` by torch's distributed autograd, in one process that calls itself: saves its gradients."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

from tests.context.test_gradients import NAMES, WIDTH, Member, across, double


class TorchContext:
    """A member's context, whose calls are torch's."""

    def __init__(self, name: str) -> None:
        self.me, self._passes = SimpleNamespace(name=name), None

    def optimize(self, *_: Any) -> None: ...

    def call(self, to: Any, method: Any, *args: Any) -> Any:
        future = rpc.rpc_async("all", serve, (str(to), method.__name__, args))
        return SimpleNamespace(result=future.wait)


MEMBERS = {name: Member(TorchContext(name)) for name in NAMES}  # type: ignore[arg-type]


def serve(name: str, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(MEMBERS[name], method)(*args)


if __name__ == "__main__":
    from tests.context import distributed

    store = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}.store")
    rpc.init_rpc("all", rank=0, world_size=1, rpc_backend_options=store)
    x = double(2, WIDTH)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [across(distributed.TorchContext("lead_0"), x, *NAMES)])  # type: ignore[attr-defined]
        grads = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]
        members = distributed.MEMBERS.items()
        saved = {name: {n: grads.get(p) for n, p in each.net.named_parameters()} for name, each in members}
        torch.save({**saved, "x": grads[x]}, sys.argv[1])
    rpc.shutdown()
