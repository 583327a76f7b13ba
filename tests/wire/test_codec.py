"""Values arrive as they were sent: types, shapes, dtypes, and nothing of their storage beside them."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rolecall.wire import codec
from rolecall.wire.codec import MIN_BUFFER_BYTES, decode, encode

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
PLAIN = [dtype for dtype in DTYPES if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))]
Point = namedtuple("Point", "x y")


def sent(value: Any) -> Any:
    """`value` as it arrives: its buffers in memory of their own."""
    body, buffers = encode(value)
    return decode(body, [bytearray(buffer) for buffer in buffers])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 10_000], ids=["in the pickle", "beside it"])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_dtypes(dtype: torch.dtype, size: int) -> None:
    try:
        tensor = torch.arange(size * 16, dtype=torch.int32).to(torch.uint8).view(dtype)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"no such tensor: {error}")
    back = sent(tensor)
    assert (back.dtype, back.shape, raw(back)) == (tensor.dtype, tensor.shape, raw(tensor))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (7, 5), (100, 200), (2, 3, 4, 5, 600)])
def test_shapes(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    assert torch.equal(sent(tensor), tensor)
    array = tensor.numpy()
    assert np.array_equal(sent(array), array)
    assert sent(array).shape == shape


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    whole = torch.rand(1000, 1000)
    for view in (whole[3], whole[:, 3], whole.T[:5], whole[::2, ::3], whole[5:6].expand(40, 1000), whole.flip(0)):
        body, buffers = encode(view)
        assert len(body) + sum(buffer.nbytes for buffer in buffers) < view.numel() * 4 + 1000
        back = sent(view)
        assert torch.equal(back, view)
        assert back.untyped_storage().nbytes() == view.numel() * 4


def test_what_is_contiguous_is_not_copied() -> None:
    tensor, array = torch.rand(10_000), np.random.rand(10_000)
    _, (first, second) = encode((tensor, array))
    tensor[0], array[0] = 7.0, 8.0
    assert first.cast("f")[0] == 7.0
    assert second.cast("B").cast("d")[0] == 8.0


@pytest.mark.parametrize("size", [10, 10_000])
def test_what_arrives_may_be_changed(size: int) -> None:
    tensor, array = sent((torch.zeros(size), np.zeros(size)))
    tensor += 1
    array += 1
    assert tensor.sum() == array.sum() == size
    fixed = np.zeros(size)
    fixed.flags.writeable = False
    assert not sent(fixed).flags.writeable


@pytest.mark.parametrize("size", [3, 10_000])
def test_requires_grad_is_that_of_leaves(size: int) -> None:
    leaf = torch.rand(size, requires_grad=True)
    grown = leaf * 2
    back, back_grown = sent((leaf, grown))
    assert back.requires_grad
    assert back.is_leaf
    assert not back_grown.requires_grad
    assert sent(torch.empty(0, requires_grad=True)).requires_grad


def test_parameters_and_modules() -> None:
    parameter, fixed = sent((nn.Parameter(torch.rand(9)), nn.Parameter(torch.rand(9), requires_grad=False)))
    assert type(parameter) is type(fixed) is nn.Parameter
    assert (parameter.requires_grad, fixed.requires_grad) == (True, False)
    model = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60))
    back = sent(model)
    for (name, one), (_, other) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert [type(each) for each in back.parameters()] == [nn.Parameter] * 4


def test_sparse_quantized_conjugated_and_meta_tensors() -> None:
    dense = torch.rand(30, 40)
    for tensor in (dense.to_sparse(), dense.to_sparse_csr()):
        back = sent(tensor)
        assert back.layout is tensor.layout
        assert torch.equal(back.to_dense(), dense)
    quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    assert torch.equal(sent(quantized).int_repr(), quantized.int_repr())
    complex_ = torch.randn(100, 100, dtype=torch.complex64)
    assert torch.equal(sent(complex_.conj()), complex_.conj())
    assert torch.equal(sent(complex_.imag), complex_.imag)
    assert sent(torch.empty(5, device="meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", ">c16", "S3", "U4", "M8[s]", "?", "V7", "f4,>i2"])
@pytest.mark.parametrize("size", [4, 5000])
def test_arrays(dtype: str, size: int) -> None:
    array = np.frombuffer(np.random.default_rng(1).bytes(64 * size), np.uint8)[: np.dtype(dtype).itemsize * size]
    if dtype == "U4":
        array = np.array(["abcd"] * size).view(np.uint8)
    array = array.view(dtype)
    for one in (array, array[::2], array[::-1], array[: size // 2 * 2].reshape(2, -1).T):
        back, expected = sent(one), pickle.loads(pickle.dumps(one, 5))  # which makes some of them native
        assert (back.dtype, back.shape, back.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    fortran = np.asfortranarray(np.random.rand(100, 30))
    assert sent(fortran).flags.f_contiguous
    assert sent(np.array([{"a": 1}, None], dtype=object))[0] == {"a": 1}


def test_the_same_object_twice_is_one() -> None:
    tensor = torch.rand(10_000)
    assert len(encode([tensor, tensor, {"x": tensor}]).buffers) == 1
    one, two, table = sent([tensor, tensor, {"x": tensor}])
    assert one is two is table["x"]


def test_what_else_is_sent() -> None:
    value = [
        None,
        True,
        2**100,
        1.5,
        "ä",
        b"\0" * 10_000,
        {1, 2},
        Point(1, [2]),
        OrderedDict(a=1),
        torch.float32,
        slice,
    ]
    assert sent(value) == value
    assert sent(torch.Size([1, 2])) == torch.Size([1, 2])
    assert sent(torch.device("cpu")) == torch.device("cpu")
    assert sent(pickle.PickleBuffer(b"x" * 10_000)) == b"x" * 10_000


def test_more_buffers_than_a_frame_has_go_into_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BUFFERS", 3)
    tensors = [torch.full((2000,), float(number)) for number in range(7)]
    assert len(encode(tensors).buffers) == 3
    assert all(torch.equal(one, other) for one, other in zip(sent(tensors), tensors, strict=True))


def test_what_cannot_be_read() -> None:
    body, buffers = encode(torch.zeros(MIN_BUFFER_BYTES))
    with pytest.raises(pickle.UnpicklingError):
        decode(body, [])
    with pytest.raises((RuntimeError, ValueError)):
        decode(body, [bytearray(buffers[0].nbytes - 1)])
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        decode(body[:-5], [bytearray(buffers[0])])
