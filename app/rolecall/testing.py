"""A pytest plugin: the fixture `run_job` runs a job, kills members on the way, and asserts that nothing is left.

pytest loads it wherever Rolecall is installed, so it imports nothing large by itself.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from rolecall.declare.spec import Job
    from rolecall.launch.run import Run

RUN_SECONDS = 300.0  # for a run in ranks of their own
END_SECONDS = 10.0  # for what a run has started to end after it
LOOK_SECONDS = 0.05  # between two looks at the step, or at what is left
STEP = re.compile(r"^rolecall_step(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended. `summary` is that of summary.json, in the run's `directory`; `killed` are the members that
    were killed, in order."""

    directory: Path
    summary: dict[str, Any]
    killed: tuple[str, ...]

    @property
    def result(self) -> dict[str, Any]:
        """What rank 0's function has returned."""
        return dict(self.summary["result"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of history.jsonl."""
        return [json.loads(line) for line in (self.directory / "history.jsonl").read_text().splitlines()]


class Kills:
    """Kills members of a run, once rank 0 has made their steps."""

    def __init__(self, steps: Mapping[str, int]) -> None:
        self._due = dict(steps)
        self.done: list[str] = []
        self.run: Future[Run] = Future()

    def stepped(self, step: int) -> None:
        """Rank 0 has made `step`."""
        from rolecall.errors import UsageError

        for member in [member for member, due in self._due.items() if step >= due]:
            with contextlib.suppress(UsageError):  # it is being started: at the next step
                self.run.result(END_SECONDS).kill(member)
                del self._due[member]
                self.done.append(member)

    def require_done(self) -> None:
        """Fails the test if one is missing."""
        if self._due:
            missing = ", ".join(f"{member} at step {step}" for member, step in self._due.items())
            pytest.fail(f"kills={missing}: the job ended before; does a member of that name exist?")


class RunJob:
    """Runs jobs for one test, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(
        self,
        job: Job | str | Path,
        *,
        in_process: bool = True,
        kills: Mapping[str, int] | None = None,
        leaves: Collection[str] = (),
        **settings: Any,
    ) -> FinishedRun:
        """Runs `job` with `settings` to its end: a `Job`, or FILE.py, a module or a built-in job's name. Its ranks are
        threads of this process if `in_process`, and otherwise processes.

        `kills` names members and the step of rank 0 after which each is killed, as by a crash: `{"worker_1": 3}`.
        Without `checkpoint_dir` the run has a new one. Raises what the job raises as ProgramError, UsageError for bad
        input, RankError for another end, and TimeoutError for processes after RUN_SECONDS; fails the test if a member
        was not killed, or if a thread, a process or a temporary file of the run is left, unless a pattern of `leaves`
        matches its name: `leaves=["pymongo_*"]`.
        """
        self._count += 1
        settings = {"checkpoint_dir": self._folder / f"run-{self._count}", **settings}
        todo, directory = Kills(kills or {}), Path(settings["checkpoint_dir"])
        with _nothing_left(leaves):
            _run(job, settings, in_process, todo)
        todo.require_done()
        return FinishedRun(directory, json.loads((directory / "summary.json").read_text()), tuple(todo.done))


@pytest.fixture
def run_job(tmp_path: Path) -> RunJob:
    """Runs a job to its end: `run = run_job(pi.JOB, samplers=2, kills={"sampler_1": 3})`; see `RunJob`."""
    return RunJob(tmp_path)


# ---- the run


def _run(job: Job | str | Path, settings: dict[str, Any], in_process: bool, kills: Kills) -> None:
    from rolecall.launch.run import start_with

    end = time.monotonic() + RUN_SECONDS
    with start_with(job, settings, in_process=in_process, stepped=kills.stepped) as run:
        kills.run.set_result(run)
        while not in_process and run.status in ("starting", "running") and time.monotonic() < end:
            if page := run.page:
                kills.stepped(_step_at(f"{page}metrics"))
            time.sleep(LOOK_SECONDS)
        run.wait(None if in_process else max(0.0, end - time.monotonic()))
        _ = run.result


def _step_at(url: str) -> int:
    """The newest step of rank 0, whose metrics are at `url`; 0 before the first."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=END_SECONDS) as answer:  # it may not listen
        if match := STEP.search(answer.read().decode()):
            return int(float(match[1]))
    return 0


# ---- what is left


@contextlib.contextmanager
def _nothing_left(leaves: Collection[str]) -> Iterator[None]:
    """Fails if a thread, a process or a temporary file that the block makes outlasts it, and no pattern of `leaves`
    matches its name."""
    before = {*threading.enumerate()}, {child.pid for child in psutil.Process().children(recursive=True)}
    temporary = Path(tempfile.mkdtemp(prefix="rolecall-test-"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(temporary))
            patch.setenv("TMPDIR", str(temporary))  # for processes
            yield
        end = time.monotonic() + END_SECONDS
        while (left := _left(temporary, *before, leaves)) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        if left:
            pytest.fail(f"the run has left {', '.join(left)}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _left(temporary: Path, threads: set[threading.Thread], processes: set[int], leaves: Collection[str]) -> list[str]:
    """What there is that was not there before, in words, but for `leaves`."""
    left = [(thread.name, f"the thread {thread.name!r}") for thread in {*threading.enumerate()} - threads]
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            is_theirs = process.pid in children - processes or process.environ().get("TMPDIR") == str(temporary)
            left += [(process.name(), f"the process {process.pid} ({process.name()})")] if is_theirs else []
    left += [(path.name, f"the file {path}") for path in temporary.iterdir()]
    return [words for name, words in left if not any(fnmatch(name, pattern) for pattern in leaves)]
