"""The outputs of an exported model compared with those of its checkpoint, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.context.progress_bar import track
from rolecall.export.exported import Exported

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from the inputs, in order, to the outputs
# up to this share of the output's largest magnitude, and up to so many epsilons of its type, a difference is rounding
RELATIVE_LIMIT, EPSILONS = 1e-4, 16
MAX_CHANGED = 1e-3  # share of integers, such as chosen actions, that may differ: of two equal choices, either is right


@dataclass(frozen=True)
class Agreement:
    """How far one output is from the checkpoint's. `max_absolute` is the largest difference of two finite floats,
    `max_relative` its share of the output's largest magnitude; `differ` counts integers that differ. `problem` is empty
    if the differences are rounding.
    """

    output: str
    values: int
    max_absolute: float = 0.0
    max_relative: float = 0.0
    differ: int = 0
    limit: float = 0.0
    problem: str = ""

    @staticmethod
    def of(output: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Agreement:
        """Compares an output with the checkpoint's: `pairs` are the expected and the actual one for each batch."""
        expected, actual = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in zip(*pairs, strict=True))
        other = [pair for pair in pairs if pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype]
        values = expected.numel()
        if not values:
            return Agreement(output, values, problem="has no values")
        if other:
            return Agreement(output, values, problem=f"is {_kind(other[0][1])}, the checkpoint's {_kind(other[0][0])}")
        if not expected.is_floating_point() and not expected.is_complex():
            differ = int((expected != actual).sum())
            problem = f"{differ} of {values} values differ" if differ > MAX_CHANGED * values else ""
            return Agreement(output, values, differ=differ, problem=problem)
        limit = max(RELATIVE_LIMIT, EPSILONS * torch.finfo(expected.dtype).eps)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        expected, actual = expected.to(wide), actual.to(wide)
        finite = expected.isfinite() & actual.isfinite()
        absolute = largest = 0.0
        if bool(finite.any()):
            absolute = float((expected - actual)[finite].abs().max())
            largest = float(expected[finite].abs().max())
        problem = ""
        try:
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=limit * largest, equal_nan=True)
        except AssertionError as error:
            problem = next(line for line in str(error).splitlines() if line.startswith("Mismatched"))
        relative = absolute / (largest or 1.0)
        return Agreement(output, values, absolute, relative, limit=limit, problem=problem)

    def __str__(self) -> str:
        if not self.limit:
            return f"{self.output}: {self.problem or f'{self.differ} of {self.values} values differ'}"
        differences = f"largest difference {self.max_absolute:.2g} (relative {self.max_relative:.2g})"
        return f"{self.output}: {differences}{'; ' * bool(self.problem)}{self.problem}"


def compare(exported: Exported, run: Run) -> list[Agreement]:
    """The agreement of each output of `run` with the checkpoint's, on all evaluation data. Raises ValueError if there
    are no data, or if the data or the outputs are not those that `exported` names.
    """
    pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in exported.outputs]
    reference, batches = exported.reference or exported.module, exported.batches()
    for batch in track(batches, "comparing", unit="batches"):
        if set(batch) != set(exported.inputs):
            raise ValueError(f"data has {', '.join(map(str, batch)) or 'nothing'}, not {', '.join(exported.inputs)}")
        inputs = [batch[name] for name in exported.inputs]
        for output, expected, actual in zip(pairs, answers(exported, reference(*inputs)), run(inputs), strict=True):
            output.append((expected, actual))
    if not any(pairs):
        raise ValueError("data is empty: there is nothing to compare the outputs on")
    return [Agreement.of(name, output) for name, output in zip(exported.outputs, pairs, strict=True)]


def answers(exported: Exported, result: Any) -> tuple[Tensor, ...]:
    """The `result` of a module as one tensor for each output. Raises ValueError for another result."""
    several = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(several) != len(exported.outputs) or not all(isinstance(one, Tensor) for one in several):
        kinds = ", ".join(type(one).__name__ for one in several)
        raise ValueError(f"the outputs are {', '.join(exported.outputs)}, but the module returns {kinds}")
    return several


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
