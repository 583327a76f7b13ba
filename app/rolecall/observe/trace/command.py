"""`rolecall trace`: the activity and the waits of all ranks, as one file for Perfetto, or as a table."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rolecall.errors import UsageError
from rolecall.observe.ask import ask
from rolecall.observe.trace import perfetto
from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.copies import TraceCopies
from rolecall.observe.trace.summary import Summary
from rolecall.record import records, rundir
from rolecall.record.history import History

DEFAULT_SECONDS = 10.0
MAX_SECONDS = 3600.0
PERIOD_SECONDS = 1.0  # between two copies
MAX_REQUESTS_PER_SECOND = 50  # rank 0 accepts 10,000 in two minutes, and other commands need some
MAX_PENDING_REQUESTS = 16
FLUSH_SECONDS = 1.0  # after the end, within which the last spans are written
QUERY_TIMEOUT_SECONDS = 10.0
OPEN = "open it at https://ui.perfetto.dev (it stays in the browser) or chrome://tracing"
NO_TRACE = "there is no trace; start the run with TRACE=1, or record one that is under way with --seconds 10"


def run(words: Sequence[str]) -> int:
    """Runs `rolecall trace` with `words`. Returns the exit code. Raises UsageError for a folder without a trace, if
    rank 0 is not reached or refuses, and if the file cannot be written."""
    arguments = parser().parse_args(words)
    console = Console(stderr=True)
    directory = rundir.find(arguments.target)
    if arguments.output and not arguments.output.absolute().parent.is_dir():  # before anything is recorded
        raise UsageError(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    if directory.is_dir() and arguments.seconds is None:
        folder = directory / records.FOLDER if (directory / records.FOLDER).is_dir() else directory
        if (folder / rundir.HISTORY).exists():  # a run's, without a trace
            raise UsageError(f"TARGET {arguments.target!r}: {NO_TRACE}")
        wanted = arguments.output or (None if arguments.summary else folder / perfetto.NAME)
        return _show(records.read(folder), perfetto.history_beside(folder), wanted, arguments, console)
    happened = perfetto.history_beside(directory) if directory.is_dir() else None
    with tempfile.TemporaryDirectory() as name:
        seconds = DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds
        asyncio.run(_record(arguments.target, Path(name), seconds, console))
        wanted = arguments.output or Path(perfetto.NAME)
        return _show(records.read(Path(name)), happened, wanted, arguments, console)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rolecall trace",
        description="The activity and the waits of all ranks of a run, as one file for Perfetto and chrome://tracing. "
        "The run was started with TRACE=1; or it is under way, and is recorded now for some seconds.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help=f"{rundir.A_RUN}; or HOST:PORT or URL of rank 0's metrics, to record now",
    )
    parser.add_argument("--seconds", type=_seconds, help=f"how long to record a job that runs ({DEFAULT_SECONDS:g})")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"default: {perfetto.NAME}, of a run's folder in {records.FOLDER}/",
    )
    about = "a table of the time of the steps; for a folder, the file is then written with --output only"
    parser.add_argument("--summary", action="store_true", help=about)
    return parser


def _seconds(text: str) -> float:
    try:
        if 0 < float(text) <= MAX_SECONDS:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {MAX_SECONDS:g}")


def _show(
    trace: records.Trace, run: History | None, output: Path | None, arguments: argparse.Namespace, console: Console
) -> int:
    """Writes the file and prints the results."""
    if not trace.recordings:
        problem = trace.problems[0] if trace.problems else NO_TRACE
        raise UsageError(f"TARGET {arguments.target!r}: {problem}")
    with console.status(f"reading {len(trace.recordings)} files"):
        calls = Calls(trace)
        spans = perfetto.write_file(calls, output, run) if output else 0
        summary = Summary(calls) if arguments.summary else None
    for problem in trace.damage():
        print(f"rolecall: {problem}", file=sys.stderr)
    if summary:
        Console(width=None if sys.stdout.isatty() else 160).print(summary.render())
    if output:
        ranks, size = len({one.process.name for one in trace.recordings}), output.stat().st_size / 1e6
        of = f"{spans:,} spans of {ranks} rank{'' if ranks == 1 else 's'}"
        print(f"rolecall: {output}: {of}, {size:,.1f} MB; {OPEN}")
    return 0


async def _record(target: str, folder: Path, seconds: float, console: Console) -> None:
    """Records a running job for `seconds`, and copies the files of its ranks to `folder`. Raises UsageError if rank 0
    is not reached or refuses, or no rank records."""
    replies = await ask(target, "trace", {"seconds": seconds}, None, QUERY_TIMEOUT_SECONDS)
    problems = {rank: str(reply.pop("error")) for rank, reply in replies.items() if "error" in reply}
    copies = [TraceCopies(folder, rank, have) for rank, have in replies.items() if rank not in problems]
    if not copies:
        problem = "; ".join(f"{rank}: {problem}" for rank, problem in problems.items())
        raise UsageError(f"TARGET {target!r}: no rank records ({problem or 'the gang has no members'})")
    console.print(f"rolecall: recording for {seconds:g} s: {', '.join(one.rank for one in copies)}")
    turns = asyncio.Semaphore(MAX_PENDING_REQUESTS)

    async def copy(one: TraceCopies) -> None:
        problems.pop(one.rank, None)
        try:
            more = True
            while more:
                async with turns:
                    query = {"have": one.have}
                    reply = (await ask(target, "spans", query, [one.rank], QUERY_TIMEOUT_SECONDS)).get(one.rank, {})
                more = bool(one.add(reply).data)
                if problem := reply.get("error"):
                    problems[one.rank] = problem
        except (UsageError, ValueError) as error:  # rank 0 is gone or busy: what came before counts
            problems[one.rank] = str(error)

    end = time.monotonic() + seconds + FLUSH_SECONDS
    with UsageError.wrap(f"{folder}: cannot be written", OSError):
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, max(PERIOD_SECONDS, len(copies) / MAX_REQUESTS_PER_SECOND)))
            await asyncio.gather(*map(copy, copies))
    for rank, problem in problems.items():
        console.print(f"rolecall: {rank}: {problem}")
