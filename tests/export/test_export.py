"""`rolecall export` of a user's job: three formats, what is compared, the model card, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rolecall import Exported, __main__
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.errors import FAILED, USAGE
from rolecall.export import formats
from rolecall.export.agreement import Agreement

pytestmark = pytest.mark.usefixtures("torchlib")
LINE = '''"""A job of a user."""
import torch
from pydantic import SecretStr
from rolecall import Exported, Job, PerRank, ProgramError, Role, Settings, UsageError

class Line(Settings):
    width: int = 2
    rate: float = 0.1
    place: PerRank[str] = "here"
    key: SecretStr = SecretStr("a secret that nobody may read")

class Switch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def lead(context): ...

def evaluate(settings, state):
    return {"error": 0.25, "best": float("inf")}

def export(settings, state):
    model = torch.nn.Linear(settings.width, 2)
    model.load_state_dict(state["model"])
    x = torch.arange(4.0 * settings.width).reshape(4, -1)
    inputs, outputs, dynamic, data = {"x": x[:2]}, ["y"], {"x": {0: "batch"}}, [{"x": x[:1]}, {"x": x}]
    CHANGE
    return Exported(model, inputs, outputs, dynamic, data, licence="CC0 1.0", extra={"names": ["a", "b"]})

JOB = Job([Role("lead", lead)], settings=Line, summary="a line", evaluate=evaluate, export=export, pinned=("width",))
'''
WEIGHTS = {"weight": torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]]), "bias": torch.tensor([0.5, -0.5])}
X = np.array([[1.0, 2.0, 3.0]], np.float32)
Y = X @ WEIGHTS["weight"].numpy().T + WEIGHTS["bias"].numpy()
CHECKPOINT = "run/checkpoint-000002-0000000007.pt"
WRONG = "line: export returns what cannot be exported"
DATA = "line: the outputs cannot be compared on its evaluation data"
FORMATS = ("safetensors", "onnx", "torch")
Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Export]:
    """The exit code and the output of `rolecall export line.py` of a checkpoint, with an `export` that has `change`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "line", raising=False)
    for name in ("WIDTH", "KEY", "JOB"):
        monkeypatch.delenv(name, raising=False)
    Path("run").mkdir()
    about = {"settings": {"width": 3, "key": "**********"}, "done": 5_000.0, "seconds": 2.5}
    Checkpoints(Path("run"), "line", 2).write(7, {"model": WEIGHTS}, about)

    def export(
        form: str, *arguments: str, change: str = "", checkpoint: str = "run", without: str = "\0"
    ) -> tuple[int, str, str]:
        Path("line.py").write_text(LINE.replace("CHANGE", change).replace(without, ""))
        code = __main__.main(["export", "line.py", "--checkpoint", checkpoint, "--format", form, *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    yield export
    sys.modules.pop("line", None)


def names() -> set[str]:
    """What lies in the working directory beside the job and its run."""
    return {path.name for path in Path().iterdir()} - {"line.py", "run", "__pycache__"}


def card(file: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(f"{file}.json").read_text())
    return read


# ---- the formats


def test_safetensors_has_the_tensors_and_what_they_are(exports: Export) -> None:
    code, out, err = exports("safetensors")
    assert (code, err) == (0, "")
    tensors = load_file("line.safetensors")
    assert tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in WEIGHTS.items())
    with safe_open("line.safetensors", "pt") as file:
        metadata = file.metadata()
    assert {name: metadata[name] for name in ("job", "layout", "step")} == {"job": "line", "layout": "1", "step": "7"}
    assert json.loads(metadata["settings"]) == {"WIDTH": 3}
    assert "equal to the checkpoint: y: largest difference 0 (relative 0)\n" in out
    assert names() == {f"line.safetensors{end}" for end in ("", ".json")}
    Path("any").touch()
    assert {Path(name).stat().st_mode for name in names()} == {Path("any").stat().st_mode}


def test_onnx_takes_batches_of_any_size(exports: Export) -> None:
    assert exports("onnx")[0] == 0
    session = onnxruntime.InferenceSession("line.onnx")
    assert [(one.name, one.shape) for one in session.get_inputs()] == [("x", ["batch", 3])]
    for count in (1, 5):
        (values,) = session.run(["y"], {"x": X.repeat(count, 0)})
        np.testing.assert_allclose(values, Y.repeat(count, 0), rtol=1e-6)
    properties = {each.key: each.value for each in onnx.load("line.onnx").metadata_props}
    assert (properties["job"], properties["settings"]) == ("line", '{"WIDTH": 3}')


def test_tensors_that_share_memory_and_no_contiguous_ones_are_written(exports: Export) -> None:
    change = (
        "m = model; model = torch.nn.Sequential(m, torch.nn.Linear(2, 3), m); model[1].weight.data = m.weight.data.t()"
    )
    code, _, err = exports("safetensors", change=change)
    assert (code, err) == (0, "")
    tensors = load_file("line.safetensors")
    assert torch.equal(tensors["0.weight"], tensors["2.weight"])
    assert torch.equal(tensors["1.weight"], tensors["0.weight"].t())


def test_outputs_and_inputs_may_be_several(exports: Export) -> None:
    change = (
        "model = torch.nn.LSTMCell(3, 2); inputs = {'x': x[:2], 'state': x[:2, :2]}; outputs = ['h', 'c']; "
        "dynamic['state'] = {0: 'batch'}; data = ({'state': x[:n, :2], 'x': x[:n]} for n in (1, 4)); step = model; "
        "model = type('M', (torch.nn.Module,), {'forward': lambda self, x, s: step(x, (s, s))})(); model.step = step"
    )
    code, out, _ = exports("torch", change=change)
    assert code == 0
    assert "equal to the checkpoint: h: largest" in out
    assert "; c: largest" in out
    assert [each["shape"] for each in card("line.pt2")["inputs"]] == [["batch", 3], ["batch", 2]]


# ---- what is compared


@pytest.mark.parametrize("form", FORMATS)
def test_wrong_weights_are_refused(exports: Export, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of six is off by a hundredth; an earlier export stays as it was."""
    kind = formats.FORMATS[form]
    write = kind.write

    def broken(exported: Exported, path: Path, facts: dict[str, str]) -> None:
        module: Any = copy.deepcopy(exported.module)
        module.weight.data[0, 0] += 0.01
        write(replace(exported, module=module), path, facts)

    monkeypatch.setattr(kind, "write", broken)
    Path("model").write_text("an earlier one")
    code, out, err = exports(form, "--output", "model")
    assert (code, out) == (FAILED, "")
    assert err.startswith("rolecall: model is not what the checkpoint is, and was deleted: y: largest difference 0.")
    assert err.count("\n") == 1
    assert names() == {"model"}
    assert Path("model").read_text() == "an earlier one"


def test_outputs_are_compared_with_the_reference(exports: Export) -> None:
    change = "return Exported(model, inputs, outputs, dynamic, data, lambda x: 2 * model(x))"
    assert exports("safetensors", change=change)[0] == FAILED
    assert names() == set()


def agreement(expected: Any, actual: Any, dtype: torch.dtype = torch.float32) -> Agreement:
    return Agreement.of("y", [(torch.as_tensor(expected).to(dtype), torch.as_tensor(actual).to(dtype))])


@pytest.mark.parametrize(
    ("expected", "actual", "agrees"),
    [
        ([100.0, 0.0], [100.005, 0.005], True),  # rounding, of an output of this magnitude
        ([100.0, 0.0], [100.0, 0.02], False),
        ([1e-6, 0.0], [1e-6, 1e-9], False),  # and of this one
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1.0, torch.nan, torch.inf], [1.0, torch.nan, torch.inf], True),
        ([1.0, torch.inf], [1.0, -torch.inf], False),
        ([1.0, 2.0], [1.0, torch.nan], False),
        ([1.0, 2.0], [1.0, 2.0, 3.0], False),
    ],
)
def test_floats_agree_but_for_rounding(expected: list[float], actual: list[float], agrees: bool) -> None:
    assert (not agreement(expected, actual).problem) is agrees


@pytest.mark.parametrize(("differ", "agrees"), [(0, True), (2, True), (3, False)])
def test_of_two_thousand_integers_two_may_differ(differ: int, agrees: bool) -> None:
    expected, actual = torch.zeros(2000, dtype=torch.int64), torch.zeros(2000, dtype=torch.int64)
    actual[:differ] = 1
    output = agreement(expected, actual, torch.int64)
    assert (not output.problem, output.differ, str(output)) == (agrees, differ, f"y: {differ} of 2000 values differ")


def test_another_type_is_another_output() -> None:
    output = Agreement.of("y", [(torch.zeros(2), torch.zeros(2, dtype=torch.float64))])
    assert output.problem == "is float64 (2,), the checkpoint's float32 (2,)"


# ---- the card


def test_card_describes_the_model(exports: Export) -> None:
    code, out, _ = exports("torch", "--json")
    described = card("line.pt2")
    assert code == 0
    assert json.loads(out) == {
        "path": str(Path("line.pt2").absolute()),
        **{name: value for name, value in described.items() if name not in ("extra", "layers")},
    }
    file = Path("line.pt2").read_bytes()
    assert described["files"] == {"line.pt2": {"bytes": len(file), "sha256": hashlib.sha256(file).hexdigest()}}
    assert described["checkpoint"]["file"] == Path(CHECKPOINT).name
    assert (described["checkpoint"]["step"], described["checkpoint"]["done"]) == (7, 5_000)
    assert (described["parameters"], described["settings"]) == (8, {"WIDTH": 3})
    assert described["score"] == {"error": 0.25, "best": None}  # which JSON cannot say otherwise
    assert described["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
    assert described["outputs"] == [{"name": "y", "dtype": "float32", "shape": [2, 2]}]
    assert described["licence_of_the_data"] == "CC0 1.0"
    assert described["extra"] == {"names": ["a", "b"]}
    assert described["versions"]["torch"] == importlib.metadata.version("torch")
    (compared,) = described["agreement"]
    assert (compared["output"], compared["values"]) == ("y", 10)
    assert not [path for path in Path().glob("line.pt2*") if b"nobody may read" in path.read_bytes()]


def test_with_the_runs_summary_the_card_has_all_settings_and_its_score(exports: Export) -> None:
    settings = {"WIDTH": 9, "RATE": 0.5, "KEY": "**********", "MASTER_ADDR": "10.0.0.1", "PLACE": "/home/me"}
    summary = {"settings": settings, "curve": {"label": "error", "final": 0.125}}
    Path("run", "summary.json").write_text(json.dumps(summary))
    assert exports("safetensors", "--no-evaluate")[0] == 0
    described = card("line.safetensors")
    assert described["settings"] == {"RATE": 0.5, "WIDTH": 3}  # no rank's own, no address
    assert (described["score"], described["scored_by"]) == (
        {"error": 0.125},
        "the end of the run that wrote the checkpoint",
    )


def test_the_output_may_be_a_directory_and_replaces_an_earlier_one(exports: Export) -> None:
    Path("models").mkdir()
    Path("models", "line.safetensors").write_text("an earlier one")
    assert exports("safetensors", "--output", "models", checkpoint=CHECKPOINT)[0] == 0
    assert {path.name for path in Path("models").iterdir()} == {f"line.safetensors{end}" for end in ("", ".json")}
    assert load_file("models/line.safetensors").keys() == WEIGHTS.keys()


def test_files_are_on_disk_before_they_replace_earlier_ones(exports: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, replace_file = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        steps.append(f"replace {path.name}")
        return replace_file(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replaced)
    assert exports("safetensors")[0] == 0
    files = ["line.safetensors.json", "line.safetensors"]
    assert steps == [
        *(f"sync {name}" for name in files),
        *(f"replace {name}" for name in files),
        f"sync {Path.cwd().name}",
    ]


# ---- what is refused


REFUSED = {
    "raise UsageError('WIDTH=3: too few')": "line.py:26: WIDTH=3: too few",
    "return model": "line: export returns a Linear, not a rolecall.Exported",
    "model = 3": f"{WRONG}: its module is a int, not a torch module",
    "inputs = {'x': 3}": f"{WRONG}: its inputs are not tensors by name",
    "outputs = []": f"{WRONG}: its outputs are no list of names",
    "outputs = ['x']": f"{WRONG}: the names of inputs and outputs must differ and be identifiers (x, x)",
    "dynamic = {'z': {0: 'n'}}": f"{WRONG}: dynamic names 'z', which is no input (x)",
    "dynamic = {'x': {2: 'n'}}": f"{WRONG}: dynamic names axis 2 of 'x', which has the shape (2, 3)",
    "dynamic = {'x': {0: 'n', 1: 'n'}}": f"{WRONG}: the examples have two sizes of the axis 'n': 2 and 3",
    "inputs = {'x': x[:1]}": f"{WRONG}: axis 0 of the example 'x' is 1 long; an axis that varies needs 2",
    "outputs = ['y', 'z']": "line: the module that export returns cannot take its own inputs "
    "(ValueError: the outputs are y, z, but the module returns Tensor)",
    "return Exported(model, inputs, outputs, dynamic, data, extra={'x': x})": "line: export returns extra facts that "
    "are no JSON (TypeError: Object of type Tensor is not JSON serializable)",
    "data = []": f"{DATA} (ValueError: data is empty: there is nothing to compare the outputs on)",
    "data = [{'z': x}]": f"{DATA} (ValueError: data has z, not x)",
}


@pytest.mark.parametrize(
    ("form", "arguments", "line"),
    [
        ("pickle", {}, "--format pickle: no such format (safetensors, onnx, torch)"),
        ("torch", {"without": ", export=export"}, "line has nothing to export: give its Job export=function"),
        ("torch", {"checkpoint": "nowhere"}, "--checkpoint nowhere: no such file or directory"),
        *(("torch", {"change": change}, line) for change, line in REFUSED.items()),
        (
            "safetensors",
            {"change": "model.register_buffer('z', torch.zeros(2, dtype=torch.complex128))"},
            "--format safetensors: the model of line cannot be exported (KeyError: torch.complex128); give another "
            "format, or change the module",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    exports: Export, form: str, arguments: dict[str, str], line: str
) -> None:
    assert exports(form, **arguments) == (USAGE, "", f"rolecall: {line}\n")
    assert names() == set()


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_a_module_that_cannot_be_traced_is_refused(exports: Export, form: str) -> None:
    code, out, err = exports(form, change="model = Switch()")
    assert (code, out, names(), err.count("\n")) == (USAGE, "", set(), 1)
    assert err.startswith(f"rolecall: --format {form}: the model of line cannot be exported (")
    assert err.endswith("; give another format, or change the module\n")


@pytest.mark.parametrize(("form", "package"), [("safetensors", "safetensors"), ("onnx", "onnxscript")])
def test_a_package_that_is_missing_is_named(
    exports: Export, monkeypatch: pytest.MonkeyPatch, form: str, package: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    advice = f"--format {form}: needs {package}, which is not installed; pip install 'rolecall[export]'"
    assert exports(form) == (USAGE, "", f"rolecall: {advice}\n")


@pytest.mark.parametrize("output", ["nowhere/model.pt2", "line.py/model.pt2"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_else(exports: Export, output: str) -> None:
    code, out, err = exports("torch", "--output", output, checkpoint="nowhere")
    assert (code, out, names()) == (USAGE, "", set())
    assert err.startswith(f"rolecall: --output {output}: cannot be written (")
    assert err.count("\n") == 1
