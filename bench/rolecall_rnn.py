"""Runs of the `rnn` job, started as a user starts them."""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable
from datetime import datetime

from bench import launch
from bench.launch import Speed
from bench.local_rnn import BATCH, LAYERS, LEARNING_RATE, SEQUENCE, VOCABULARY, WIDTH, Meter

STEP = re.compile(r"Epoch \d+\tstep (\d+)\t")
EPOCH = re.compile(r"Epoch (\d+)\tvalidation loss")
INTERVAL = 10  # steps
WARM = 20  # steps


def measure(steps: int, progress: Callable[[str], None], **variables: object) -> tuple[Speed, float]:
    """The speed in tokens, and bytes a step over the network, of `steps` steps (a multiple of 10) in a run's middle.

    Raises RuntimeError where the run fails or takes too long. No process is left afterwards.
    """
    fixed = {"VOCABULARY": VOCABULARY, "EMBEDDING_SIZE": WIDTH, "HIDDEN_SIZE": WIDTH, "LAYERS": LAYERS,
             "SEQUENCE": SEQUENCE, "BATCH_SIZE": BATCH, "DROPOUT": 0, "OPTIMIZER": "sgd", "LR": LEARNING_RATE,
             "EPOCHS": 1, "CHECKPOINT_INTERVAL": 86400,
             "CORPUS_BYTES": 0, "LOG_INTERVAL": INTERVAL}  # fmt: skip
    meter, stamps, cpu = Meter(), {}, {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(_text((WARM + steps + INTERVAL) * BATCH * SEQUENCE))
        file.flush()
        with launch.run("rnn", 300, {**fixed, "CORPUS": file.name, **variables}) as running:
            for event in running.events():
                if not (match := STEP.match(event.get("event", ""))):
                    continue
                number = int(match[1])
                stamps[number] = datetime.fromisoformat(event["timestamp"]).timestamp()
                progress(f"step {number}")
                if number in (WARM, WARM + steps):
                    cpu[number] = running.cpu_seconds()
                if number == WARM:
                    meter.begin()
                if number == WARM + steps:
                    meter.end()
            running.done()
    tokens = BATCH * SEQUENCE * steps
    speed = Speed(tokens / (stamps[WARM + steps] - stamps[WARM]), (cpu[WARM + steps] - cpu[WARM]) / tokens)
    return speed, meter.transferred / steps


def perplexity(progress: Callable[[str], None]) -> tuple[float, float]:
    """Perplexity of the validation text after a run at the default settings, and its seconds of training."""
    with launch.run("rnn", 1800, {}) as running:
        for event in running.events():
            if match := EPOCH.match(event.get("event", "")):
                progress(f"epoch {match[1]}")
        done = running.done()
    return float(done["perplexity"]), float(done["seconds"])


def _text(tokens: int) -> str:
    """A text whose first nine tenths have `tokens` tokens: one a character, of the private use planes."""
    known = [chr(0xF0000 + number) for number in range(VOCABULARY - 1)]
    picks = random.Random(1)
    length = max(tokens * 10 // 9, len(known))
    return "".join([*picks.sample(known, len(known)), *picks.choices(known, k=length - len(known))])
