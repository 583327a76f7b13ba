"""A rank: runs the program, and ends the job when the program has returned in every rank."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import DistError

from rolecall import Context, Drained, PeerLostError, Program, ProgramError
from rolecall.jobs.script import ScriptSettings
from rolecall.jobs.script.ending import Ending


def check(settings: ScriptSettings) -> None:
    """Raises UsageError if the program is missing or cannot be loaded."""
    Program(settings.script, settings.script_args).check(settings, settings.ranks)


def run(context: Context[ScriptSettings]) -> dict[str, Any] | None:
    """Runs the program in this rank. Returns when it has ended, at rank 0 when it has ended in every rank."""
    if context.rank == 0:
        context.start(0)
    program = Program(context.settings.script, context.settings.script_args)
    try:
        ending = Ending(context)
        try:
            program.run(context)
        except ProgramError:
            if not ending.has_ended:  # otherwise SIGTERM ended it, and later errors do not count
                raise
        if not ending.end():
            threading.Event().wait()  # `Ending` ends this process
        context.logger.info("the program has returned")
        if context.rank:
            return None  # it serves its peers until the last has returned
        summary = ending.summary()
        if summary is None:
            raise Drained(0)
        return context.finish(**summary)
    except DistError as error:
        raise PeerLostError(f"rank 0's worker is gone: {error}") from error
