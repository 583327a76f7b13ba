"""What a role's function is given: who it is, whom it works with, what it calls, and how it says how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolecall import telemetry
from rolecall.context.peers import S
from rolecall.context.training import Training
from rolecall.errors import UsageError
from rolecall.record.recorder import NOTHING, Nothing, Span, plain, recorder


@dataclass
class Context(Training[S]):
    """A rank's view of its generation.

    Rank 0's function returns the job's summary, a dict; the others serve calls until their process is ended, whether
    their function has returned or not. Whatever a function raises is a failure, except for the loss of a peer and bad
    input (UsageError).
    """

    @property
    def threads(self) -> int:
        """Threads for a large computation. Single operations have one here: splitting them stalls on a busy machine."""
        return self.settings.cpu_threads

    @property
    def device(self) -> Any:
        """The torch.device that this rank computes on. Raises UsageError for DEVICE=cuda where there is none."""
        return choose_device(self.settings.device, "DEVICE")

    def seed(self, *extra: int) -> int:
        """A seed of its own for SEED, this rank, the generation and `extra`. Python's, numpy's and torch's generators
        are seeded with `seed()` before the function is called."""
        # the number of `extra`: otherwise a 0 at their end would change nothing
        return mixed_seed(self.settings.seed, self.rank, self.generation, *extra, *([len(extra)] if extra else []))

    @staticmethod
    def timer() -> telemetry.Timer:
        """`with context.timer() as timer: ...` leaves the seconds that passed in `timer.seconds`."""
        return telemetry.Timer()

    @staticmethod
    def span(name: str, /, **attributes: Any) -> Span | Nothing:
        """`with context.span("forward", rows=64) as span: ...` is a span called `name` in the trace of a run, with
        `attributes`, numbers and texts; `span.note(loss=0.5)` adds some. Calls made in the block are shown under it.
        While nothing is recorded (TRACE), it costs a fraction of a microsecond.
        """
        return recorder.span(name, **plain(attributes)) if recorder.on else NOTHING


def mixed_seed(*numbers: int) -> int:
    """A seed, 32 bits, that depends on each of `numbers`."""
    import numpy as np  # here and below: not in a supervisor, which imports this module's names

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def choose_device(wanted: str, variable: str) -> Any:
    """The torch.device that `variable` names with auto, cpu or cuda. Raises UsageError for cuda where there is none."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"{variable}=cuda: torch finds no CUDA device here; use {variable}=auto or cpu")
    return torch.device("cuda")
