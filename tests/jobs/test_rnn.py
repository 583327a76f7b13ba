"""The language model's parts, without a network: text, loss, weights, generated text."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch.nn import functional

from rolecall import Context, Peer, UsageError, config, telemetry
from rolecall.declare.task import Attachment
from rolecall.jobs.rnn import RnnSettings, corpus, loss, model
from rolecall.jobs.rnn.corpus import Vocabulary
from rolecall.jobs.rnn.metrics import METRICS
from rolecall.jobs.rnn.roles import Trainer


def settings(**changes: object) -> RnnSettings:
    small = {"embedding_size": 6, "hidden_size": 5, "batch_size": 4, "sequence": 7, "vocabulary": 50, "dropout": 0.0}
    return RnnSettings(**{**small, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(f"file {number}:\n    one two, two three three three\n" * 5)
    return tmp_path


# ---- the text


@pytest.mark.parametrize("text", ["def f(x):\n    return x_1 + 22\n", "", "ä b\tc\r\n\n  d", "\U000f0001\U000f0002"])
def test_tokens_are_the_text(text: str) -> None:
    words = corpus.WORD.findall(text)
    assert "".join(words) == text
    known = Vocabulary((corpus.UNKNOWN, *dict.fromkeys(words)))
    assert known.decode(known.encode(text).tolist()) == text


def test_the_vocabulary_is_the_most_frequent_words_of_the_training_text(folder: Path) -> None:
    text = corpus.load(settings(corpus=str(folder), vocabulary=4))
    assert text.vocabulary.words[:3] == (corpus.UNKNOWN, " ", "three")
    assert len(text.vocabulary) == 4
    assert int(text.train.max()) == 3
    assert (text.train == 0).any()


def test_no_file_is_in_both_parts(folder: Path) -> None:
    text = corpus.load(settings(corpus=str(folder), vocabulary=1000))
    train, validation = (text.vocabulary.decode(part.tolist()) for part in (text.train, text.validation))
    assert train.count("file") + validation.count("file") == 100
    assert validation.count("file") == 10
    numbers = [f"file {number}:" for number in range(20)]
    assert not [one for one in numbers if one in train and one in validation]


def test_a_limit_takes_whole_files_in_an_order_of_the_seed(folder: Path) -> None:
    def train(**changes: object) -> str:
        text = corpus.load(settings(corpus=str(folder), vocabulary=1000, corpus_bytes=1500, **changes))
        return text.vocabulary.decode(text.train.tolist())

    assert train() == train()
    assert train() != train(seed=2)
    assert train().count("file") % 5 == 0
    assert train().count("file") < 50


def test_last_tenth_of_a_single_file_is_for_validation(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("a b c d e " * 100)
    text = corpus.load(settings(corpus=str(file)))
    both = text.vocabulary.decode([*text.train.tolist(), *text.validation.tolist()])
    assert both == file.read_text()
    assert len(text.validation) == 100


def test_the_standard_library_is_there() -> None:
    text = corpus.load(RnnSettings(corpus_bytes=1_000_000))  # enough whole files for both parts, whatever their sizes
    assert len(text.train) > 50_000
    assert "def" in text.vocabulary.words
    assert len(text.validation) > 1000


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: str(path / "none"), "no such file or folder"),
        (lambda path: str(path), "the folder holds no file"),
        (lambda path: (path / "short").write_text("a b") and str(path / "short"), "too few for BATCH_SIZE=4"),
        (lambda path: (path / "zeros").write_bytes(b"\0" * 9) and str(path), "too few for BATCH_SIZE=4"),
    ],
    ids=["missing", "empty folder", "short", "no text"],
)
def test_a_bad_corpus_is_refused(tmp_path: Path, make: object, says: str) -> None:
    target = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(UsageError, match=says) as refusal:
        corpus.check(settings(corpus=target))
    assert f"CORPUS={target}" in str(refusal.value)


def test_windows_cover_every_token_once() -> None:
    streams = corpus.streams(torch.arange(103), 4)
    assert streams.shape == (25, 4)
    assert streams[:3, 1].tolist() == [25, 26, 27]
    windows = [corpus.window(streams, number, 7) for number in range(corpus.steps(streams, 7))]
    assert torch.equal(torch.cat([inputs for inputs, _ in windows]), streams[:-1])
    assert torch.equal(torch.cat([targets for _, targets in windows]), streams[1:])
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in windows)


def test_more_micro_batches_than_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_SIZE", "3")
    monkeypatch.setenv("MICRO_BATCHES", "4")
    with pytest.raises(UsageError, match="MICRO_BATCHES=4: more than BATCH_SIZE=3"):
        config.load(RnnSettings)


# ---- the loss


@pytest.mark.parametrize(
    ("chunk", "columns", "threads", "outer"),
    [(1, 3, 0, 1.0), (4, 3, 1, 0.3), (1000, 3, 60, 1.0), (1, 512, 60, 0.3), (4, 512, 0, 0.3), (1000, 512, 1, 1.0)],
)
def test_loss_and_gradients_equal_those_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int, columns: int, threads: int, outer: float
) -> None:
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(loss, "CHUNK_COLUMNS", columns)
    torch.manual_seed(0)
    decoder = model.Decoder(settings(), 50)
    hidden, targets = torch.randn(7, 4, 5, requires_grad=True), torch.randint(50, (7, 4))
    wanted = [hidden, decoder.weight, decoder.bias]
    plain = functional.cross_entropy(decoder(hidden).view(-1, 50), targets.view(-1), reduction="sum")
    expected = torch.autograd.grad(0.5 * outer * plain, wanted)
    fused = decoder.loss(hidden, targets, 0.5, pool=loss.LossThreads(threads) if threads else None)
    torch.testing.assert_close(fused, 0.5 * plain)
    torch.testing.assert_close(torch.autograd.grad(outer * fused, wanted), expected)


def test_an_improbable_target_has_a_finite_loss() -> None:
    decoder = model.Decoder(settings(), 50)
    with torch.no_grad():
        decoder.bias[7] = 500.0
    hidden = torch.zeros(1, 1, 5, requires_grad=True)
    total = decoder.loss(hidden, torch.tensor([[3]]))
    assert float(total.detach()) == pytest.approx(500, abs=1)
    total.backward()
    assert torch.isfinite(decoder.weight.grad).all()  # type: ignore[arg-type]


def test_what_the_trainer_saves_is_what_it_goes_on_from(folder: Path) -> None:
    chosen, members = (
        settings(corpus=str(folder), dropout=0.5, micro_batches=3),
        (Peer("ps", 0, 0), Peer("trainer", 0, 1)),
    )
    metrics = telemetry.build([*telemetry.WORKER, *METRICS], CollectorRegistry())
    trainer = Trainer(Context(chosen, Attachment(1, members[1], members), metrics))

    def run() -> list[torch.Tensor]:
        return [trainer.hidden(part, number, torch.ones(7, 2, 6)) for number in (4, 5) for part in (0, 1)]

    trainer.hidden(0, 3, torch.ones(7, 2, 6))
    saved = copy.deepcopy(trainer.save())
    assert saved["state"][0].shape == (2, 4, 5)
    before = run()
    with torch.no_grad():
        assert not torch.equal(trainer.hidden(0, 4, torch.ones(7, 2, 6)), before[0])  # without dropout
    trainer.load(saved)
    assert all(map(torch.equal, before, run()))


# ---- weights and generated text


def test_each_part_begins_with_other_weights_that_the_seed_gives() -> None:
    def weights(**changes: object) -> dict[str, torch.Tensor]:
        return model.LanguageModel(settings(**changes), 50).state_dict()

    one, two, other = weights(), weights(), weights(seed=2)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if "decoder.bias" not in name)


def test_the_unknown_word_is_never_drawn() -> None:
    decoder = model.Decoder(settings(), 3)
    with torch.no_grad():
        decoder.bias.copy_(torch.tensor([50.0, 0.0, 0.0]))
    drawn = {decoder.sample(torch.zeros(5), 1.0, torch.Generator().manual_seed(seed)) for seed in range(20)}
    assert drawn == {1, 2}
