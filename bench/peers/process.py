"""Programs that a benchmark starts: peers' and Rolecall's own, each with a deadline, and none left afterwards.

Every process that a program starts inherits its mark, a variable of its environment, by which all of them are ended:
also those that put themselves into the background, as ray's do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.launch import REPOSITORY

MARK = "BENCH_MARK"
LEAVE = 30.0  # seconds that a program has to leave after its last line
# whose interpreter a peer has
GROUPS = {"sb3": "sb3", "appo": "sample-factory", "rllib": "rllib", "torchrec": "torchrec",
          "grpc": "grpc", "monarch": "monarch", "ray": "ray"}  # fmt: skip

_marks: set[str] = set()


@dataclass(frozen=True)
class Snapshot:
    """A policy that was evaluated: after how many environment steps and seconds of training, and its mean score."""

    steps: int
    seconds: float
    score: float


@dataclass(frozen=True)
class Run:
    """A training. `seconds` run from the first step to the last update, evaluations left out; `first_step` and `wall`
    are the seconds from the process's start to the first step, and to its end, without evaluations.
    """

    steps: int = 0
    seconds: float = 0.0
    first_step: float = 0.0
    wall: float | None = None  # it was ended by its deadline
    scores: list[float] = field(default_factory=list)  # of the last policy
    snapshots: list[Snapshot] = field(default_factory=list)
    updates: int = 0  # the optimizer's steps of an off-policy algorithm

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second, learning included."""
        return self.steps / self.seconds

    @property
    def updates_per_s(self) -> float:
        """Optimizer steps a second, acting included."""
        return self.updates / self.seconds

    def reached(self, threshold: float) -> Snapshot | None:
        """The first policy whose mean score reaches the threshold."""
        return next((each for each in self.snapshots if each.score >= threshold), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Run:
        return Run(**{**value, "snapshots": [Snapshot(**each) for each in value["snapshots"]]})


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured, in a line; None where it can."""
    group = REPOSITORY / "build" / "peers" / GROUPS[peer]
    if (group / ".ready").exists():
        return None
    problem = "could not be installed" if group.exists() else "is not installed"
    return f"{peer} {problem} (build/peers/{group.name}): make peers"


def interpreter(peer: str) -> Path:
    """The Python that a peer is installed for."""
    return REPOSITORY / "build" / "peers" / GROUPS[peer] / "bin" / "python"


def peer(name: str, deadline: float, on: Callable[[str], None] = lambda news: None, **options: Any) -> Run:
    """Runs a peer's program with these options (`threads`: torch's, if not its default). Raises RuntimeError where it
    fails, TimeoutError where it is not done within `deadline` seconds.
    """
    if problem := missing(name):
        raise RuntimeError(problem)
    threads = options.pop("threads", None)
    words = [str(interpreter(name)), "-m", f"{__package__}.{name}"]
    for option, value in options.items():
        if value is not None and value is not False:
            words += [f"--{option}", *([] if value is True else [str(value)])]
    started = time.monotonic()
    run = Run()
    with lines(words, deadline, {"OMP_NUM_THREADS": threads} if threads else {}) as events:
        for event in events:
            run = add(run, event, started)
            if run.snapshots:
                newest = run.snapshots[-1]
                on(f"{newest.steps:,} steps, {newest.seconds:.0f} s, score {newest.score:.1f}")
    if run.wall is None:
        raise RuntimeError(f"{name}: ended without a result")
    return run


def add(run: Run, event: dict[str, Any], started: float) -> Run:
    """`run` with what a line of `report` says, or the end of the program: {"event": "gone", "at"}."""
    match event.get("event"):
        case "begin":
            return Run(**{**vars(run), "first_step": event["at"] - started})
        case "snapshot":
            mean = sum(event["scores"]) / max(1, len(event["scores"]))
            newest = Snapshot(event["steps"], event["seconds"], mean)
            return Run(**{**vars(run), "snapshots": [*run.snapshots, newest]})
        case "end":
            end = {key: event[key] for key in ("steps", "seconds", "scores", "updates") if key in event}
            return Run(**{**vars(run), **end, "wall": -event["paused"]})
        case "gone" if run.wall is not None:
            return Run(**{**vars(run), "wall": run.wall + event["at"] - started})
    return run


@contextlib.contextmanager
def lines(words: Sequence[str], deadline: float, variables: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of JSON that a command prints, and {"event": "gone", "at"} once it has ended by itself.

    The iterator raises RuntimeError where the command fails, TimeoutError where it takes longer than `deadline`
    seconds. The command runs in a directory of its own; it is gone afterwards with all that it started.
    """
    with mark() as name, tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        environment = {key: str(value) for key, value in {**variables, MARK: name}.items()}
        process = subprocess.Popen(
            list(words),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        over = threading.Event()

        def expire() -> None:
            over.set()
            end(name)

        timer = threading.Timer(deadline, expire)
        timer.start()
        try:
            yield _events(process, over, f"{' '.join(words[1:])}: not done within {deadline:g} s")
        finally:
            timer.cancel()
            timer.join()
            end(name)
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def _events(process: subprocess.Popen[str], over: threading.Event, late: str) -> Iterator[dict[str, Any]]:
    said = deque[str](maxlen=20)
    assert process.stdout is not None
    for line in process.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            said.append(line)
            continue
        if isinstance(event, dict):
            yield event
            if event.get("event") == "end":  # what it has started may hold its output open for longer
                break
    try:
        code = process.wait(LEAVE)
    except subprocess.TimeoutExpired:
        code = 0 if not over.is_set() else 1  # it has said all, and hangs: it is ended
    at = time.monotonic()
    if over.is_set():
        raise TimeoutError(late)
    if code:
        raise RuntimeError(f"exit code {code}:\n{''.join(said)}")
    yield {"event": "gone", "at": at}


@contextlib.contextmanager
def mark() -> Iterator[str]:
    """A mark for processes that are to be gone afterwards: the value of MARK in their environment."""
    name = uuid.uuid4().hex
    _marks.add(name)
    try:
        yield name
    finally:
        end(name)
        _marks.discard(name)


def end(name: str) -> None:
    """Kills every process that has the mark, and its descendants: some overwrite their environment with a title."""
    for _ in range(5):  # one that was being started is seen in the next round
        marked = {each for each in psutil.process_iter() if each.pid != os.getpid() and _has(each, name)}
        for each in list(marked):
            with contextlib.suppress(psutil.Error):
                marked.update(each.children(recursive=True))
        if not marked:
            return
        for each in marked:
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        psutil.wait_procs(marked, timeout=5)


def end_all() -> None:
    """Kills every process that this one has started with a mark: other threads that wait for them go on."""
    for name in list(_marks):
        end(name)


def _has(process: psutil.Process, name: str) -> bool:
    try:
        return process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False  # gone, or another user's


def python(module: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, "-m", module]
