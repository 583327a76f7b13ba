"""What travels: gradients up and parameters down, in WIRE_DTYPE."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Encoder:
    """Rounds one part of a gradient to `dtype`. What the rounding took away is added to the next gradient (error
    feedback: Seide et al. 2014, 1-bit stochastic gradient descent), so it is late, not lost.
    """

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self.dtype = dtype
        self._error = torch.zeros(size) if dtype != torch.float32 else None

    def encode(self, gradient: Tensor) -> Tensor:
        """`gradient` [size] float32 in the type of the wire; the same memory where that is float32."""
        if self._error is None:
            return gradient
        self._error += gradient
        rounded = self._error.to(self.dtype)
        self._error -= rounded
        return rounded
