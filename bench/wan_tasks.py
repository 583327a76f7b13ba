"""What `make bench-wan` trains, as a user's MODEL and DATASET of `ps`, and with which settings."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rolecall.jobs.ps.model import ConvNet
from rolecall.jobs.support import standard_library

CONTEXT = 24  # bytes that the next one is told from
CLASSES = 128  # ASCII; what is beyond counts as 0
TRAIN, TEST = 32_768, 4_096  # samples of text
TEST_FILES = 10  # every tenth file is tested with
FAST_SECONDS, SLOWER = 0.2, 4  # a trainer's pass where passes are pauses, and one trainer's in times of it


class Wide(ConvNet):
    """The tutorial's convolutions before wider layers: 10 million parameters. Images [n, 1, 28, 28] to
    log-probabilities [n, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(9216, 1024)
        self.fc2 = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))  # type: ignore[assignment]


class NextByte(nn.Module):
    """A perceptron over the bytes before: [n, CONTEXT] float32 to logits [n, CLASSES] of the byte after them. 0.6
    million parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 32)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * 32, 640), nn.ReLU(), nn.Linear(640, CLASSES))

    def forward(self, before: Tensor) -> Tensor:
        """[n, CONTEXT] to [n, CLASSES]."""
        logits: Tensor = self.layers(self.embedding(before.long()).flatten(1))
        return logits


class Paused(nn.Module):
    """Stands for a network on a device of the trainer's own: a pass is a pause, which takes no core. That of the first
    trainer is SLOWER times as long. Digits [n, 1, 28, 28] to logits [n, 10], from 100,000 parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        trainer = os.environ.get("ROLE") == "trainer"
        slow = trainer and os.environ.get("ORDINAL") == "0"
        self.seconds = FAST_SECONDS * (SLOWER if slow else 1) * trainer

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 28, 28] to [n, 10]."""
        if self.training:
            time.sleep(self.seconds)  # the pass
        logits: Tensor = self.layers(images)
        return logits


class Windows:
    """Samples (the CONTEXT bytes before, the byte) at `places` [n] of a text's `numbers`."""

    def __init__(self, numbers: Tensor, places: Sequence[int]) -> None:
        self.numbers, self.places = numbers, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = self.places[index]
        return self.numbers[place - CONTEXT : place].float(), int(self.numbers[place])


def text() -> tuple[Windows, Windows]:
    """Samples of the text that `rnn` trains with by default: Python's standard library. No file is in both parts."""
    chosen = random.Random(0)
    _, files = standard_library()
    chosen.shuffle(files)
    parts = []
    for test, count in ((False, TRAIN), (True, TEST)):
        content = b"\n".join(file.read_bytes() for number, file in enumerate(files[:400])
                             if (number % TEST_FILES == 0) == test)  # fmt: skip
        numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
        numbers[numbers >= CLASSES] = 0
        parts.append(Windows(numbers, [chosen.randrange(CONTEXT, len(numbers)) for _ in range(count)]))
    return parts[0], parts[1]


# outer steps are few here: more momentum would still be under way at the end
OUTER = {"OUTER_LR": 0.8, "OUTER_MOMENTUM": 0.5}


@dataclass(frozen=True)
class Task:
    """What is trained: `settings` of every mode, and those of `local` beside them."""

    what: str
    settings: dict[str, Any]
    local: dict[str, Any]


HERE = __name__
TASKS = {
    "digits": Task(
        "the tutorial's network, 1.2 million parameters, digits",
        {"EPOCHS": 30},
        {"INNER_STEPS": 23, **OUTER},  # an epoch's share of one of two trainers
    ),
    "large": Task(
        "10 million parameters, digits",
        {"EPOCHS": 12, "MODEL": f"{HERE}:Wide"},
        {"INNER_STEPS": 23, **OUTER},
    ),
    "text": Task(
        "next byte of text, 0.6 million parameters",
        {"EPOCHS": 3, "MODEL": f"{HERE}:NextByte", "DATASET": f"{HERE}:text", "BATCH_SIZE": 64, "LR": 0.1},
        {"INNER_STEPS": 16, "OUTER_LR": 0.8, "OUTER_MOMENTUM": 0.2},
    ),
}
# by name, with the settings beside the task's
MODES: dict[str, dict[str, Any]] = {
    "sync": {"UPDATE_MODE": "sync"},
    "async": {"UPDATE_MODE": "async"},
    "int8": {"UPDATE_MODE": "sync", "WIRE_DTYPE": "int8"},
    "int4": {"UPDATE_MODE": "sync", "WIRE_DTYPE": "int4"},
    "local": {"UPDATE_MODE": "local"},
    "local-int8": {"UPDATE_MODE": "local", "WIRE_DTYPE": "int8"},
    "local-int4": {"UPDATE_MODE": "local", "WIRE_DTYPE": "int4"},
}


def settings(task: str, mode: str) -> dict[str, Any]:
    """The variables of `ps` for `task` in `mode`."""
    chosen = TASKS[task]
    local = chosen.local if MODES[mode]["UPDATE_MODE"] == "local" else {}
    return {**chosen.settings, **local, **MODES[mode]}
