"""`rolecall export` of the four jobs: what each file answers, without Rolecall, beside the job's own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from safetensors.torch import load_file
from torch import nn

from rolecall import __main__
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.jobs.hybrid import HybridSettings
from rolecall.jobs.hybrid import evaluate as of_hybrid
from rolecall.jobs.hybrid.table import Bags
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps import evaluate as of_ps
from rolecall.jobs.rl import RlSettings
from rolecall.jobs.rl.envs import describe
from rolecall.jobs.rnn import RnnSettings
from rolecall.jobs.rnn import evaluate as of_rnn
from tests.export import exports

pytestmark = pytest.mark.usefixtures("torchlib")
ROOT = Path(__file__).resolve().parents[2]
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOB", raising=False)


# what their checkpoints name, which the user must name too
GIVEN = {
    "ps": ["--model", "tests.export.exports:Small"],
    "rnn": ["--corpus", "text.txt"],
    "hybrid": ["--dataset", "tests.export.exports:lines"],
}


def export(job: str, path: Path, form: str, *arguments: str) -> int:
    return __main__.main(["export", job, "--checkpoint", str(path), "--format", form, *GIVEN.get(job, []), *arguments])


def card(file: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(f"{file}.json").read_text())
    return read


def onnx(file: str) -> Callable[[Arrays], Arrays]:
    session = onnxruntime.InferenceSession(file)
    names = [each.name for each in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True))


# ---- ps


def test_ps_is_put_together_from_its_servers_shards(capsys: pytest.CaptureFixture[str]) -> None:
    path = exports.ps(Path("run"))
    assert export("ps", path, "onnx") == 0
    assert "score: accuracy 0." in capsys.readouterr().out
    state = checkpoint.read(path, "ps").whole().state
    settings = PsSettings(dataset="digits", model="tests.export.exports:Small", seed=1)
    accuracy = of_ps.evaluate(settings, state)["accuracy"]
    assert card("ps.onnx")["score"]["accuracy"] == accuracy
    network = exports.Small().eval()
    nn.utils.vector_to_parameters(state["model"]["parameters"], network.parameters())
    with torch.no_grad():
        for buffer, value in zip(network.buffers(), state["model"]["buffers"], strict=True):
            buffer.copy_(value)
        images = torch.rand(5, 1, 28, 28)
        expected = network(images).numpy()
    np.testing.assert_allclose(onnx("ps.onnx")({"inputs": images.numpy()})["scores"], expected, rtol=1e-4, atol=1e-4)
    assert card("ps.onnx")["licence_of_the_data"].startswith("CC BY 4.0")
    assert card("ps.onnx")["extra"]["normalisation"].keys() == {"mean", "std"}


# ---- rl


class Pieces(gymnasium.Env[Any, Any]):
    """Observations and actions of one kind each, in `kinds`; an episode has five steps."""

    kinds: ClassVar[dict[str, tuple[Any, Any]]] = {
        "Clipped": (
            Box(-9.0, 9.0, (3,), np.float64),
            Box(np.array([-2.0, 0.0]), np.array([2.0, np.inf]), dtype=np.float64),
        ),
        "Started": (Discrete(4), Discrete(3, start=5)),
        "Several": (Box(-1.0, 1.0, (), np.float32), MultiDiscrete([2, 4])),
        "Switches": (Dict(a=Box(-1.0, 1.0, (2,), np.float32), b=Discrete(3)), MultiBinary(4)),
        "Image": (Box(0, 255, (36, 36), np.uint8), Discrete(3)),
    }

    def __init__(self, kind: str) -> None:
        self.observation_space, self.action_space = self.kinds[kind]
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}


for name in Pieces.kinds:
    gymnasium.register(f"{name}-v0", Pieces, kwargs={"kind": name})


def test_rl_normalises_observations_itself() -> None:
    path = exports.rl(Path("run"), env_id="CartPole-v1")
    assert export("rl", path, "onnx", "--no-evaluate") == 0
    model = checkpoint.read(path, "rl").state["learner"]["model"]
    observations = torch.randn(6, 4) * 3
    scaled = (observations - model["normalizer.mean"]) / (model["normalizer.variance"] + 1e-8).sqrt()
    features = scaled.clamp(-10, 10)
    for layer in (1, 3):
        features = (features @ model[f"policy.0.{layer}.weight"].T + model[f"policy.0.{layer}.bias"]).tanh()
    expected = features @ model["policy.1.layer.weight"].T + model["policy.1.layer.bias"]
    answer = onnx("rl.onnx")({"observations": observations.numpy()})
    np.testing.assert_allclose(answer["parameters"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(answer["actions"], expected.argmax(-1))


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        ("Clipped-v0", {"normalize": True}),
        ("Clipped-v0", {"memory": "lstm"}),
        ("Started-v0", {"algorithm": "reinforce"}),
        ("Several-v0", {"memory": "lstm"}),
        ("Switches-v0", {}),
        ("Image-v0", {}),
    ],
)
def test_policies_of_all_kinds_answer_as_their_checkpoints(env_id: str, settings: dict[str, Any]) -> None:
    path = exports.rl(Path("run"), env_id=env_id, **settings)
    assert export("rl", path, "torch", "--no-evaluate") == 0
    described = card("rl.pt2")
    recurrent = "memory" in settings
    assert [each["name"] for each in described["inputs"]] == ["observations", *["state"] * recurrent]
    assert [each["name"] for each in described["outputs"]] == ["actions", "parameters", *["next_state"] * recurrent]
    space = describe(RlSettings(env_id=env_id)).spaces.action
    assert described["outputs"][0]["dtype"] == np.dtype(space.dtype).name
    assert described["outputs"][0]["shape"] == [2, *space.shape]
    assert described["agreement"][0]["values"] == 801 * int(np.prod(space.shape))
    program = torch.export.load("rl.pt2").module()
    zeros = [torch.zeros([1, *each["shape"][1:]], dtype=getattr(torch, each["dtype"])) for each in described["inputs"]]
    with torch.no_grad():
        actions = program(*zeros)[0]
    assert space.contains(actions[0].numpy() if space.shape else np.int64(actions[0]))


# ---- rnn


def test_rnn_is_one_module_for_texts_of_any_length() -> None:
    path = exports.rnn(Path("run"), Path("text.txt"))
    assert export("rnn", path, "onnx") == 0
    snapshot, described = checkpoint.read(path, "rnn"), card("rnn.onnx")
    settings = RnnSettings(**snapshot.about["settings"])
    model, vocabulary = of_rnn.restore(settings, snapshot.state)
    assert described["extra"]["vocabulary"] == list(vocabulary.words)
    assert described["score"]["perplexity"] == pytest.approx(of_rnn.evaluate(settings, snapshot.state)["perplexity"])
    run = onnx("rnn.onnx")
    for length, batch in ((1, 1), (13, 3)):
        tokens, (hidden, cell) = torch.randint(0, len(vocabulary), (length, batch)), model.lstm.start(batch)
        with torch.no_grad():
            output, (after, _) = model.lstm(model.embedding(tokens), (hidden, cell))
            expected = model.decoder(output)
        answer = run({"tokens": tokens.numpy(), "hidden": hidden.numpy(), "cell": cell.numpy()})
        np.testing.assert_allclose(answer["logits"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(answer["next_hidden"], after, rtol=1e-4, atol=1e-5)


# ---- hybrid


def test_hybrid_has_the_table_of_all_servers_and_no_optimizer() -> None:
    path = exports.hybrid(Path("run"))
    assert export("hybrid", path, "onnx") == 0
    snapshot = checkpoint.read(path, "hybrid").whole()
    model = of_hybrid.restore(HybridSettings(**snapshot.about["settings"]), snapshot.state)
    run = onnx("hybrid.onnx")
    for sizes in ([2, 0, 3], [1]):  # an empty bag too
        rows, weights, ends = torch.randint(0, 50, (sum(sizes),)), torch.rand(sum(sizes)), torch.tensor([0, *sizes])
        offsets = ends.cumsum(0)
        with torch.no_grad():
            expected = model(Bags(rows, offsets, weights))
        answer = run({"rows": rows.numpy(), "offsets": offsets[:-1].numpy(), "weights": weights.numpy()})
        np.testing.assert_allclose(answer["logits"], expected, rtol=1e-4, atol=1e-6)
    assert export("hybrid", path, "safetensors", "--no-evaluate") == 0
    tensors = load_file("hybrid.safetensors")
    assert tensors.keys() == {
        "table.weight",
        *(f"dense.{layer}.{what}" for layer in (0, 2) for what in ("weight", "bias")),
    }
    assert torch.equal(tensors["table.weight"], snapshot.state["embeddings"]["weight"])


# ---- the command, and the page's lines


def test_the_lines_of_the_page_run_without_rolecall(tmp_path: Path) -> None:
    """The example's checkpoint is exported by the real command, and in each other format; then a process that cannot
    import Rolecall runs the page's code.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    Path("run").mkdir()
    Checkpoints(Path("run"), "regression", 1).write(3, {"model": model.state_dict()}, {"settings": {"width": 32}})
    target = str(ROOT / "examples" / "regression.py")
    command = [sys.executable, "-m", "rolecall", "export", target, "--checkpoint", "run", "--format", "safetensors"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"wrote {tmp_path}/regression.safetensors, ")
    assert "score: error " in ended.stdout
    try:
        for form in ("onnx", "torch"):
            assert export(target, Path("run"), form, "--no-evaluate") == 0
    finally:
        sys.modules.pop("regression", None)
    pages = [ROOT / "examples" / f"load_{form}.py" for form in ("torch", "onnx", "safetensors")]
    run = "import runpy, sys\nsys.modules['rolecall'] = None\nfor page in sys.argv[1:]:\n"
    run += "    print('values:', runpy.run_path(page)['values'].tolist())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", run, *map(str, pages)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    with torch.no_grad():
        expected = model(torch.tensor([[1.0, 0.5], [0.5, 2.0]])).numpy()
    printed = [line.removeprefix("values:") for line in ended.stdout.splitlines() if line.startswith("values:")]
    assert len(printed) == len(pages)
    for line in printed:
        np.testing.assert_allclose(json.loads(line), expected, rtol=1e-4, atol=1e-6)
