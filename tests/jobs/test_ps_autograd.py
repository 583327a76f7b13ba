"""UPDATE_MODE=autograd's model on the server: the gradients of passes that overlap."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rolecall.context.passes import leaves
from rolecall.jobs.ps import PsSettings, model
from rolecall.jobs.ps.messages import TrainerId
from rolecall.jobs.ps.server_model import ServerModel
from tests.integration import learning

SETTINGS = PsSettings(job="ps", update_mode="autograd", model="tests.integration.learning:small")
FIRST, SECOND = TrainerId("trainer_0", 1, 0), TrainerId("trainer_1", 1, 0)


def expected(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of one process with these parameters."""
    local: nn.Module = model.build(SETTINGS)
    learning.unflatten(flat, local)
    model.loss(local(inputs), targets).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in local.parameters() if parameter.grad is not None])


def backward(server: ServerModel, trainer: TrainerId, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The gradient of a pass, and the version of its parameters."""
    parameters = leaves([get_gradient_edge(output)])
    gradients = torch.autograd.grad(model.loss(output, targets), parameters)
    flat, version, _ = server.gradient(trainer, dict(zip(parameters, gradients, strict=True)))
    return flat, version


def test_passes_that_overlap_have_the_gradients_of_the_parameters_they_began_with() -> None:
    """Between one trainer's forward and backward pass the parameters change, and another's whole pass is made."""
    inputs, targets = learning.blobs()[0].tensors
    old = learning.flatten(model.build(SETTINGS))
    new = old + 1.0
    server = ServerModel(SETTINGS, torch.device("cpu"))
    server.publish(7, old)
    output = server.forward(FIRST, inputs[:8])
    server.publish(8, new)
    second, after = backward(server, SECOND, server.forward(SECOND, inputs[8:]), targets[8:])
    first, before = backward(server, FIRST, output, targets[:8])
    assert (before, after) == (7, 8)
    torch.testing.assert_close(first, expected(old, inputs[:8], targets[:8]))
    torch.testing.assert_close(second, expected(new, inputs[8:], targets[8:]))
