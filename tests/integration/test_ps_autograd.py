"""UPDATE_MODE=autograd's model on the server: the gradients of passes that overlap, over real RPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.autograd import Tower, forward
from tests.benchmarks import ranks
from tests.integration import learning

SETTINGS = PsSettings(job="ps", update_mode="autograd", model="tests.integration.learning:small")


def gradient(tower: rpc.RRef[Tower], context_id: int) -> tuple[Tensor, int, int]:
    """Called at the server: the flat gradient in `context_id`, its version, and how many tensors autograd holds there."""
    held = len(dist_autograd.get_gradients(context_id))  # type: ignore[attr-defined]
    found, version, _ = tower.local_value().gradient(context_id)
    return found, version, held


def publish(tower: rpc.RRef[Tower], version: int, flat: Tensor) -> None:
    tower.local_value().publish(version, flat)


def expected(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of one process with these parameters."""
    local: nn.Module = model.build(SETTINGS)
    model.unflatten(flat, local)
    model.loss(local(inputs), targets).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in local.parameters() if parameter.grad is not None])


def _pass(tower: rpc.RRef[Tower], trainer: str, inputs: Tensor, targets: Tensor, between: Any) -> tuple[Any, ...]:
    """Forward, `between()`, backward; what the server then holds."""
    with dist_autograd.context() as context_id:
        loss = model.loss(rpc.rpc_sync("server", forward, (tower, trainer, context_id, inputs)), targets)
        between()
        dist_autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
        found: tuple[Any, ...] = rpc.rpc_sync("server", gradient, (tower, context_id))
        return found


def _overlap(tell: Any) -> list[tuple[float, int, int]]:
    """Between one trainer's forward and backward pass the parameters change, and another's whole pass is made."""
    inputs, targets = learning.blobs()[0].tensors
    old = model.flatten(model.build(SETTINGS))
    new = old + 1.0
    tower = rpc.remote("server", Tower, args=(SETTINGS, 1))
    rpc.rpc_sync("server", publish, (tower, 7, old))
    with ThreadPoolExecutor(1) as other:

        def between() -> None:
            rpc.rpc_sync("server", publish, (tower, 8, new))
            second.append(other.submit(_pass, tower, "trainer_1", inputs[8:], targets[8:], lambda: None).result(30))

        second: list[tuple[Any, ...]] = []
        first = _pass(tower, "trainer_0", inputs[:8], targets[:8], between)
    wanted = expected(old, inputs[:8], targets[:8]), expected(new, inputs[8:], targets[8:])
    return [
        (float((made - right).abs().max()), version, held)
        for (made, version, held), right in zip((first, second[0]), wanted, strict=True)
    ]


def test_passes_that_overlap_have_the_gradients_of_the_parameters_they_began_with() -> None:
    """What the tutorial checks: the context_id has gradients at the server. And what it cannot do: a step in between."""
    found = ranks.run(["trainer", "server"], _overlap, deadline=60)
    assert [version for _, version, _ in found] == [7, 8]
    assert [held for *_, held in found] == [4, 4]  # two layers' weights and biases
    assert max(error for error, *_ in found) < 1e-5
