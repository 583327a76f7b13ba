"""`rolecall ps`, `kill` and `scale`: commands for a local run, which they reach by its control socket.

A function with a command's name runs it with `words`, and returns the exit code. Raises UsageError if no local run is
under way, or if it has no such rank, part or role.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence

import psutil

from rolecall import machine
from rolecall.errors import UsageError
from rolecall.launch import control
from rolecall.machine import SUPERVISOR
from rolecall.messages.control import KillRank, ListedRank, ListRanks, ScaleRole


def ps(words: Sequence[str]) -> int:
    """Lists the processes of the run."""
    arguments = ps_parser().parse_args(words)
    rows = [("rank", "part", "pid", "state")]
    for rank in control.ask(arguments.run, ListRanks()).ranks:
        processes = list[tuple[str, str, str]]()
        if rank.pid and rank.host:
            processes = [(SUPERVISOR, f"{rank.host}:{rank.pid}", "")]
        elif rank.pid:
            processes = [(part, str(process.pid), _state(process)) for part, process in machine.parts(rank.pid)]
        for part, pid, state in processes or [("-", "-", "")]:
            states = [rank.state if part in (SUPERVISOR, "-") else "", state]
            rows.append((rank.name, part, pid, ", ".join(filter(None, states))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def ps_parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall ps`."""
    parser = argparse.ArgumentParser(prog="rolecall ps", description="The processes of a local run, by rank and part.")
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    return parser


def find(run: str, name: str) -> ListedRank:
    """The rank `name` of the run, such as observer_1."""
    ranks = {rank.name: rank for rank in control.ask(run, ListRanks()).ranks}
    rank = ranks.get(re.sub(r"[ -](?=\d+$)", "_", name))
    if rank is None:
        raise UsageError(f"RANK {name!r}: no such rank; there are {', '.join(ranks)}")
    return rank


def kill(words: Sequence[str]) -> int:
    """Kills a rank of the run, or a part of it; `rolecall run` starts what was killed again."""
    arguments = kill_parser().parse_args(words)
    rank = find(arguments.run, arguments.rank)
    print(f"rolecall: {control.ask(arguments.run, KillRank(rank.role, rank.ordinal, arguments.part)).done}")
    return 0


def kill_parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall kill`."""
    parser = argparse.ArgumentParser(
        prog="rolecall kill",
        description="Sends SIGKILL to a rank of a local run, as a crash does: `rolecall run` starts it again.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    parser.add_argument("rank", metavar="RANK", help="ROLE_ORDINAL, as `rolecall ps` lists it")
    parser.add_argument("--part", default="", help="only this part of it: supervisor, worker, tunnel, fork-server, ...")
    return parser


def scale(words: Sequence[str]) -> int:
    """Changes how many ranks an elastic role of the run has."""
    arguments = scale_parser().parse_args(words)
    role, _, count = arguments.wanted.partition("=")
    if not role or not (count.isascii() and count.isdecimal()):
        raise UsageError(f"ROLE=COUNT {arguments.wanted!r}: is no role and number, such as observer=4")
    print(f"rolecall: {control.ask(arguments.run, ScaleRole(role, int(count))).done}")
    return 0


def scale_parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall scale`."""
    parser = argparse.ArgumentParser(
        prog="rolecall scale",
        description="Starts ranks of an elastic role of a local run, or has those with the highest ordinals drain.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    parser.add_argument("wanted", metavar="ROLE=COUNT", help="how many ranks the role is to have")
    return parser


def _state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.status())
    return "ended"
