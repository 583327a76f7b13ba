"""The text: files to tokens to numbers, in a training and a validation part."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rolecall import UsageError
from rolecall.jobs.rnn import RnnSettings
from rolecall.jobs.support import cached, choose_device, standard_library, track, versions

UNKNOWN = "<unk>"
BYTES = 256
VALIDATION = 10  # every tenth file is for validation; of a single file the last tenth
# words, numbers, what follows on a line break, spaces, and every other character by itself; together they are the text
WORD = re.compile(r"[^\W\d_]+|\d+|\n[ \t]*|[ \t]+|.", re.DOTALL)


@dataclass(frozen=True)
class Vocabulary:
    """Token to number and back. No words: the tokens are bytes."""

    words: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.words) or BYTES

    def encode(self, text: str) -> Tensor:
        """Numbers [tokens] int64; 0 is the unknown word."""
        if not self.words:
            return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))
        numbers = {word: number for number, word in enumerate(self.words)}
        return torch.tensor([numbers.get(word, 0) for word in WORD.findall(text)], dtype=torch.int64)

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of `numbers`."""
        if not self.words:
            return bytes(numbers).decode(errors="replace")
        return "".join(self.words[number] for number in numbers)


@dataclass(frozen=True)
class Text:
    """A corpus, cut into tokens: numbers [tokens] int64 of both parts. `digest` identifies the text."""

    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    digest: str


def load(settings: RnnSettings) -> Text:
    """Reads CORPUS. Raises UsageError where it cannot be read or is too short."""
    files = _files(settings.corpus)
    try:
        version = versions([Path(__file__), *files])
        key = (version, settings.tokens, settings.vocabulary, settings.corpus_bytes, settings.seed)
    except OSError as error:
        raise UsageError(f"CORPUS={settings.corpus}: {error.filename} cannot be read ({error.strerror})") from error
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
    if settings.tokens == "byte":
        vocabulary = Vocabulary()
    else:
        counts = Counter(WORD.findall(train))
        counts.pop(UNKNOWN, None)
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: settings.vocabulary - 1]
        vocabulary = Vocabulary((UNKNOWN, *(word for word, _ in common)))
    digest = hashlib.sha256(f"{train}\0{validation}".encode()).hexdigest()
    tokens = [vocabulary.encode(part) for part in track((train, validation), "encoding the text", unit="parts")]
    return list(vocabulary.words), tokens[0], tokens[1], digest


def check(settings: RnnSettings) -> None:
    """Raises UsageError for a corpus that cannot be read, which the ps does not need, or a device that is missing."""
    if settings.role != "trainer":
        choose_device(settings.embedding_device, "EMBEDDING_DEVICE")
    if settings.role != "ps":
        load(settings)


def streams(tokens: Tensor, batch_size: int) -> Tensor:
    """`tokens` as streams side by side [length, batch_size]; what does not fill all of them is left out."""
    length = len(tokens) // batch_size
    return tokens[: length * batch_size].view(batch_size, length).t().contiguous()


def steps(streams: Tensor, sequence: int) -> int:
    """How many steps of up to `sequence` tokens the streams [length, batch] make."""
    return -(-(len(streams) - 1) // sequence)


def targets(streams: Tensor) -> int:
    """How many tokens of the streams [length, batch] are predicted: all but each stream's first."""
    return streams.numel() - streams.shape[1]


def window(streams: Tensor, step: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Step number `step`: inputs and targets [up to `sequence`, batch]; a target is the token after its input."""
    begin = step * sequence
    end = min(begin + sequence, len(streams) - 1)
    return streams[begin:end], streams[begin + 1 : end + 1]


def _split(settings: RnnSettings, files: Sequence[Path]) -> tuple[str, str]:
    """The training and the validation text."""
    if len(files) == 1:
        whole = _read(files[0], settings)
        limit = settings.corpus_bytes or len(whole)
        text = whole[:limit].decode(errors="replace")
        cut = len(text) - len(text) // VALIDATION
        return text[:cut], text[cut:]
    order = np.random.default_rng(settings.seed).permutation(len(files))
    parts: tuple[list[bytes], list[bytes]] = [], []
    total = taken = 0
    for index in track(order, "reading the text", unit="files"):
        content = _read(files[index], settings)
        if b"\0" in content or not content.strip():
            continue  # no text
        parts[taken % VALIDATION == VALIDATION // 2].append(content)
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


def _read(path: Path, settings: RnnSettings) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"CORPUS={settings.corpus}: {path} cannot be read ({error.strerror})") from error
