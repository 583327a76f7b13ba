"""UPDATE_MODE=autograd's model on the server: the gradients of passes that overlap, over real RPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from bench import ranks
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.server_model import ServerModel
from tests.integration import learning

SETTINGS = PsSettings(job="ps", update_mode="autograd", model="tests.integration.learning:small")


def gradient(remote: rpc.RRef[ServerModel], context_id: int) -> tuple[Tensor, int, int]:
    """Called at the server: the flat gradient in `context_id`, its version, and how many tensors autograd holds."""
    held = len(dist_autograd.get_gradients(context_id))  # type: ignore[attr-defined]
    flat, version, _ = remote.local_value().gradient(context_id)
    return flat, version, held


def expected(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of one process with these parameters."""
    local: nn.Module = model.build(SETTINGS)
    learning.unflatten(flat, local)
    model.loss(local(inputs), targets).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in local.parameters() if parameter.grad is not None])


def _pass(
    remote: rpc.RRef[ServerModel], trainer: str, inputs: Tensor, targets: Tensor, between: Any
) -> tuple[Any, ...]:
    """Forward, `between()`, backward; what the server then holds."""
    with dist_autograd.context() as context_id:
        loss = model.loss(remote.rpc_sync().forward(trainer, context_id, inputs), targets)
        between()
        dist_autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
        held: tuple[Any, ...] = rpc.rpc_sync("server", gradient, (remote, context_id))
        return held


def _overlap(tell: Any) -> list[tuple[float, int, int]]:
    """Between one trainer's forward and backward pass the parameters change, and another's whole pass is made."""
    inputs, targets = learning.blobs()[0].tensors
    old = learning.flatten(model.build(SETTINGS))
    new = old + 1.0
    remote = rpc.remote("server", ServerModel, args=(SETTINGS, 1, torch.device("cpu")))
    remote.rpc_sync().publish(7, old)
    with ThreadPoolExecutor(1) as other:

        def between() -> None:
            remote.rpc_sync().publish(8, new)
            second.append(other.submit(_pass, remote, "trainer_1", inputs[8:], targets[8:], lambda: None).result(30))

        second: list[tuple[Any, ...]] = []
        first = _pass(remote, "trainer_0", inputs[:8], targets[:8], between)
    wanted = expected(old, inputs[:8], targets[:8]), expected(new, inputs[8:], targets[8:])
    return [
        (float((actual - right).abs().max()), version, held)
        for (actual, version, held), right in zip((first, second[0]), wanted, strict=True)
    ]


def test_passes_that_overlap_have_the_gradients_of_the_parameters_they_began_with() -> None:
    """What the tutorial checks: the context has gradients at the server. And what it cannot do: a step in between."""
    passes = ranks.run(["trainer", "server"], _overlap, deadline=120)
    assert [version for _, version, _ in passes] == [7, 8]
    assert [held for *_, held in passes] == [4, 4]  # two layers' weights and biases
    assert max(error for error, *_ in passes) < 1e-5
