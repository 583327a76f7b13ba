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


def scored(policy: Any, tokens: Tensor) -> Tensor:
    """The log probability of each token of the completions by a forward pass."""
    with torch.no_grad():
        distributions = policy(tokens)[:, -ANSWER - 1 : -1].log_softmax(2)
    return distributions.gather(2, tokens[:, -ANSWER:, None])[:, :, 0]


def until_end(policy: Any, completions: Tensor) -> Tensor:
    """A mask of the tokens up to the end, which is one of them."""
    ends = (completions == policy.end).int()
    return (ends.cumsum(1) - ends) == 0


@pytest.mark.parametrize("padding", ["<pad>", "<end>"])
def test_log_probabilities_of_samples_are_those_of_a_forward_pass(
    models: ModuleType, directory: Path, tmp_path: Path, padding: str
) -> None:
    shutil.copytree(directory, tmp_path / "model")
    tokenizer(pad_token=padding, eos_token="<end>").save_pretrained(tmp_path / "model")
    policy = models.HuggingFace(str(tmp_path / "model"))
    prompts = policy.encode(["1+1=", "37+48=", "5="])
    assert prompts.shape == (3, 6)
    assert prompts[0, 0] == policy.pad
    prompts = prompts.repeat_interleave(40, 0)
    tokens, logprobs = policy.sample(prompts, ANSWER)
    completions = tokens[:, 6:]
    mask = until_end(policy, completions)
    assert torch.equal(tokens[:, :6], prompts)
    assert completions.shape == logprobs.shape == (120, ANSWER)
    assert 0 < mask.float().mean() < 1, "some end early"
    torch.testing.assert_close(logprobs[mask], scored(policy, tokens)[mask], atol=1e-5, rtol=1e-5)


def test_greedy_answers_are_the_likeliest_tokens(models: ModuleType, directory: Path) -> None:
    policy = models.HuggingFace(str(directory))
    prompts = policy.encode(["1+1=", "37+48="])
    tokens, logprobs = policy.sample(prompts, ANSWER, greedy=True)
    with torch.no_grad():
        best = policy(tokens)[:, -ANSWER - 1 : -1].log_softmax(2).max(2)
    mask = until_end(policy, tokens[:, -ANSWER:])
    assert torch.equal(tokens[:, -ANSWER:][mask], best.indices[mask])
    torch.testing.assert_close(logprobs[mask], best.values[mask], atol=1e-5, rtol=1e-5)


def test_padding_changes_no_logits_and_gradients_are_finite(models: ModuleType, directory: Path) -> None:
    policy = models.HuggingFace(str(directory))
    padded, alone = policy.encode(["37+48=85", "1+1=2"]), policy.encode(["1+1=2"])
    logits = policy(padded)
    torch.testing.assert_close(logits[1:, 3:], policy(alone), atol=1e-5, rtol=1e-5)
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


def test_text_of_a_completion_ends_before_its_end_and_shows_special_tokens(models: ModuleType, directory: Path) -> None:
    text = models.Text(str(directory))
    eight, five = text.encode(["85"])[0].tolist()
    answers = text.encode_answers(["85", "2"])
    assert answers.tolist() == [[eight, five, text.end], [answers[1, 0], text.end, text.end]]
    assert text.decode(answers) == ["85", "2"]
    assert text.decode(torch.tensor([[eight, five, text.end, five], [eight, text.pad, five, five]])) == [
        "85",
        "8<pad>55",
    ]


def test_a_directory_without_a_model_or_a_tokenizer_is_refused(
    models: ModuleType, directory: Path, tmp_path: Path
) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UsageError) as error:
            models.HuggingFace(str(path))
        assert str(error.value).startswith(f"MODEL=hf:{path}: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such directory" in refused(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "its tokenizer cannot be loaded" in refused(tmp_path / "empty")
    tokenizer().save_pretrained(tmp_path / "words")
    assert "no causal model can be loaded" in refused(tmp_path / "words")
    shutil.copytree(directory, tmp_path / "endless")
    tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "endless")
    assert "no eos_token" in refused(tmp_path / "endless")


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
    engine = importlib.import_module("grpo_vllm").Vllm(grpo.Grpo(model=f"hf:{directory}", answer=ANSWER))
    policy = models.HuggingFace(str(directory))
    for _ in range(2):
        for parameter in policy.parameters():
            nn.init.normal_(parameter, std=0.5)
        engine.load({name: tensor.clone() for name, tensor in policy.state_dict().items()})
        samples = engine.sample(["1+1=", "37+48="], 20)
        completions = samples["tokens"][:, -ANSWER:]
        mask = until_end(policy, completions)
        assert 0 < mask.float().mean() < 1
        assert len(samples["texts"]) == 40
        assert samples["texts"] == policy.decode(completions)
        torch.testing.assert_close(
            samples["logprobs"][mask], scored(policy, samples["tokens"])[mask], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_example_trains_a_real_model(tmp_path: Path, directory: Path, vllm: Path, engine: str) -> None:
    settings = {"MODEL": f"hf:{directory}", "ENGINE": engine, "ANSWER": str(ANSWER), "UPDATES": "3"}
    ended = commands.run(
        [sys.executable, "-P", "-m", "rolecall", "run", EXAMPLES / "grpo.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(vllm),
            "CHECKPOINT_DIR": str(tmp_path / "run"),
            "SINKS": "none",
            **settings,
        },
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["job"], summary["state"]) == ("grpo", "finished")
