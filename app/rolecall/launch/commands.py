"""`rolecall ps`, `kill`, `scale` and `stop`: commands for a local run, which they reach by its control socket.

A function with a command's name runs it with `words`, and returns the exit code. Raises UsageError if no local run is
under way, or if it has no such rank, part or role.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Sequence

import psutil

from rolecall import fields, machine
from rolecall.errors import RankError, UsageError
from rolecall.launch import control
from rolecall.launch.rank_process import INTERRUPTED
from rolecall.machine import SUPERVISOR
from rolecall.messages.control import KillRank, ListedRank, ListRanks, ScaleRole, StopRun
from rolecall.observe import targets
from rolecall.record import rundir

POLL_SECONDS = 0.05
MAX_END_CHARACTERS = 1000  # that are shown of how a run has ended


def ps(words: Sequence[str]) -> int:
    """Lists the processes of the run, or else the runs below RUNS that are under way."""
    arguments = ps_parser().parse_args(words)
    if arguments.run is None:
        return _list_runs()
    rows = [("rank", "part", "pid", "state")]
    for rank in control.ask(arguments.run, ListRanks()).ranks:
        processes = list[tuple[str, str, str]]()
        if rank.host:
            processes = [(SUPERVISOR, f"{rank.host}:{rank.pid}" if rank.pid else rank.host, "")]
        elif rank.pid:
            processes = [(part, str(process.pid), _state(process)) for part, process in machine.parts(rank.pid)]
        for part, pid, state in processes or [("-", "-", "")]:
            states = [rank.state if part in (SUPERVISOR, "-") else "", state]
            rows.append((rank.name, part, pid, ", ".join(filter(None, states))))
    _print(rows)
    return 0


def _list_runs() -> int:
    rows = list[Sequence[str]]([("run", "job", "engine", "since", "page")])
    for folder in sorted(rundir.RUNS.glob("*")):
        if (run := targets.run_in(folder)) and run.ranks:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created))
            page = run.ranks[0].url.removesuffix("metrics")
            rows.append((folder.name, *map(fields.shown, (run.about.job, run.about.engine, since, page))))
    _print(rows)
    return 0


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def ps_parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall ps`."""
    about = "The processes of a local run, by rank and part; without RUN, the runs below runs/ that are under way."
    parser = argparse.ArgumentParser(prog="rolecall ps", description=about)
    parser.add_argument("run", nargs="?", metavar="RUN", help=rundir.A_RUN)
    return parser


def rank_name(text: str) -> str:
    """observer_1 for observer-1."""
    return re.sub(r"[ -](?=\d+$)", "_", text)


def find(run: str, name: str) -> ListedRank:
    """The rank `name` of the run, such as observer_1."""
    ranks = {rank.name: rank for rank in control.ask(run, ListRanks()).ranks}
    rank = ranks.get(rank_name(name))
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
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
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
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
    parser.add_argument("wanted", metavar="ROLE=COUNT", help="how many ranks the role is to have")
    return parser


def stop(words: Sequence[str]) -> int:
    """Ends the run, and waits until it is over. Returns 0 if it has drained or finished. Raises RankError if it was
    killed, or takes longer than its deadlines."""
    arguments = stop_parser().parse_args(words)
    folder = rundir.find(arguments.run)
    run = targets.last_run(folder)
    if run is None or run.code is None:
        run = _end(arguments.run, arguments.now)
    if run is None or run.code is None:
        raise RankError(f"RUN {arguments.run!r}: was killed; the same `rolecall run` resumes it")
    print(f"rolecall: {arguments.run}: {fields.shown(run.end, MAX_END_CHARACTERS)}")
    return 0 if run.code == INTERRUPTED else run.code


def _end(name: str, now: bool) -> targets.LocalRun | None:
    """Stops the run, and waits until it is over. Returns what is known of it."""
    seconds, folder = control.CLOSE_SECONDS, rundir.find(name)
    with contextlib.suppress(control.EndingError):
        seconds = control.ask(name, StopRun(now)).seconds
    end = time.monotonic() + seconds
    while targets.run_in(folder):
        if time.monotonic() > end:
            raise RankError(f"RUN {name!r}: is not over after {seconds:g} s; `rolecall stop {name} --now` ends it")
        time.sleep(POLL_SECONDS)
    return targets.last_run(folder)


def stop_parser() -> argparse.ArgumentParser:
    """The arguments of `rolecall stop`."""
    about = "Has a local run save the state of its job, and end, as Ctrl-C does, and waits until it is over."
    parser = argparse.ArgumentParser(prog="rolecall stop", description=about)
    parser.add_argument("run", metavar="RUN", help=rundir.A_RUN)
    parser.add_argument("--now", action="store_true", help="end it at once; steps since the newest checkpoint are lost")
    return parser


def _state(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.status())
    return "ended"
