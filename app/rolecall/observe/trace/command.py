"""`rolecall trace`: what all ranks do and wait for, as one file for Perfetto, or as a table."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rolecall.errors import UsageError
from rolecall.observe.ask import ask
from rolecall.observe.trace import trace_file
from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.summary import Summary
from rolecall.record import records, rundir
from rolecall.record.history import History

SECONDS = 10.0
MOST_SECONDS = 3600.0
PERIOD = 1.0  # seconds between two collections
RATE = 50  # requests a second: rank 0 takes 10,000 in two minutes, and other commands need some
AT_A_TIME = 16  # requests under way
FLUSH = 1.0  # seconds after the end, within which the last spans are written
REST = 60.0  # seconds at most to collect what is left
TIMEOUT = 10.0  # seconds of a query
OPEN = "open it at https://ui.perfetto.dev (it stays in the browser) or chrome://tracing"
NO_TRACE = "there is no trace; start the run with TRACE=1, or record one that is under way with --seconds 10"
Reply = dict[str, Any]


def run(words: Sequence[str]) -> int:
    """Runs `rolecall trace` with `words`. Returns the exit code. Raises UsageError for a folder without a trace, where
    rank 0 is not reached or refuses, and where the file cannot be written."""
    arguments = _parser().parse_args(words)
    console = Console(stderr=True)
    directory = Path(arguments.target)
    if arguments.output and not arguments.output.absolute().parent.is_dir():  # before anything is recorded
        raise UsageError(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    if directory.is_dir() and arguments.seconds is None:
        folder = directory / records.FOLDER if (directory / records.FOLDER).is_dir() else directory
        if (folder / rundir.HISTORY).exists():  # a run's, without a trace
            raise UsageError(f"TARGET {arguments.target!r}: {NO_TRACE}")
        wanted = arguments.output or (None if arguments.summary else folder / trace_file.NAME)
        return _show(records.read(folder), trace_file.history_beside(folder), wanted, arguments, console)
    happened = trace_file.history_beside(directory) if directory.is_dir() else None
    with tempfile.TemporaryDirectory() as name:
        live = Live(arguments.target, Path(name), console)
        asyncio.run(live.record(SECONDS if arguments.seconds is None else arguments.seconds))
        wanted = arguments.output or Path(trace_file.NAME)
        return _show(records.read(Path(name)), happened, wanted, arguments, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolecall trace",
        description="What all ranks of a run did and waited for, as one file that Perfetto and chrome://tracing open. "
        "The run is over, or under way, and was started with TRACE=1; or it is recorded now, for some seconds.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a run's CHECKPOINT_DIR; or HOST:PORT or URL of rank 0's metrics, to record now",
    )
    parser.add_argument("--seconds", type=_seconds, help=f"how long to record a job that runs ({SECONDS:g})")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"default: {trace_file.NAME}, of a run's folder in {records.FOLDER}/",
    )
    parser.add_argument("--summary", action="store_true", help="a table of where the time of the steps went; of a "
                        "folder, the file is then written with --output only")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="what is printed, as JSON")
    return parser


def _seconds(text: str) -> float:
    try:
        if 0 < float(text) <= MOST_SECONDS:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {MOST_SECONDS:g}")


def _show(
    trace: records.Trace, run: History | None, output: Path | None, arguments: argparse.Namespace, console: Console
) -> int:
    """Writes the file and prints what is asked for."""
    if not trace.recordings:
        problem = trace.problems[0] if trace.problems else NO_TRACE
        raise UsageError(f"TARGET {arguments.target!r}: {problem}")
    size = sum(one.path.stat().st_size for one in trace.recordings) / 1e6
    with _Stage(console, f"reading {len(trace.recordings)} files, {size:,.1f} MB"):
        calls = Calls(trace)
    content: dict[str, Any] = {"job": trace.job, "problems": trace.damage()}
    if output:
        with _Stage(console, f"writing {output}"):
            written = trace_file.write(calls, output, run)
        content |= {"file": str(output), "spans": written.spans}
    if arguments.summary:
        with _Stage(console, "summing up"):
            summary = Summary(calls)
        content["summary"] = summary.to_dict()
    if arguments.json:
        print(json.dumps(content, indent=1))
        return 0
    for problem in trace.damage():
        print(f"rolecall: {problem}", file=sys.stderr)
    if arguments.summary:
        Console(width=None if sys.stdout.isatty() else 160).print(summary.render())
    if output:
        ranks, size = len({one.process.name for one in trace.recordings}), output.stat().st_size / 1e6
        of = f"{written.spans:,} spans of {ranks} rank{'' if ranks == 1 else 's'}"
        print(f"rolecall: {output}: {of}, {size:,.1f} MB; {OPEN}")
    return 0


class _Stage:
    """Says on a terminal what takes its time; elsewhere once, where it is large."""

    def __init__(self, console: Console, text: str) -> None:
        self._status = console.status(text) if console.is_terminal else None
        self._text, self._console, self._began = text, console, time.monotonic()

    def __enter__(self) -> None:
        if self._status:
            self._status.start()

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()
        elif (seconds := time.monotonic() - self._began) >= 2:
            self._console.print(f"rolecall: {self._text}: {seconds:.0f} s")


class Live:
    """Has the ranks of a running job record, and collects their spans in `folder`, a file of each rank and worker."""

    def __init__(self, target: str, folder: Path, console: Console) -> None:
        self.target, self.folder, self.console = target, folder, console
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._cursors: dict[str, Reply] = {}  # by rank: where its data goes on
        self._problems: dict[str, str] = {}

    async def record(self, seconds: float) -> None:
        """Records for `seconds`. Raises UsageError where rank 0 is not reached or refuses, or no rank records."""
        replies = await ask(self.target, "trace", {"seconds": seconds}, None, TIMEOUT)
        for rank, reply in replies.items():
            if "error" in reply:
                self._warn(rank, str(reply["error"]))
            else:
                self._cursors[rank] = {"file": reply["file"], "offset": reply["offset"]}
        if not self._cursors:
            problem = "; ".join(f"{rank}: {problem}" for rank, problem in self._problems.items())
            raise UsageError(f"TARGET {self.target!r}: no rank records ({problem or 'the gang has no members'})")
        names = ", ".join(self._cursors)
        bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of "
                       "{task.total:.0f} s"), console=self.console, disable=not self.console.is_terminal)  # fmt: skip
        if not self.console.is_terminal:
            self.console.print(f"rolecall: recording for {seconds:g} s: {names}")
        began = time.monotonic()
        with bar:
            task = bar.add_task(f"recording {len(self._cursors)} ranks", total=seconds)
            while (passed := time.monotonic() - began) < seconds:
                bar.update(task, completed=passed)
                await self._collect()
                pause = max(PERIOD, len(self._cursors) / RATE)
                await asyncio.sleep(min(pause, max(0.0, began + seconds - time.monotonic())))
            bar.update(task, completed=seconds, description="collecting")
            await asyncio.sleep(FLUSH)
            while await self._collect() and time.monotonic() - began < seconds + REST:
                pass
        for rank, problem in self._problems.items():
            self.console.print(f"rolecall: {rank}: {problem}")

    async def _collect(self) -> bool:
        """Takes the next data of all ranks; returns whether one has more already."""
        results = await asyncio.gather(*(self._collect_of(rank) for rank in self._cursors), return_exceptions=True)
        for rank, result in zip(self._cursors, results, strict=True):
            if isinstance(result, UsageError):  # rank 0 is gone, or busy: what has come before counts
                self._warn(rank, str(result))
            elif isinstance(result, BaseException):
                raise result
        return any(result is True for result in results)

    async def _collect_of(self, rank: str) -> bool:
        async with self._turns:
            reply = (await ask(self.target, "spans", self._cursors[rank], [rank], TIMEOUT)).get(rank, {})
        if "next" not in reply:
            self._warn(rank, str(reply.get("error", "no reply")))
            return False
        self._problems.pop(rank, None)
        if reply["data"]:
            self._write(rank, reply)
        self._cursors[rank] = {"file": reply["file"], "offset": reply["next"]}
        return bool(reply["more"] and reply["data"])

    def _write(self, rank: str, reply: Reply) -> None:
        path = self.folder / f"{rank.replace(' ', '-')}-{Path(reply['file']).stem}{records.SUFFIX}"
        with UsageError.wrap(f"{self.folder}: cannot be written", OSError), path.open("a") as file:
            if not file.tell() and reply["offset"]:  # from the middle of a file on, which begins with its process
                file.write(json.dumps(["process", reply["process"]]) + "\n")
            file.write(reply["data"])

    def _warn(self, rank: str, problem: str) -> None:
        self._problems[rank] = problem
