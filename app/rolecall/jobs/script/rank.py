"""A rank: runs the program, has SIGTERM reach it, and ends the job when every rank's program has returned."""

from __future__ import annotations

from torch.distributed import DistError

from rolecall import Context, Outcome, PeerLostError, Program, ProgramError
from rolecall.jobs.script import ScriptSettings
from rolecall.jobs.script.ending import Ending


def check(settings: ScriptSettings) -> None:
    """Raises UsageError where the program is missing or cannot be loaded."""
    Program(settings.script, settings.script_args).check(settings, settings.ranks)


def run(context: Context[ScriptSettings]) -> Outcome:
    """Runs the program in this rank. Returns at rank 0, when the program has ended in every rank."""
    settings = context.settings
    context.supervision.record("start", 0, context.generation)
    try:
        ending = Ending(context)
        try:
            Program(settings.script, settings.script_args).run(context)
        except ProgramError:
            if not ending.has_ended:  # otherwise SIGTERM ended it, and what it did since does not count
                raise
        if not ending.end():
            ending.await_process()
        context.logger.info("the program has returned")
        if context.me.rank:
            ending.await_process()  # it serves its peers until the last has returned
        return ending.outcome()
    except DistError as error:
        raise PeerLostError(f"rank 0's worker is gone: {error}") from error
