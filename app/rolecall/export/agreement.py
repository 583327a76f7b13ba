"""Whether an exported model answers as its checkpoint does: the differences of their outputs on the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.context.progress_bar import track
from rolecall.export.exported import Exported

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the inputs in order to the outputs in order
# the largest difference that is rounding, relative to the output's largest magnitude; of smaller types by their epsilon
LIMIT, EPSILONS = 1e-4, 16
# share of integers, such as chosen actions, that may differ: of two that are as good, either may be chosen
CHANGED = 1e-3


@dataclass
class Agreement:
    """How far one output is from the checkpoint's. `absolute` is the largest difference of two floats, `largest` the
    largest magnitude of the checkpoint's; `differ` counts integers that differ, and floats that are infinite or NaN in
    one of the two; `problem` says what makes the two incomparable.
    """

    name: str
    values: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    differ: int = 0
    limit: float = LIMIT
    floating: bool = True
    problem: str = ""

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Compares the outputs for one batch."""
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            self.problem = f"is {_kind(actual)}, the checkpoint's {_kind(expected)}"
            return
        self.values += expected.numel()
        self.floating = expected.is_floating_point() or expected.is_complex()
        if not self.floating:
            self.differ += int((expected != actual).sum())
            return
        self.limit = max(LIMIT, EPSILONS * torch.finfo(expected.dtype).eps)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        expected, actual = expected.to(wide), actual.to(wide)
        finite = expected.isfinite() & actual.isfinite()
        same = torch.isclose(expected, actual, rtol=0.0, atol=0.0, equal_nan=True)
        self.differ += int((~finite & ~same).sum())
        if bool(finite.any()):
            self.absolute = max(self.absolute, float((expected - actual)[finite].abs().max()))
            self.largest = max(self.largest, float(expected[finite].abs().max()))

    @property
    def relative(self) -> float:
        """`absolute` as a share of `largest`."""
        return self.absolute / self.largest if self.largest else self.absolute

    @property
    def agrees(self) -> bool:
        """Whether the differences are rounding."""
        if self.problem or not self.values:
            return False
        return self.relative <= self.limit and self.differ <= (0 if self.floating else CHANGED * self.values)

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} {self.problem}"
        if not self.values:
            return f"{self.name} has no values"
        counted = f"{self.differ} of {self.values} values differ"
        if not self.floating:
            return f"{self.name}: {counted}"
        rest = f"; of NaN and infinity {counted}" if self.differ else ""
        return f"{self.name}: largest difference {self.absolute:.2g} (relative {self.relative:.2g}){rest}"

    def to_json(self) -> dict[str, Any]:
        """For the model card."""
        return {"output": self.name, "values": self.values, "max_absolute": self.absolute,
                "max_relative": self.relative, "differ": self.differ, "limit": self.limit}  # fmt: skip


def compare(exported: Exported, run: Run) -> list[Agreement]:
    """The agreement of each output of `run` with the checkpoint's, on all evaluation data. Raises ValueError where
    there are none, or where they or the outputs are not those that `exported` names.
    """
    outputs = [Agreement(name) for name in exported.outputs]
    reference, batches = exported.reference or exported.module, exported.batches()
    for batch in track(batches, "comparing", unit="batches"):
        if set(batch) != set(exported.inputs):
            raise ValueError(f"data has {', '.join(map(str, batch)) or 'nothing'}, not {', '.join(exported.inputs)}")
        inputs = [batch[name] for name in exported.inputs]
        expected = answers(exported, reference(*inputs))
        for output, one, other in zip(outputs, expected, run(inputs), strict=True):
            output.add(one, other)
    if not any(output.values or output.problem for output in outputs):
        raise ValueError("data is empty: there is nothing to compare the outputs on")
    return outputs


def answers(exported: Exported, result: Any) -> tuple[Tensor, ...]:
    """What a module returned, as one tensor for each output. Raises ValueError where it is not."""
    several = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(several) != len(exported.outputs) or not all(isinstance(one, Tensor) for one in several):
        kinds = ", ".join(type(one).__name__ for one in several)
        raise ValueError(f"the outputs are {', '.join(exported.outputs)}, but the module returns {kinds}")
    return several


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
