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
from rolecall.errors import UsageError
from rolecall.inprocess import threads
from rolecall.wire import apart, clock

_taken = threading.Lock()  # by a run


class Terminal:
    """The debugger's: one thread at a time has it. `quit` is called once the user leaves the debugger."""

    def __init__(self, quit: Callable[[], None]) -> None:
        self.quit, self.lock, self.is_left = quit, threading.Lock(), False


class Debugger(pdb.Pdb):
    """pdb at a `terminal` that several threads share. The prompt names the member."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(nosigint=True)  # Ctrl-C drains
        self._terminal = terminal
        if owner := threads.owner():
            self.prompt = f"({owner.name}) "

    def interaction(self, *args: Any) -> None:
        """See `pdb.Pdb`."""
        with self._terminal.lock:
            if self._terminal.is_left:
                self.set_quit()
                return
            clock.hold("the prompt")
            try:
                super().interaction(*args)
            finally:
                clock.hold("the prompt", False)

    def set_quit(self) -> None:
        """See `bdb.Bdb`."""
        self._terminal.is_left = True
        self._terminal.quit()
        super().set_quit()


def is_debugged_elsewhere() -> bool:
    """Whether breakpoints may stop elsewhere than at a `Debugger`'s prompt: by another hook, or in an editor."""
    hook = sys.breakpointhook is not sys.__breakpointhook__ or config.exported("PYTHONBREAKPOINT")
    return bool(hook) or "pydevd" in sys.modules


def _run_apart(function: Callable[..., object], *arguments: Any) -> None:
    """Takes the place of `apart.run`, whose threads serve one worker after the other."""
    threading.Thread(target=function, args=arguments, name="wire apart", daemon=True).start()


@contextlib.contextmanager
def prepared(settings: Settings, quit: Callable[[], None], stream: Any) -> Iterator[None]:
    """Within the block, this process is that of all ranks of a run: torch's threads, random numbers, the log,
    to `stream`, `breakpoint()`, and how often Python switches threads. `quit` is called as the user
    leaves the debugger. Raises UsageError within another one's block."""
    if not _taken.acquire(blocking=False):
        raise UsageError("a job runs in this process already; wait for its end, or run one without --in-process")
    pool, apart.run = apart.run, _run_apart
    torch_threads, switching, hook = torch.get_num_threads(), sys.getswitchinterval(), sys.breakpointhook
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    logs, handlers, level = structlog.get_config(), [*logging.root.handlers], logging.root.level
    torch.set_num_threads(1)  # see Context.threads
    skip_dynamo_import()
    seed_generators(mixed_seed(settings.seed))
    telemetry.setup_logging(settings.log_format, settings.log_level, stream, labels=threads.labels)
    telemetry.take_logging(settings.log_level)
    if not is_debugged_elsewhere():
        terminal = Terminal(quit)
        sys.breakpointhook = lambda *_, **__: Debugger(terminal).set_trace(sys._getframe(1))
    try:
        with threads.followed():
            yield
    finally:
        apart.run = pool
        _taken.release()
        torch.set_num_threads(torch_threads)
        sys.setswitchinterval(switching)
        sys.breakpointhook = hook
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        structlog.configure(**logs)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
