"""`rolecall kill`: kills a rank of a local run, or a part of it; what is killed is started again."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence

import psutil

from rolecall.errors import UsageError
from rolecall.launch import control, ps


def run(words: Sequence[str]) -> int:
    """Runs `rolecall kill` with `words`. Returns the exit code. Raises UsageError for a rank or part that is not
    there."""
    parser = argparse.ArgumentParser(
        prog="rolecall kill",
        description="Sends SIGKILL to a rank of a local run, as a crash does: `rolecall run` starts it again.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    parser.add_argument("rank", metavar="RANK", help="ROLE_ORDINAL, as `rolecall ps` lists it")
    parser.add_argument("--part", help="only this part of it: supervisor, worker, tunnel, fork-server, ...")
    arguments = parser.parse_args(words)
    ranks = {rank.name: rank for rank in control.ranks(arguments.run)}
    rank = ranks.get(re.sub(r"[ -](?=\d+$)", "_", arguments.rank))
    if rank is None:
        raise UsageError(f"RANK {arguments.rank!r}: no such rank; there are {', '.join(ranks)}")
    parts = [*ps.parts(rank)]
    chosen = [part for part in parts if arguments.part in (None, part.name)]
    if not chosen:
        there = ", ".join(dict.fromkeys(part.name for part in parts)) or "none"
        raise UsageError(f"{rank.name}: has no process {arguments.part or ''!r}; its parts are: {there}")
    for part in chosen:  # the supervisor first, so that it starts nothing
        with contextlib.suppress(psutil.NoSuchProcess):
            part.process.kill()
    print(f"rolecall: killed {rank.name}: {', '.join(f'{part.name} {part.process.pid}' for part in chosen)}")
    return 0
