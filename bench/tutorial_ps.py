"""What `ps` is measured against: a parameter server the way the PyTorch tutorial on it does it.

The whole model lives at the server. The trainer runs forward through a reference to it, distributed autograd runs
backward through both processes, and a distributed optimizer steps the parameters where they are. One trainer: a second
one's step changes the parameters in place while the first one's backward pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from bench import local_ps, ranks
from rolecall.config import cores
from rolecall.jobs.ps import data, mnist

BATCH_SIZE = 32
LEARNING_RATE = 0.03
DEADLINE = 120.0  # a fail-safe


def samples_per_s(seconds: float = 8.0, threads: int = 0) -> float:
    """Samples a second of one trainer on the digits, over `seconds` seconds after a warm-up.

    Both processes have `threads` threads of torch; 0: all cores, which is torch's own default.

    Raises RuntimeError where a process fails, TimeoutError where they take much too long.
    """
    names, limit = ["trainer", "server"], DEADLINE + seconds
    rate: float = ranks.run(names, _train, seconds, threads or cores(), deadline=limit, transports=())
    return rate


class Net(nn.Module):
    """Images [n, 1, 28, 28] to log-probabilities [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout2d(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


class ParameterServer:
    """The model, and references to its parameters for the optimizer."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)  # of RPC's threads from now on; `ranks` leaves them one
        torch.manual_seed(1)
        self.model = Net()

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.model(images)
        return output

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        gradients: dict[Tensor, Tensor] = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]
        return {parameter.cpu(): gradient.cpu() for parameter, gradient in gradients.items()}

    def parameters(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


def _train(tell: ranks.Tell, seconds: float, threads: int) -> float:
    torch.set_num_threads(threads)
    server = rpc.remote("server", ParameterServer, args=(threads,))
    optimizer = DistributedOptimizer(torch.optim.SGD, _at(server, ParameterServer.parameters), lr=LEARNING_RATE)
    order = _batches()

    def step() -> int:
        images, targets = next(order)
        with dist_autograd.context() as context:
            output = _at(server, ParameterServer.forward, images)
            loss = functional.nll_loss(output, targets)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            # as the tutorial does at every step
            if not _at(server, ParameterServer.gradients, context):
                raise RuntimeError("no gradients at the server")
            optimizer.step(context)
        return len(targets)

    step()  # connects, and imports what the optimizer needs
    return local_ps.steady(step, local_ps.WARM_SECONDS, seconds)


class Samples(Dataset[tuple[Tensor, int]]):
    """The digits as torchvision's MNIST gives its own: bytes, converted and normalised one by one."""

    def __init__(self) -> None:
        train, _ = data.digits()
        self.pixels, self.labels = (train.pixels * 255).to(torch.uint8), train.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(np.array(self.pixels[index].numpy(), copy=True)).view(28, 28, 1)
        image = image.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        mean, std = (torch.tensor([value]).view(-1, 1, 1) for value in (mnist.MEAN, mnist.STD))
        return image.clone().sub_(mean).div_(std), int(self.labels[index])


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    loader = DataLoader(Samples(), BATCH_SIZE, shuffle=True)
    while True:
        yield from loader


def _at(server: rpc.RRef[ParameterServer], method: Callable[..., Any], *args: Any) -> Any:
    """Call `method(*args)` on the server, where it lives."""
    return rpc.rpc_sync(server.owner(), _call, args=(server, method, *args))


def _call(server: rpc.RRef[ParameterServer], method: Callable[..., Any], *args: Any) -> Any:
    return method(server.local_value(), *args)
