"""The result of a job's `export` function: the model of a checkpoint, and data to check the exported file with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a supervisor has no torch
    from torch import Tensor, nn

Values = Mapping[str, "Tensor"]  # by the names of the inputs


@dataclass(frozen=True)
class Exported:
    """The model of a checkpoint as one module on the CPU, for `rolecall export`.

    `module` is called with the `inputs` in their order, and returns a tensor, or a tuple with one for each of the
    `outputs`. `inputs` are examples, of which an axis that may vary has a size of 2 or more. `dynamic` names these
    axes: `{"images": {0: "batch"}}`; axes of one name have one size.

    `data` are the evaluation data, or a callable that returns them: mappings with a tensor for each input. The outputs
    of the exported file are compared with those of `reference` on all of them: what the checkpoint's model answers by
    the code that it was trained with, called as `module` is. By default it is the module itself.

    `licence` is that of the data which the model was trained on. `extra` is what else a user of the model needs, as
    JSON's types, such as the vocabulary; it is written to the model card.
    """

    module: nn.Module
    inputs: Values
    outputs: Sequence[str]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    data: Iterable[Values] | Callable[[], Iterable[Values]] = ()
    reference: Callable[..., Any] | None = None
    licence: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def problem(self) -> str:
        """Why it cannot be exported; empty if it can."""
        from torch import Tensor, nn

        module: object = self.module
        if not isinstance(module, nn.Module):
            return f"its module is a {type(module).__name__}, not a torch module"
        if not self.inputs or not all(isinstance(value, Tensor) for value in self.inputs.values()):
            return "its inputs are not tensors by name"
        if isinstance(self.outputs, str) or not self.outputs:
            return "its outputs are no list of names"
        names = [*self.inputs, *self.outputs]
        if len(set(names)) < len(names) or not all(isinstance(name, str) and name.isidentifier() for name in names):
            return f"the names of inputs and outputs must differ and be identifiers ({', '.join(map(str, names))})"
        sizes: dict[str, int] = {}
        for name, axes in self.dynamic.items():
            if name not in self.inputs:
                return f"dynamic names {name!r}, which is no input ({', '.join(self.inputs)})"
            shape = self.inputs[name].shape
            for axis, called in axes.items():
                if axis not in range(len(shape)):
                    return f"dynamic names axis {axis} of {name!r}, which has the shape {tuple(shape)}"
                if shape[axis] < 2:
                    return f"axis {axis} of the example {name!r} is {shape[axis]} long; an axis that varies needs 2"
                if sizes.setdefault(called, shape[axis]) != shape[axis]:
                    return f"the examples have two sizes of the axis {called!r}: {sizes[called]} and {shape[axis]}"
        return ""

    def batches(self) -> Iterable[Values]:
        """The evaluation data."""
        return self.data() if callable(self.data) else self.data
