"""Elements in WIRE_DTYPE as bytes: int8 and int4 have a float32 scale for each block of 256 elements."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # elements with one scale
HIGHEST = {"int8": 127, "int4": 7}  # the greatest integer; the least is its negative
SMALLEST = torch.finfo(torch.float32).tiny  # a scale, so that its inverse is finite


def packed_bytes(count: int, dtype: str) -> int:
    """The bytes of `count` packed elements."""
    if dtype not in HIGHEST:
        return count * (4 if dtype == "float32" else 2)
    return 4 * -(-count // BLOCK) + (count if dtype == "int8" else -(-count // 2))


def pack(values: Tensor, dtype: str, decoded: Tensor) -> Tensor:
    """`values` [n] float32 in `dtype` as bytes, uint8 [packed_bytes]; `decoded` [n], which may be `values` itself, is
    set to what `unpack` makes of them.

    An integer q stands for q times its block's scale, which is the block's greatest magnitude over 127 (int8) or 7
    (int4), and is the nearest such integer. In int4 a byte is q + 16 r, with q of the first half of `values` and r of
    the second. A block with a value that is not finite decodes to none that is.
    """
    count = len(values)
    if dtype == "float32":
        return decoded.copy_(values).clone().view(torch.uint8)
    if dtype == "bfloat16":
        rounded = values.bfloat16()
        decoded.copy_(rounded)
        return rounded.view(torch.uint8)
    payload = torch.empty(packed_bytes(count, dtype), dtype=torch.uint8)
    scales, integers = _split(payload, count)
    for each in _rectangles(count):
        block = values[each].view(-1, min(BLOCK, each.stop - each.start))
        # not over absolute values: these would be written to memory first
        greatest = torch.maximum(block.amax(1), block.amin(1).neg_())
        scale = greatest.div_(HIGHEST[dtype]).clamp_(min=SMALLEST)
        scales[each.start // BLOCK : each.start // BLOCK + len(scale)] = scale
        torch.mul(block, scale.reciprocal().unsqueeze(1), out=decoded[each].view_as(block)).round_()
    if dtype == "int8":
        integers.copy_(decoded)
    else:
        half = len(integers)
        pairs = decoded[:half].clone()
        pairs[: count - half].add_(decoded[half:], alpha=16)
        integers.copy_(pairs)
    _scale(decoded, scales)
    return payload


def unpack(payload: Tensor, count: int, dtype: str) -> Tensor:
    """The `count` elements [count] float32 that `pack` made `payload` of, in memory of their own."""
    if dtype == "float32":
        return payload.view(torch.float32).clone()
    if dtype == "bfloat16":
        return payload.view(torch.bfloat16).float()
    scales, integers = _split(payload, count)
    if dtype == "int8":
        values = integers.float()
    else:
        values, half = torch.empty(count), len(integers)
        high = (integers + 8).bitwise_right_shift_(4)  # rounds to the nearest multiple of 16
        values[half:] = high[: count - half]
        values[:half] = integers.sub(high, alpha=16)
    _scale(values, scales)
    return values


def _split(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The scales [blocks] and the integers of packed elements, int8."""
    begin = 4 * -(-count // BLOCK)
    return payload[:begin].view(torch.float32), payload[begin:].view(torch.int8)


def _rectangles(count: int) -> list[slice]:
    """The whole blocks, and the last one where it is shorter."""
    whole = count - count % BLOCK
    return [each for each in (slice(0, whole), slice(whole, count)) if each.start < each.stop]


def _scale(values: Tensor, scales: Tensor) -> None:
    """Multiplies integers [n] with their blocks' scales [blocks], in place."""
    for each in _rectangles(len(values)):
        block = values[each].view(-1, min(BLOCK, each.stop - each.start))
        block.mul_(scales[each.start // BLOCK : each.start // BLOCK + len(block)].unsqueeze(1))
