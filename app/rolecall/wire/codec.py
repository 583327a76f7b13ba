"""Encodes values as pickle 5 with their large buffers beside it, so that tensors and arrays are not copied into it.

Tensors keep type, shape, device kind and, if they are leaves, `requires_grad`. A view is sent without the rest of its
storage; two tensors of one storage arrive as two storages. Tensors that only torch can take apart (sparse, quantized,
subclasses) are pickled by torch.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rolecall.wire.messages import Request

MIN_BUFFER_BYTES = 4096  # a smaller tensor is copied into the pickle
MAX_BUFFERS = 2**16 - 1  # that a frame has; further ones are copied too
_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})  # types without tensors or buffers
_device = torch.device("cpu")  # what tensors of a peer's GPU arrive on


class Encoded(NamedTuple):
    """A value as a pickle and its large buffers."""

    body: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return len(self.body) + (sum(buffer.nbytes for buffer in self.buffers) if self.buffers else 0)

    def owned(self) -> Encoded:
        """The same in memory of its own: the value may change."""
        return Encoded(self.body, [memoryview(bytearray(buffer)) for buffer in self.buffers])


class Lasting(Encoded):
    """An encoded value that nobody changes until it is sent."""

    def owned(self) -> Encoded:
        """Itself: no copy is needed."""
        return self


def arrive_on(device: torch.device) -> None:
    """Makes tensors of a peer's GPU arrive on `device` of this process, if that is a GPU; otherwise on the CPU."""
    global _device
    _device = device


def arrival() -> torch.device:
    """See `arrive_on`."""
    return _device


def encode_request(request: Request) -> Encoded:
    """A request, to be sent. Raises what pickling the arguments raises."""
    return encode(tuple(request), (*request.args, *request.kwargs.values()))


def encode(value: Any, among: tuple[Any, ...] | None = None) -> Encoded:
    """`value` as pickle and buffers, which are views of the value's own memory. All that it consists of is plain, but
    for what is `among` these, if they are given. Raises what pickle raises for a value that it cannot take apart."""
    if _PLAIN.issuperset(map(type, (value,) if among is None else among)):
        return Encoded(pickle.dumps(value, 5), [])  # without a pickler of its own
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < MIN_BUFFER_BYTES or len(buffers) == MAX_BUFFERS:
            return True  # into the pickle
        buffers.append(raw)
        return False

    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=keep)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return Encoded(file.getvalue(), buffers)


def decode(body: Any, buffers: Sequence[Any] = ()) -> Any:
    """The value of a pickle and its buffers, which the value keeps. It runs what the peer's pickle names: only members
    of the job are listened to."""
    return pickle.loads(body, buffers=buffers)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type in ("cpu", "cuda")
    if not plain or tensor.is_conj() or tensor.is_neg():
        reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)
        return reduced
    grad = tensor.requires_grad and tensor.is_leaf
    data = tensor.detach()
    if not data.numel():
        return _empty, (data.dtype, tuple(data.shape), grad)
    on_gpu = data.device.type == "cuda"
    if on_gpu:
        pinned = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        data = pinned.copy_(data)  # waits for the copy
    flat = data.contiguous().view(-1).view(torch.uint8)
    return _rebuild, (pickle.PickleBuffer(flat.numpy().data), data.dtype, tuple(data.shape), grad, on_gpu)


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    return torch.nn.Parameter, (parameter.detach(), parameter.requires_grad)


def _empty(dtype: torch.dtype, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def _rebuild(data: Any, dtype: torch.dtype, shape: tuple[int, ...], grad: bool, on_gpu: bool) -> torch.Tensor:
    # what was copied into the pickle arrives as bytes, which are read-only
    writable = bytearray(data) if isinstance(data, bytes) or memoryview(data).readonly else data
    tensor = torch.frombuffer(writable, dtype=dtype).view(shape)
    if on_gpu and _device.type == "cuda":
        tensor = tensor.to(_device)
    return tensor.requires_grad_() if grad else tensor


class _Reducers(dict[type, Callable[[Any], Any]]):
    """By exact type, since a subclass of Tensor has ways of its own; for other types, what copyreg knows now."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]


_REDUCERS = _Reducers({torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_parameter})
