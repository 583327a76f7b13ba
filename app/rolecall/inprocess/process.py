"""What all ranks share of their process: its settings for one run, and the debugger's terminal."""

from __future__ import annotations

import contextlib
import logging
import pdb  # noqa: T100 for breakpoints of roles
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import structlog
import torch

from rolecall import config, telemetry
from rolecall.config import Settings
from rolecall.context.context import mixed_seed, seed_generators
from rolecall.context.eager import skip_dynamo_import
from rolecall.inprocess import threads

_terminal = threading.Lock()  # whose prompt it shows


class Debugger(pdb.Pdb):
    """pdb for several threads: one at a time has the terminal, and the prompt names its member. `quit` is called as the
    user leaves it."""

    def __init__(self, quit: Callable[[], None]) -> None:
        super().__init__(nosigint=True)  # Ctrl-C drains
        self._quit = quit
        if owner := threads.owner():
            self.prompt = f"({owner.name}) "

    def interaction(self, *args: Any) -> None:
        """See `pdb.Pdb`."""
        with _terminal:
            super().interaction(*args)

    def set_quit(self) -> None:
        """See `bdb.Bdb`."""
        self._quit()
        super().set_quit()


@contextlib.contextmanager
def prepared(settings: Settings, quit: Callable[[], None], stream: Any = None) -> Iterator[None]:
    """Within the block, this process is that of all ranks of a run: torch's threads, random numbers, the log,
    to `stream` or standard output, `breakpoint()`, and how often Python switches threads. `quit` is called as the user
    leaves the debugger."""
    threads.follow()
    torch_threads, switching, hook = torch.get_num_threads(), sys.getswitchinterval(), sys.breakpointhook
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    logs, handlers, level = structlog.get_config(), [*logging.root.handlers], logging.root.level
    torch.set_num_threads(1)  # see Context.threads
    skip_dynamo_import()
    seed_generators(mixed_seed(settings.seed))
    telemetry.setup_logging(settings.log_format, settings.log_level, stream, labels=threads.labels)
    telemetry.take_logging(settings.log_level)
    if hook is sys.__breakpointhook__ and not config.exported("PYTHONBREAKPOINT"):
        sys.breakpointhook = lambda *_, **__: Debugger(quit).set_trace(sys._getframe(1))
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        sys.setswitchinterval(switching)
        sys.breakpointhook = hook
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        structlog.configure(**logs)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
