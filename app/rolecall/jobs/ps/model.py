"""The model: the tutorial's ConvNet or the user's, and its parameters as one flat vector cut into parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall import UsageError
from rolecall.jobs.ps import PsSettings, data

MIN_PART_ELEMENTS = 2**18  # 1 MiB; only a part before a large parameter is smaller
DROPOUT = 0.25  # of the tutorial's first dropout; the second is twice that


class ConvNet(nn.Module):
    """The tutorial's network: images [n, 1, 28, 28] to log-probabilities [n, 10].

    The order of the dimensions in memory, and max-pool before the ReLU that it commutes with, save a quarter of a step
    on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout2d(DROPOUT)
        self.fc1 = nn.Linear(9216, 128)
        # not Dropout2d, as in the tutorial: no channels are left to drop
        self.dropout2 = nn.Dropout(2 * DROPOUT)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, 1, 28, 28] to log-probabilities [n, 10]."""
        x = images.to(memory_format=torch.channels_last)
        x = functional.relu(self.conv1(x), inplace=True)
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2), inplace=True)
        x = torch.flatten(self.dropout1(x), 1)
        x = functional.relu(self.fc1(x))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def build(settings: PsSettings) -> nn.Module:
    """The model, initialised from SEED. Raises UsageError if MODEL does not give one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if not settings.model:
            return ConvNet()
        model = settings.build("model")
    if not isinstance(model, nn.Module):
        raise UsageError(f"MODEL={settings.model}: returns a {type(model).__name__}, not a torch module")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        raise UsageError(f"MODEL={settings.model}: has lazy parameters; call the model once in the factory")
    kinds = {parameter.dtype for parameter in trainable(model)}
    if kinds != {torch.float32}:
        actual = ", ".join(sorted(map(str, kinds))) or "none"
        raise UsageError(f"MODEL={settings.model}: the parameters to train must be torch.float32, not {actual}")
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and exchanged; frozen ones stay as the factory built them."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count(model: nn.Module) -> int:
    """The number of elements that are trained."""
    return sum(parameter.numel() for parameter in trainable(model))


def optimizer(parameters: list[nn.Parameter], settings: PsSettings) -> torch.optim.Optimizer:
    """The optimizer of OPTIMIZER with LR; fused: one pass over the parameters."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, settings.lr, fused=True)
    return torch.optim.SGD(parameters, settings.lr, settings.momentum, fused=True)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy [] of outputs [n, classes] and class numbers [n]. Of log-probabilities, which log_softmax does
    not change, it is the tutorial's NLL loss.
    """
    return functional.cross_entropy(output, targets)


def check(settings: PsSettings) -> None:
    """Checks MODEL and DATASET on two samples before a rank joins. Raises UsageError if they cannot work."""
    model = build(settings).eval()
    train, _ = data.load(settings)
    source = f"MODEL={settings.model or 'ConvNet'} DATASET={settings.dataset}"
    with UsageError.wrap(f"{source}: the data gives no batch"):
        inputs, targets = train.batch(torch.arange(min(2, len(train))))
    shape = tuple(inputs.shape)
    with UsageError.wrap(f"{source}: the model cannot take a batch of shape {shape}"), torch.no_grad():
        output = model(inputs)
        float(loss(output, targets))
    if output.ndim != 2:
        raise UsageError(f"{source}: the model's outputs have shape {tuple(output.shape)}, not (n, classes)")
    if isinstance(train, data.Images) and output.shape[1] <= int(train.labels.max()):
        raise UsageError(f"{source}: the model has {output.shape[1]} classes, the data go up to {train.labels.max()}")
    if settings.servers > count(model):
        raise UsageError(f"SERVERS={settings.servers}: more than the {count(model)} parameters to train")


@dataclass(frozen=True)
class VectorPart:
    """Elements `start` to `stop` of the flat vector, which the server with ordinal `server` holds."""

    start: int
    stop: int
    server: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.stop - self.start


def parts(model: nn.Module, settings: PsSettings) -> tuple[VectorPart, ...]:
    """Cuts the parameters that are trained, laid end to end, into equal shards for the servers, and these into parts.

    A part is the unit of an exchange. A part's gradient leaves while the backward pass still computes the parts before
    it, so the parameters before a large one are a part of their own. UPDATE_MODE=autograd has one part, which does not
    travel.
    """
    total, servers = count(model), settings.servers
    if settings.update_mode == "autograd":
        return (VectorPart(0, total, 0),)
    cuts, begun, offset = set[int](), 0, 0
    for parameter in trainable(model):
        if parameter.numel() >= MIN_PART_ELEMENTS or offset - begun >= MIN_PART_ELEMENTS:
            cuts.add(offset)
            begun = offset
        offset += parameter.numel()
    if total - begun < MIN_PART_ELEMENTS:
        cuts.discard(begun)  # the rest is too small for a separate part
    bounds = [total * server // servers for server in range(servers + 1)]
    edges = sorted({0, total, *cuts, *bounds})
    owners = {start: next(s for s in range(servers) if start < bounds[s + 1]) for start in edges[:-1]}
    return tuple(VectorPart(start, stop, owners[start]) for start, stop in pairwise(edges))


def release(model: nn.Module) -> None:
    """Frees the memory of the trained parameters; they keep their shapes."""
    for parameter in trainable(model):
        parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def buffers(model: nn.Module) -> tuple[Tensor, ...]:
    """Copies of the model's buffers (running means and the like), on the CPU."""
    return tuple(buffer.detach().to("cpu", copy=True) for buffer in model.buffers())


def load_buffers(model: nn.Module, values: tuple[Tensor, ...]) -> None:
    """Sets the model's buffers; without values they stay unchanged."""
    for buffer, value in zip(model.buffers(), values, strict=False):
        buffer.copy_(value)
