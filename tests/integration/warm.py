"""Ranks that start within milliseconds: forked from a zygote that has imported what the ranks of all jobs import.

Started alone, a rank takes up to five seconds of a core, nearly all of them to import torch. What such a cold start is
like is seen where tests ask for one (`cold`), and in containers.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolecall.rank.zygote import Zygote


class Process:
    """A rank's process or a command's, with what is used of `subprocess.Popen`; `output` where it is not the log's."""

    def __init__(
        self,
        zygote: Zygote,
        environment: Mapping[str, str],
        log: Path,
        arguments: Sequence[str] = (),
        output: Path | None = None,
    ) -> None:
        with log.open("ab") as errors, (output or log).open("ab") as file:
            self._forked = zygote.fork(arguments, environment, file.fileno(), errors.fileno())
        self.pid = self._forked.pid

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def poll(self) -> int | None:
        try:
            return self._forked.wait_for(0)
        except TimeoutError:
            return None

    def wait(self, timeout: float) -> int:
        try:
            return self._forked.wait_for(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("python -m rolecall", timeout) from None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
