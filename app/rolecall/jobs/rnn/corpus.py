"""Reads the text and converts it to token numbers, in a training and a validation part."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.rnn import RnnSettings
from rolecall.jobs.support import cached, standard_library, track, versions

UNKNOWN = "<unk>"
VALIDATION_SHARE = 10  # every tenth file is for validation; of a single file, the last tenth
# words, numbers, line breaks with indentation, spaces, and every other character alone: joined, they are the text
WORD = re.compile(r"[^\W\d_]+|\d+|\n[ \t]*|[ \t]+|.", re.DOTALL)


@dataclass(frozen=True)
class Vocabulary:
    """Words to numbers and back. Number 0 is the unknown word."""

    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        """Numbers [tokens] int64."""
        numbers = {word: number for number, word in enumerate(self.words)}
        return torch.tensor([numbers.get(word, 0) for word in WORD.findall(text)], dtype=torch.int64)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of `numbers`."""
        return "".join(self.words[number] for number in numbers)


@dataclass(frozen=True)
class Text:
    """The token numbers [tokens] int64 of both parts of a corpus. `digest` identifies the text."""

    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    digest: str


@dataclass(frozen=True)
class TextDescription:
    """The text that the trainer has read. An epoch is `steps` steps over `tokens` tokens, of which `targets` are
    predicted."""

    corpus: str
    digest: str
    vocabulary: Vocabulary
    tokens: int
    targets: int
    steps: int
    validation_targets: int
    validation_steps: int

    def state_dict(self) -> dict[str, Any]:
        """The part that a checkpoint contains."""
        return {"digest": self.digest, "vocabulary": list(self.vocabulary.words)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UsageError if `state` is of another text."""
        if state["digest"] != self.digest:
            raise UsageError(
                f"CORPUS={self.corpus}: the newest checkpoint was trained on another text; restore that text, or set "
                "another CHECKPOINT_DIR"
            )


def load(settings: RnnSettings) -> Text:
    """Reads CORPUS. Raises UsageError if it cannot be read or is too short."""
    files = _files(settings.corpus)
    with UsageError.wrap(f"CORPUS={settings.corpus}: cannot be read", OSError):
        key = (versions([Path(__file__), *files]), settings.vocabulary, settings.corpus_bytes, settings.seed)
        words, train, validation, digest = cached(_tokens, ignore=("settings", "files"))(key, settings, files)
    text = Text(Vocabulary(tuple(words)), train, validation, digest)
    for name, part in (("training", text.train), ("validation", text.validation)):
        if len(part) < 2 * settings.batch_size:
            raise UsageError(
                f"CORPUS={settings.corpus}: {len(part)} tokens of {name} text are too few for "
                f"BATCH_SIZE={settings.batch_size}, which needs {2 * settings.batch_size}"
            )
    return text


def _tokens(key: object, settings: RnnSettings, files: Sequence[Path]) -> tuple[list[str], Tensor, Tensor, str]:
    """The words of the vocabulary, the numbers of both parts, and the digest."""
    train, validation = _split(settings, files)
    counts = Counter(WORD.findall(train))
    counts.pop(UNKNOWN, None)
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: settings.vocabulary - 1]
    vocabulary = Vocabulary((UNKNOWN, *(word for word, _ in common)))
    digest = hashlib.sha256(f"{train}\0{validation}".encode()).hexdigest()
    tokens = [vocabulary.encode(part) for part in track((train, validation), "encoding the text", unit="parts")]
    return list(vocabulary.words), tokens[0], tokens[1], digest


def check(settings: RnnSettings) -> None:
    """Raises UsageError if this rank needs the text and cannot read it; the ps does not need it."""
    if settings.role != "ps":
        load(settings)


def streams(tokens: Tensor, batch_size: int) -> Tensor:
    """`tokens` as parallel streams [length, batch_size]; a remainder that does not fill all of them is dropped."""
    length = len(tokens) // batch_size
    return tokens[: length * batch_size].view(batch_size, length).t().contiguous()


def steps(streams: Tensor, sequence: int) -> int:
    """The number of steps of up to `sequence` tokens in the streams [length, batch]."""
    return -(-(len(streams) - 1) // sequence)


def targets(streams: Tensor) -> int:
    """The number of tokens of the streams [length, batch] that are predicted: all but the first of each stream."""
    return streams.numel() - streams.shape[1]


def window(streams: Tensor, step: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Step number `step`: inputs and targets [up to `sequence`, batch]; a target is the token after its input."""
    begin = step * sequence
    end = min(begin + sequence, len(streams) - 1)
    return streams[begin:end], streams[begin + 1 : end + 1]


def _split(settings: RnnSettings, files: Sequence[Path]) -> tuple[str, str]:
    """The training and the validation text."""
    if len(files) == 1:
        whole = files[0].read_bytes()
        limit = settings.corpus_bytes or len(whole)
        text = whole[:limit].decode(errors="replace")
        cut = len(text) - len(text) // VALIDATION_SHARE
        return text[:cut], text[cut:]
    order = np.random.default_rng(settings.seed).permutation(len(files))
    parts: tuple[list[bytes], list[bytes]] = [], []
    total = taken = 0
    for index in track(order, "reading the text", unit="files"):
        content = files[index].read_bytes()
        if b"\0" in content or not content.strip():
            continue  # not text
        parts[taken % VALIDATION_SHARE == VALIDATION_SHARE // 2].append(content)
        total, taken = total + len(content), taken + 1
        if settings.corpus_bytes and total >= settings.corpus_bytes and parts[1]:
            break
    train, validation = (b"\n".join(part).decode(errors="replace") for part in parts)
    return train, validation


def _files(corpus: str) -> list[Path]:
    if corpus == "stdlib":
        return standard_library()[1]
    path = Path(corpus)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"CORPUS={corpus}: no such file or folder; or set CORPUS=stdlib")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise UsageError(f"CORPUS={corpus}: the folder holds no file")
    return files
