"""The ranks' processes: started again when they are gone, as an engine would, and signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.integration.cluster import Rank

PAUSE = 0.5  # seconds from a rank's end to its next start
PERIOD = 0.02


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended; `expected` says that it was our doing, or as asked."""

    time: float
    rank: str
    code: int
    expected: bool


@dataclass
class ChaosRank(Rank):
    """A rank of the cluster's harness that may live in a network namespace, at an address of its own."""

    address: str = "127.0.0.1"
    wanted: bool = True
    starts: list[float] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)  # exit codes that our last doings explain
    due: float | None = None  # when it is to be started again

    def start(self) -> ChaosRank:
        self.allowed, self.due = set(), None
        super().start()
        self.starts.append(time.monotonic())
        return self

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def port(self) -> int:
        return int(self.environment["METRICS_PORT"])


class Keeper(threading.Thread):
    """Starts ranks again, and is the only one that signals them: a process is not replaced while it is aimed at."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ranks: dict[str, ChaosRank] = {}
        self.exits: list[Exit] = []
        self.restarting = True
        self._groups: set[int] = set()
        self._lock = threading.RLock()
        self._closing = threading.Event()

    def add(self, rank: ChaosRank) -> None:
        with self._lock:
            self.ranks[rank.name] = rank
            rank.wanted = True
            self._start(rank)

    def restart_all(self, names: Iterable[str], environment: Mapping[str, str]) -> None:
        """Start ranks that have all ended once more, with a further `environment`; nothing restarts them again."""
        with self._lock:
            self.restarting = False
            for name in names:
                rank = self.ranks[name]
                rank.environment |= environment
                self._start(rank)
                rank.allowed = {0}

    def _start(self, rank: ChaosRank) -> None:
        self._groups.add(rank.start().pid)

    def run(self) -> None:
        while not self._closing.wait(PERIOD):
            with self._lock:
                for rank in self.ranks.values():
                    self._look_after(rank)

    def _look_after(self, rank: ChaosRank) -> None:
        if rank.running or rank.process is None:
            return
        now = time.monotonic()
        if rank.due is None:
            code = rank.process.returncode
            self.exits.append(Exit(now, rank.name, code, code in rank.allowed))
            rank.due = now + PAUSE
        if now >= rank.due and rank.wanted and self.restarting:
            self._start(rank)

    # ---- doing harm

    def kill(self, *names: str) -> float:
        """SIGKILL to all processes of some ranks at once; returns when."""
        return self._signal_groups(names, signal.SIGKILL, -signal.SIGKILL)

    def signal_rank(self, name: str, number: int) -> float:
        return self._signal_groups((name,), number)

    def _signal_groups(self, names: Iterable[str], number: int, *allowed: int) -> float:
        with self._lock:
            now = time.monotonic()
            for name in names:
                rank = self.ranks[name]
                if rank.running:
                    rank.allowed.update(allowed)
                    os.killpg(rank.pid, number)
            return now

    def signal_supervisor(self, name: str, number: int) -> float:
        """SIGTERM asks the rank to leave; before it can listen to that, it is simply the end of it."""
        with self._lock:
            rank = self.ranks[name]
            now = time.monotonic()
            if rank.running:
                rank.allowed.update({signal.SIGKILL: {-number}, signal.SIGTERM: {0, -number}}.get(number, set()))
                os.kill(rank.pid, number)
            return now

    def signal_worker(self, name: str, number: int) -> tuple[float, psutil.Process] | None:
        """Returns when, and the worker; None where there is no worker right now."""
        with self._lock:
            worker = self.ranks[name].worker() if self.ranks[name].running else None
            now = time.monotonic()
            if worker is None:
                return None
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
                return now, worker
            return None

    def leave(self, name: str) -> float:
        """Ask a rank to leave for good."""
        self.ranks[name].wanted = False
        return self.signal_supervisor(name, signal.SIGTERM)

    # ---- the end

    def processes(self) -> list[psutil.Process]:
        """What is left of all ranks that were ever started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) in self._groups and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """End everything for sure."""
        self._closing.set()
        if self.is_alive():
            self.join(10)
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for rank in self.ranks.values():
            if rank.process:
                rank.process.wait(10)


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def dump_stacks(processes: Iterable[psutil.Process], target: Path) -> None:
    """What every process is at, for whoever looks for the reason."""
    with target.open("w") as file, contextlib.suppress(OSError):
        for process in processes:
            command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(process.pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=10)
