"""`rolecall stacks`: the stacks of all ranks' workers, and who waits for whom."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rolecall.errors import UsageError
from rolecall.observe.ask import ask
from rolecall.observe.stacks import deadlocks, stack_report
from rolecall.record import rundir

TIMEOUT_SECONDS = 12.0  # for all replies
RANK = re.compile(r"(?P<role>.+?)(?:[ _-](?P<ordinal>\d+))?")


def run(words: Sequence[str]) -> int:
    """Runs `rolecall stacks` with `words`. Returns the exit code. Raises UsageError if rank 0 is not reached or
    refuses, and for a rank that does not exist."""
    arguments = parser().parse_args(words)
    # all ranks are asked: who waits for whom needs them
    replies = asyncio.run(ask(arguments.target, "stacks", timeout=TIMEOUT_SECONDS))
    names = chosen(arguments.ranks, replies)
    print(as_json(replies, names) if arguments.json else stack_report.text(replies, names))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rolecall stacks",
        description="The stacks of the ranks' workers, what remote calls wait for whom, and deadlocks among them.",
    )
    about = f"{rundir.A_RUN}, or HOST:PORT or URL of rank 0's metrics"
    parser.add_argument("target", metavar="TARGET", help=about)
    parser.add_argument("ranks", nargs="*", metavar="RANK", help="show the stacks of these only: ps_0, or a role (all)")
    parser.add_argument("--json", action="store_true", help="every rank's reply and the conclusions, as JSON")
    return parser


def chosen(words: Sequence[str], replies: Mapping[str, Any]) -> list[str] | None:
    """The ranks that `words` name, as ROLE_ORDINAL or ROLE; None without words. Raises UsageError for one that does
    not exist."""
    names: list[str] = []
    for word in words:
        match = RANK.fullmatch(word)
        exact = f"{match['role']}_{match['ordinal']}" if match else ""
        matching = [name for name in replies if name == exact or name.rpartition("_")[0] == word]
        if not matching:
            raise UsageError(f"RANK {word!r}: no such rank in the gang ({', '.join(replies) or 'which is empty'})")
        names += [name for name in matching if name not in names]
    return names if words else None


def as_json(replies: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None) -> str:
    """The replies of the ranks `names`, or of all, and who waits for whom."""
    result = deadlocks.look(stack_report.read(replies))
    chosen = {name: reply for name, reply in replies.items() if names is None or name in names}
    content = {
        "ranks": {
            rank: {name: value for name, value in reply.items() if name not in ("name", "error") or value}
            for rank, reply in chosen.items()
        },
        "waits": [asdict(wait) for wait in result.waits],
        "deadlocks": result.deadlocks,
        "active": result.active,
    }
    return json.dumps(content, indent=1)
