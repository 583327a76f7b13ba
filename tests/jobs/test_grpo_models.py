"""Real models in examples/grpo.py: a tiny one of transformers, made here, and vLLM's offline API, by a stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolecall.errors import UsageError
from tests import commands

pytestmark = [
    pytest.mark.skipif(  # looked for, not imported: grpo_models.py prepares its import
        importlib.util.find_spec("transformers") is None, reason="transformers is missing: pip install 'rolecall[llm]'"
    ),
    pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning"),
]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CHARACTERS = "0123456789+="
ANSWER = 5  # tokens of a completion at most


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def models(_path: None) -> ModuleType:
    return importlib.import_module("grpo_models")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and a tokenizer of characters, as `save_pretrained` writes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        importlib.import_module("grpo_models")  # hides a torchvision that is built for another torch
    path = tmp_path_factory.mktemp("tiny")
    tokenizer().save_pretrained(path)
    model().save_pretrained(path)
    return path


def tokenizer(**special: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({text: id for id, text in enumerate(["<pad>", "<end>", *CHARACTERS])}, "<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **(special or {"pad_token": "<pad>", "eos_token": "<end>"}))


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,  # far from uniform
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def scored(policy: Any, asked: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """The log probabilities of the answers' tokens up to the end, by a forward pass, and a mask of these."""
    with torch.no_grad():
        logprobs, mask = policy.judge(asked, answers)
    assert 0 < mask.float().mean() < 1, "some answers end early"
    return logprobs[mask], mask


@pytest.mark.parametrize("padding", ["<pad>", "<end>"])
def test_log_probabilities_of_samples_are_those_of_a_forward_pass(
    models: ModuleType, directory: Path, tmp_path: Path, padding: str
) -> None:
    shutil.copytree(directory, tmp_path / "model")
    tokenizer(pad_token=padding, eos_token="<end>").save_pretrained(tmp_path / "model")
    policy = models.HuggingFace(str(tmp_path / "model"))
    asked, answers, logprobs = policy.sample(["1+1=", "37+48=", "5="], 40, ANSWER)
    assert torch.equal(asked, policy.encode(["1+1=", "37+48=", "5="]).repeat_interleave(40, 0))
    assert asked[0, :2].tolist() == [policy.pad] * 2
    assert answers.shape == logprobs.shape == (120, ANSWER)
    expected, mask = scored(policy, asked, answers)
    torch.testing.assert_close(logprobs[mask], expected, atol=1e-5, rtol=1e-5)


def test_greedy_answers_are_the_likeliest_tokens(models: ModuleType, directory: Path) -> None:
    policy = models.HuggingFace(str(directory))
    asked, answers, logprobs = policy.sample(["1+1=", "37+48="], 1, ANSWER, greedy=True)
    with torch.no_grad():
        best = policy(torch.cat([asked, answers], 1))[:, asked.shape[1] - 1 : -1].log_softmax(2).max(2)
    mask = policy.judge(asked, answers)[1]
    assert torch.equal(answers[mask], best.indices[mask])
    torch.testing.assert_close(logprobs[mask], best.values[mask], atol=1e-5, rtol=1e-5)


def test_padding_changes_no_logits_and_gradients_are_finite(models: ModuleType, directory: Path) -> None:
    policy = models.HuggingFace(str(directory))
    padded, alone = policy.encode(["37+48=85", "1+1=2"]), policy.encode(["1+1=2"])
    logits = policy(padded)
    torch.testing.assert_close(logits[1:, 3:], policy(alone), atol=1e-5, rtol=1e-5)
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


