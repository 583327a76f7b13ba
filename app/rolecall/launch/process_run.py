"""A run whose ranks are processes, as `rolecall.start` holds it: a process of `rolecall run`, and its control socket.

That process has what one process has once: the zygote, the variables and sources that ranks inherit, the handlers of
signals. So runs of several jobs take nothing from each other, nor from the program that starts them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall import config
from rolecall.declare import registry
from rolecall.errors import FAILED, UNSAVED, USAGE, UsageError
from rolecall.launch import control, here
from rolecall.launch.ended import Ended
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.messages.control import KillRank, ListedRank, ListRanks, ScaleRole
from rolecall.observe import targets
from rolecall.record import rundir

STOP_SECONDS = 20.0  # for the process to end its ranks, and itself; it waits for less
LAST_OUTPUT_SECONDS = 2.0  # for the rest of what it has written
POLL_SECONDS = 0.02
MAX_REASON_BYTES = 2**16


def directory_of(name: str) -> Path:
    """The directory of a run of the job `name` that begins now."""
    base = rundir.of_run(name)
    number = 1
    directory = base
    while True:
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError as error:  # of a run that began in this second
            if not directory.exists():
                raise UsageError(f"{directory.parent}: is no folder; set checkpoint_dir") from error
            number += 1
            directory = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise UsageError(f"{directory}: cannot be written ({error.strerror}); set checkpoint_dir") from error


def dispose(directory: Path) -> None:
    """Removes the directory of a run that was refused, if it is empty but for its logs."""
    if not rundir.saved(directory) and not (directory / rundir.HISTORY).exists():
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are other runs
            directory.parent.rmdir()


class ProcessRun:
    """Starts `rolecall run TARGET` with `flags` and `variables`, which end with this process. `show` is given each line
    that it writes. Raises UsageError for a directory that cannot be written."""

    def __init__(
        self, target: str, flags: Sequence[str], variables: Mapping[str, str], show: Callable[[str], None]
    ) -> None:
        given = variables.get("CHECKPOINT_DIR") or config.exported("CHECKPOINT_DIR")
        directory = Path(given) if given else directory_of(registry.name_of(target))
        self.directory = directory.absolute()
        self._disposable, self._show = not given, show
        self._reasons = tempfile.NamedTemporaryFile(prefix=here.REASONS)  # noqa: SIM115 removed with the run
        fcntl.flock(self._reasons, fcntl.LOCK_EX)
        self._before = self._written()
        self._left_early = False
        command = [sys.executable, "-P", "-m", "rolecall", "run", target, "--tied", str(os.getpid()), *flags]
        # this may be a rank: it was passed those of its own job
        passed = {config.SOURCES: "", config.DESCRIPTION: "", config.RUN: "", config.REASONS: self._reasons.name}
        environment = config.child_environment(**{**variables, **passed, "CHECKPOINT_DIR": str(directory)})
        self._process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    @property
    def up(self) -> bool:
        """Whether it takes commands."""
        run = targets.run_in(self.directory)
        return run is not None and run.pid == self._process.pid

    @property
    def page(self) -> str:
        """Where rank 0 serves the page; empty if it does not."""
        run = targets.run_in(self.directory)
        return run.ranks[0].url.removesuffix("metrics") if run and run.pid == self._process.pid else ""

    def ranks(self) -> list[ListedRank]:
        """Those that there are now."""
        with contextlib.suppress(UsageError):  # it ends
            return [*control.ask(str(self.directory), ListRanks()).ranks]
        return []

    def state(self) -> dict[str, Any]:
        """Nothing: rank 0 has the state that its page shows."""
        return {}

    def kill(self, member: str) -> None:
        """Kills all processes of a member. Raises UsageError."""
        rank = next((rank for rank in self.ranks() if rank.name == member), None)
        if rank is None:
            raise UsageError(f"{member}: no such member; there are {', '.join(rank.name for rank in self.ranks())}")
        control.ask(str(self.directory), KillRank(rank.role, rank.ordinal, ""))

    def scale(self, role: str, count: int) -> None:
        """Changes how many ranks a role has. Raises UsageError."""
        control.ask(str(self.directory), ScaleRole(role, count))

    def drain(self) -> None:
        """Has the job write a checkpoint, and end; does not wait."""
        if self._process.poll() is None and not self.up:
            self._left_early = True
        self._process.send_signal(signal.SIGINT)  # before it handles signals, too, this one ends it in order

    def stop(self) -> None:
        """Ends it at once; waits for some seconds at most."""
        self.drain()
        end = time.monotonic() + STOP_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            if self.up:
                self._process.send_signal(signal.SIGTERM)  # the second signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)
        self._process.kill()

    def run(self) -> Ended:
        """Waits until it is over."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        code = self._process.wait()
        reader.join(LAST_OUTPUT_SECONDS)
        reason = self._reason()
        self._reasons.close()
        if code == USAGE and self._disposable:
            dispose(self.directory)
        # an earlier run's counts only for what had finished, and is shown again
        summary = self._summary() if code == 0 or self._written() != self._before else {}
        if self._left_early and code not in (0, FAILED, UNSAVED):
            code = INTERRUPTED
        if code == FAILED:
            failed = rundir.read_failed(self.directory)
            reason = failed.reason if failed else str(summary.get("reason") or reason)
        return Ended(self.directory, code, summary, reason)

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                text = line.rstrip("\n")
                if self.up or text != f"rolecall: {self._reason()}":  # else an error has it
                    self._show(text)

    def _reason(self) -> str:
        """The first that one of its processes has given for its end; empty if there is none."""
        said = os.pread(self._reasons.fileno(), MAX_REASON_BYTES, 0)  # others write to it
        return said.decode(errors="replace").partition("\n")[0]

    def _summary(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            return rundir.read_summary(self.directory) or {}
        return {}

    def _written(self) -> int:
        """When summary.json was written (nanoseconds, by the disk's clock); 0 if there is none."""
        with contextlib.suppress(OSError):
            return (self.directory / rundir.SUMMARY).stat().st_mtime_ns
        return 0
