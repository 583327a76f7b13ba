"""The formats of exported models: how a file is written, run again, and loaded without Rolecall."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.export.agreement import Run, answers
from rolecall.export.exported import Exported


class Format:
    """A format. `packages` write it; the names of its files end with `suffix`."""

    name: str
    suffix: str
    packages: Sequence[str] = ()
    runtime: str = "torch"  # the package that runs the file

    def write(self, exported: Exported, path: Path, facts: Mapping[str, str]) -> None:
        """Writes the model to `path`, with `facts` in the file. May raise any error of the format's library."""
        raise NotImplementedError

    def load(self, exported: Exported, path: Path) -> Run | None:
        """A function that runs the file at `path`; None if its runtime is not installed."""
        raise NotImplementedError


class Safetensors(Format):
    """The tensors by their names in the module, as https://github.com/huggingface/safetensors; no code."""

    name, suffix, packages = "safetensors", ".safetensors", ("safetensors",)

    def write(self, exported: Exported, path: Path, facts: Mapping[str, str]) -> None:
        """Writes tensors that share memory separately."""
        from safetensors.torch import save_file

        tensors, seen = {}, set[int]()
        for name, value in exported.module.state_dict().items():
            place = value.untyped_storage().data_ptr()
            tensors[name] = value.detach().clone() if place in seen else value.detach()
            tensors[name] = tensors[name].contiguous()
            seen.add(place)
        save_file(tensors, path, metadata=dict(facts))

    def load(self, exported: Exported, path: Path) -> Run:
        """Loads the tensors into a fresh module without any."""
        from safetensors.torch import load_file

        module = _without_tensors(exported.module)
        module.load_state_dict(load_file(path), strict=True, assign=True)
        return lambda inputs: answers(exported, module.eval()(*inputs))


class Torch(Format):
    """torch.export's program, which any Python with torch runs."""

    name, suffix = "torch", ".pt2"

    def write(self, exported: Exported, path: Path, facts: Mapping[str, str]) -> None:
        """With the facts as the file's extra file `rolecall.json`."""
        program = trace(exported)
        with quiet():
            torch.export.save(program, path, extra_files={"rolecall.json": json.dumps(dict(facts))})

    def load(self, exported: Exported, path: Path) -> Run:
        """Loads the program."""
        with quiet():
            program = torch.export.load(path).module()
        return lambda inputs: answers(exported, program(*inputs))


class Onnx(Format):
    """ONNX, which onnxruntime and many others run. A model above 2 GB has its tensors in a file beside it."""

    name, suffix, packages, runtime = "onnx", ".onnx", ("onnx", "onnxscript"), "onnxruntime"

    def write(self, exported: Exported, path: Path, facts: Mapping[str, str]) -> None:
        """With the facts as the model's properties."""
        program = trace(exported)
        axes = tuple(dict(exported.dynamic.get(name, {})) for name in exported.inputs)
        with quiet():
            model = torch.onnx.export(
                program,
                tuple(exported.inputs.values()),
                input_names=list(exported.inputs),
                output_names=list(exported.outputs),
                dynamic_shapes=axes,
                dynamo=True,
                verbose=False,
            )
            assert model is not None  # as no file was named
            model.model.metadata_props.update(facts)
            model.save(path)

    def load(self, exported: Exported, path: Path) -> Run | None:
        """By onnxruntime, on the CPU."""
        if not importlib.util.find_spec(self.runtime):
            return None
        import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        taken = {each.name for each in session.get_inputs()}  # without those that the outputs do not depend on

        def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            named = zip(exported.inputs, inputs, strict=True)
            values = session.run(None, {name: value.detach().numpy() for name, value in named if name in taken})
            return [torch.from_numpy(value) for value in values]

        return run


FORMATS: dict[str, Format] = {each.name: each for each in (Safetensors(), Onnx(), Torch())}


def trace(exported: Exported) -> torch.export.ExportedProgram:
    """The module as torch.export's program. Raises what torch.export raises for code that it cannot follow."""
    names = {name for axes in exported.dynamic.values() for name in axes.values()}
    dims = {name: torch.export.Dim(name) for name in names}
    shapes = tuple(
        {axis: dims[name] for axis, name in exported.dynamic.get(each, {}).items()} for each in exported.inputs
    )
    with quiet(), torch.no_grad():
        return torch.export.export(exported.module, tuple(exported.inputs.values()), dynamic_shapes=shapes)


def versions(form: Format) -> dict[str, str]:
    """The versions of the installed packages that write the file and run it."""
    installed = {}
    for package in ("torch", *form.packages, form.runtime):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences exporters, which log much; they raise their errors."""
    before, nothing = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _without_tensors(module: nn.Module) -> nn.Module:
    """A copy whose tensors in the state_dict have shapes and no values."""
    memo: dict[int, Any] = {}
    for value in module.state_dict(keep_vars=True).values():
        empty = torch.empty_like(value, device="meta")
        memo[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
    return copy.deepcopy(module, memo)