def test_a_real_model_learns_from_examples(
    monkeypatch: pytest.MonkeyPatch, models: ModuleType, directory: Path
) -> None:
    grpo, policy = importlib.import_module("grpo"), models.HuggingFace(str(directory))
    monkeypatch.setattr(grpo, "example", grpo.solve)  # without mistakes
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    losses = []
    for _ in range(5):
        losses.append(grpo.example_loss(policy, ["37+48=", "01+02="]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_text_of_an_answer_ends_before_its_end_and_shows_special_tokens(models: ModuleType, directory: Path) -> None:
    policy = models.HuggingFace(str(directory))
    answers = policy.encode(["85", "2"], answers=True)
    eight, five, end = answers[0].tolist()
    assert end == policy.end
    assert answers[1, 1:].tolist() == [end, end]
    assert policy.decode(answers) == ["85", "2"]
    assert policy.decode(torch.tensor([[eight, five, end, five], [eight, policy.pad, five, five]])) == [
        "85",
        "8<pad>55",
    ]


def test_a_model_that_cannot_be_loaded_is_refused(models: ModuleType, directory: Path, tmp_path: Path) -> None:
    def refused(model: object, engine: str = "torch") -> str:
        settings = importlib.import_module("grpo").Grpo(model=str(model), engine=engine)
        with pytest.raises(UsageError) as error:
            models.build(settings, sampling=False)
        assert str(error.value).startswith(f"MODEL={model}")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "must be MODEL=hf:DIRECTORY" in refused("gpt2")
    assert "must be MODEL=hf:DIRECTORY" in refused("toy", "vllm")
    assert "no such directory" in refused(f"hf:{tmp_path}/missing")
    (tmp_path / "empty").mkdir()
    assert "its tokenizer cannot be loaded" in refused(f"hf:{tmp_path}/empty")
    tokenizer().save_pretrained(tmp_path / "words")
    assert "no causal model can be loaded" in refused(f"hf:{tmp_path}/words")
    shutil.copytree(directory, tmp_path / "endless")
    tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "endless")
    assert "no eos_token" in refused(f"hf:{tmp_path}/endless")


@pytest.mark.parametrize(("module", "missing"), [("grpo_models", "transformers"), ("grpo_vllm", "vllm")])
def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, models: ModuleType, module: str, missing: str
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=rf"needs {missing} .*pip install"):
        importlib.import_module(module)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose module `vllm` is the stand-in."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("vllm_stand_in.py"), folder / "vllm.py")
    return folder


def test_vllm_samples_with_the_newest_weights(
    monkeypatch: pytest.MonkeyPatch, models: ModuleType, directory: Path, vllm: Path
) -> None:
    monkeypatch.syspath_prepend(str(vllm))
    grpo = importlib.import_module("grpo")
    sampler = models.build(grpo.Grpo(model=f"hf:{directory}", engine="vllm"), sampling=True)
    policy = models.HuggingFace(str(directory))
    for _ in range(2):
        for parameter in policy.parameters():
            nn.init.normal_(parameter, std=0.5)
        sampler.load_state_dict(policy.state_dict())
        asked, answers, logprobs = sampler.sample(["1+1=", "37+48="], 20, ANSWER)
        assert torch.equal(asked, policy.encode(["1+1=", "37+48="]).repeat_interleave(20, 0))
        expected, mask = scored(policy, asked, answers)
        torch.testing.assert_close(logprobs[mask], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_example_trains_a_real_model(tmp_path: Path, directory: Path, vllm: Path, engine: str) -> None:
    small = {"GENERATORS": "1", "REWARDS": "1", "GROUPS": "4", "GROUP": "4", "UPDATES": "10", "TAUGHT": "2"}
    ended = commands.run(
        [sys.executable, "-P", "-m", "rolecall", "run", EXAMPLES / "grpo.py"],
        cwd=tmp_path,
        timeout=120,  # imports of transformers take long on a busy machine
        env={
            **os.environ,
            **small,
            "MODEL": f"hf:{directory}",
            "ENGINE": engine,
            "PYTHONPATH": str(vllm),
            "CHECKPOINT_DIR": str(tmp_path / "run"),
            "SINKS": "none",
            "THREADS": "1",
        },
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["job"], summary["state"], summary["steps"]) == ("grpo", "finished", 10)
    assert summary["result"]["tokens"] == 8 * 16 * 4
