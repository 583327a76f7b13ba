"""How a run that `rolecall.start` holds has ended: its result, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import (
    FAILED,
    UNSAVED,
    USAGE,
    Drained,
    ProgramError,
    RankError,
    RemoteError,
    RemoteTraceback,
    UsageError,
)
from rolecall.launch.output import TRACEBACK
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.record import rundir

REMOTE = "rolecall.RemoteError: "


@dataclass(frozen=True)
class Ended:
    """The end of a run in `directory`, by its exit code. `summary` is that of summary.json, empty if the run has
    written none; `reason` is why it was refused, or has failed; a role in this process may have `raised` that."""

    directory: Path
    code: int
    summary: dict[str, Any]
    reason: str = ""
    raised: BaseException | None = None

    def result(self) -> dict[str, Any]:
        """The job's result. Raises Drained, UsageError, ProgramError and RankError."""
        is_finished = self.code == 0 or (self.code == INTERRUPTED and self.summary.get("state") == "finished")
        if self.summary and is_finished:
            return dict(self.summary.get("result", {}))
        reason = self.reason or f"ended with exit code {self.code}; its logs are in {self.directory}"
        if self.code == 0:
            raise RankError(f"the job has finished, but there is no {self.directory / rundir.SUMMARY}")
        if self.code == INTERRUPTED:
            raise Drained(rundir.newest_step(self.directory) if self.directory.is_dir() else 0)
        if self.code == UNSAVED:
            raise RankError(f"the job has finished, and its result is not saved; see the logs in {self.directory}")
        if self.code == FAILED:
            raise program_error(reason, self.raised)
        raise (UsageError if self.code == USAGE else RankError)(reason)


def state_of(code: int) -> str:
    """How a run has ended, by its exit code."""
    unsaved = f"finished, and its result is not saved (exit code {UNSAVED})"
    return {0: "finished", INTERRUPTED: "stopped", UNSAVED: unsaved}.get(code, f"failed (exit code {code})")


def last_error(reason: str) -> str:
    """The error with which a traceback ends, perhaps of several lines; a text without one as it is."""
    lines = reason.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ") or TRACEBACK in line]
    after = [n for n, line in enumerate(lines) if n > frames[-1] and not line.startswith(" ")] if frames else [0]
    return "\n".join(lines[after[0] if after else -1 :])


def program_error(reason: str, raised: BaseException | None = None) -> ProgramError:
    """What a job failed of, chained to what was `raised` here, or to the traceback of another process if `reason` has
    one."""
    member, divider, rest = reason.strip().partition(f": {TRACEBACK}")
    last = last_error(reason)
    error = ProgramError(last)
    error.__cause__ = raised
    if divider and raised is None:
        remote = RemoteError(last.removeprefix(REMOTE) if last.startswith(REMOTE) else f"{member} raised {last}")
        remote.__cause__ = RemoteTraceback(f"{TRACEBACK}{rest}")
        error.__cause__ = remote
    return error
