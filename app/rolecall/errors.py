"""Every error that a user of Rolecall meets, and the exit codes of its processes.

Exception
├── UsageError             bad input: one line and exit code 2
├── RankError              this process cannot go on, nobody's input is to blame: one line and exit code 1
├── ProgramError           the user's program raised: its own traceback and exit code 3
└── RuntimeError
    └── CallError          a call to a peer failed
        ├── PeerLostError     the peer is gone or silent
        ├── CallTimeoutError  the peer is alive and has not answered within the call's deadline
        └── RemoteError       the called function raised; `__cause__` has the remote traceback
BaseException
└── Drained                ends rank 0's function after a drain's checkpoint
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

CRASHED = 1  # this rank cannot go on: whoever started it starts it again; Python's own, for an uncaught exception
USAGE = 2  # bad input: a wrong variable, a missing file, an unreachable rank 0
FAILED = 3  # the job failed, for every rank: starting it again would not help
UNSAVED = 4  # the job finished, and its result could not be saved


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean hits?)` for the one of `known` that is close to `name`; empty if none is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


class UsageError(Exception):
    """Bad input: its text is the one line that the user reads, and the process exits with code 2."""

    @classmethod
    @contextlib.contextmanager
    def wrap(cls, problem: str, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
        """Turns errors of `kinds` (any, if none is given) that the block raises into one UsageError:
        `PROBLEM (TYPE: FIRST LINE); ADVICE`. A UsageError passes as it is.
        """
        wrapped = kinds or (Exception,)
        try:
            yield
        except UsageError:
            raise
        except wrapped as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise cls(f"{problem} ({type(error).__name__}: {first})" + (f"; {advice}" if advice else "")) from error


class RankError(Exception):
    """This rank cannot go on, and no input is wrong: its text is the one line that the user reads, and the process
    exits with code 1, so that it is started again."""


class ProgramError(Exception):
    """A user's program failed: the text is the program's own traceback."""


class CallError(RuntimeError):
    """A call to a peer failed. It `is_remote` if the called method has raised it, as for a call of its own that has
    failed: the called peer is there."""

    is_remote = False


class PeerLostError(CallError):
    """A peer that this rank cannot do without is gone or silent. The gang regroups; this rank has not failed."""

    __module__ = "rolecall"  # as a traceback shows it


class CallTimeoutError(CallError):
    """A peer that is alive has not answered a call within the call's deadline. Uncaught, it is a failure."""

    __module__ = "rolecall"


class RemoteError(CallError):
    """A function that was called at a peer raised. The text says what, in a line; `__cause__` has the traceback."""

    __module__ = "rolecall"


class RemoteTraceback(Exception):  # noqa: N818 no error of its own, but the text of one
    """The traceback of what a peer's function raised, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Drained(BaseException):  # not an Exception: no function of a job takes it for a failure
    """Ends rank 0's function after a drain's checkpoint, that of `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"the job was drained at step {self.step}; the same CHECKPOINT_DIR resumes it"
