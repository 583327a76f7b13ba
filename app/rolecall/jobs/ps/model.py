"""The model: the tutorial's ConvNet or the user's, and its parameters as one flat vector cut into parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data

SMALL = 2**18  # elements (1 MiB); parts are no smaller, but for what comes before a large parameter


class ConvNet(nn.Module):
    """The tutorial's network: images [n, 1, 28, 28] to log-probabilities [n, 10].

    With two `devices`, the convolutions are on the first and the rest on the second. The order of the dimensions in
    memory, and max-pool before the ReLU that it commutes with, take a quarter off a step on the CPU.
    """

    def __init__(self, dropout: float = 0.25, devices: tuple[torch.device, ...] = ()) -> None:
        super().__init__()
        first, last = (devices[0], devices[-1]) if devices else (None, None)
        self.conv1 = nn.Conv2d(1, 32, 3, device=first)
        self.conv2 = nn.Conv2d(32, 64, 3, device=first)
        self.dropout1 = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(9216, 128, device=last)
        # not Dropout2d, as the tutorial has it: there are no channels left to drop
        self.dropout2 = nn.Dropout(2 * dropout)
        self.fc2 = nn.Linear(128, 10, device=last)

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, 1, 28, 28] to log-probabilities [n, 10]."""
        x = images.to(self.conv1.weight.device, memory_format=torch.channels_last)
        x = functional.relu(self.conv1(x), inplace=True)
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2), inplace=True)
        x = torch.flatten(self.dropout1(x), 1).to(self.fc1.weight.device)
        x = functional.relu(self.fc1(x))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def build(settings: PsSettings, devices: tuple[torch.device, ...] = ()) -> nn.Module:
    """The model, initialised from SEED. Raises UsageError where MODEL does not give one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if not settings.model:
            return ConvNet(settings.dropout, devices)
        model = settings.build("model")
    if not isinstance(model, nn.Module):
        raise UsageError(f"MODEL={settings.model}: returns a {type(model).__name__}, not a torch module")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(f"MODEL={settings.model}: has lazy parameters; call the model once in the factory")
    kinds = {parameter.dtype for parameter in trainable(model)}
    if kinds != {torch.float32}:
        actual = ", ".join(sorted(map(str, kinds))) or "none"
        raise UsageError(f"MODEL={settings.model}: the parameters to train must be torch.float32, not {actual}")
    return model.to(devices[0]) if devices else model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, and so exchanged; frozen ones stay as the factory built them."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer(parameters: list[nn.Parameter], settings: PsSettings, momentum: float) -> torch.optim.Optimizer:
    """The optimizer that OPTIMIZER names, with LR; fused: one pass over the parameters."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, settings.lr, fused=True)
    return torch.optim.SGD(parameters, settings.lr, momentum, fused=True)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy [] of outputs [n, classes] and class numbers [n]. Of log-probabilities, which log_softmax
    keeps, it is the tutorial's NLL loss.
    """
    return functional.cross_entropy(output, targets)


def check(settings: PsSettings) -> None:
    """Refuses what can never work, before anything starts. Raises UsageError."""
    model = build(settings).eval()
    train, _ = data.load(settings)
    where = f"MODEL={settings.model or 'ConvNet'} DATASET={settings.dataset}"
    with UsageError.wrap(f"{where}: the data gives no batch"):
        inputs, targets = train.batch(torch.arange(min(2, len(train))))
    shape = tuple(inputs.shape)
    with UsageError.wrap(f"{where}: the model cannot take a batch of shape {shape}"), torch.no_grad():
        output = model(inputs)
        float(loss(output, targets))
    if output.ndim != 2:
        raise UsageError(f"{where}: the model's outputs have shape {tuple(output.shape)}, not (n, classes)")
    if isinstance(train, data.Images) and output.shape[1] <= int(train.labels.max()):
        raise UsageError(f"{where}: the model has {output.shape[1]} classes, the data go up to {train.labels.max()}")
    total = sum(parameter.numel() for parameter in trainable(model))
    if settings.servers > total:
        raise UsageError(f"SERVERS={settings.servers}: more than the {total} parameters to train")


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of the flat vector, which the server with ordinal `server` holds."""

    start: int
    stop: int
    server: int


def parts(model: nn.Module, settings: PsSettings) -> tuple[Part, ...]:
    """Cuts the parameters that are trained, laid end to end, into equal shards for the servers, and these into parts.

    A part is what travels at once. The gradient of a part that is ready goes out while the backward pass still works on
    those before it, so what comes before a large parameter is a part of its own. With UPDATE_MODE=autograd nothing of
    it travels.
    """
    total, servers = sum(p.numel() for p in trainable(model)), settings.servers
    if settings.update_mode == "autograd":
        return (Part(0, total, 0),)
    cuts, begun, offset = set[int](), 0, 0
    for parameter in trainable(model):
        if parameter.numel() >= SMALL or offset - begun >= SMALL:
            cuts.add(offset)
            begun = offset
        offset += parameter.numel()
    if total - begun < SMALL:
        cuts.discard(begun)  # the rest is too small for a part of its own
    bounds = [total * server // servers for server in range(servers + 1)]
    edges = sorted({0, total, *cuts, *bounds})
    owners = {start: next(s for s in range(servers) if start < bounds[s + 1]) for start in edges[:-1]}
    return tuple(Part(start, stop, owners[start]) for start, stop in pairwise(edges))


def views(flat: Tensor, model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter that is trained, and the view of `flat` [total] that has its elements and its shape."""
    offset = 0
    for parameter in trainable(model):
        yield parameter, flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()


def flatten(model: nn.Module) -> Tensor:
    """The parameters that are trained, end to end [total], on the CPU."""
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in trainable(model)])


def unflatten(flat: Tensor, model: nn.Module) -> None:
    """Sets the parameters that are trained from `flat` [total], in place."""
    with torch.no_grad():
        for parameter, view in views(flat, model):
            parameter.copy_(view)


def lend(flat: Tensor, model: nn.Module) -> None:
    """Has the parameters that are trained use the memory of `flat` [total]."""
    for parameter, view in views(flat, model):
        parameter.data = view


def release(model: nn.Module) -> None:
    """Frees the memory of the parameters that are trained; they keep their shapes."""
    for parameter in trainable(model):
        parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def buffers(model: nn.Module) -> tuple[Tensor, ...]:
    """Copies of the model's buffers (running means and the like), on the CPU."""
    return tuple(buffer.detach().to("cpu", copy=True) for buffer in model.buffers())


def load_buffers(model: nn.Module, values: tuple[Tensor, ...]) -> None:
    """Sets the model's buffers; with no values they stay as they are."""
    for buffer, value in zip(model.buffers(), values, strict=False):
        buffer.copy_(value)
