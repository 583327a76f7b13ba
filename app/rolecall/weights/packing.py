"""Float tensors as integers of 8 or 4 bits, in blocks that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ELEMENTS = 256  # that share a scale
MAX_INTEGER = {"int8": 127, "int4": 7}  # the least integer is its negative
BLOCK_BYTES = {"int8": 4 + BLOCK_ELEMENTS, "int4": 4 + BLOCK_ELEMENTS // 2}
MIN_SCALE = torch.finfo(torch.float32).tiny  # a scale has a finite inverse


def packed_bytes(count: int, dtype: str) -> int:
    """The bytes of `count` elements."""
    return -(-count // BLOCK_ELEMENTS) * BLOCK_BYTES[dtype]


def pack(values: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """`values` [n] float32 as bytes, and what `unpack` makes of them [n]. The bytes are the blocks' scales in float32,
    then the integers of whole blocks.

    An integer q stands for q times its block's scale, which is the block's greatest magnitude over MAX_INTEGER; q is
    the nearest such integer. In int4 a byte is q + 16 r, with q of the first half of a block and r of the second. A
    block with a value that is not finite decodes to none that is finite.
    """
    count = len(values)
    decoded = functional.pad(values, (0, -count % BLOCK_ELEMENTS))  # a copy
    blocks = decoded.view(-1, BLOCK_ELEMENTS)
    # abs() would write the absolute values to memory first
    scales = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).div_(MAX_INTEGER[dtype]).clamp_(min=MIN_SCALE)
    codes = blocks.mul_(scales.reciprocal().unsqueeze(1)).round_()
    if dtype == "int4":
        low, high = blocks.chunk(2, 1)
        codes = low.add(high, alpha=16)
    payload = torch.cat([scales.view(torch.uint8), codes.to(torch.int8).view(-1).view(torch.uint8)])
    blocks.mul_(scales.unsqueeze(1))
    return payload, decoded[:count]


def unpack(payload: Tensor, count: int, dtype: str) -> Tensor:
    """The `count` elements [count] float32 of a payload of `pack`, in memory of their own."""
    blocks = -(-count // BLOCK_ELEMENTS)
    scales, codes = payload[: 4 * blocks].view(torch.float32), payload[4 * blocks :].view(torch.int8).view(blocks, -1)
    if dtype == "int4":
        high = (codes + 8).bitwise_right_shift_(4)  # rounds to the nearest multiple of 16
        codes = torch.cat([codes.sub(high, alpha=16), high], 1)
    return codes.float().mul_(scales.unsqueeze(1)).view(-1)[:count]
