"""What ranks of `rolecall run` write: the log has all of it, the terminal a bounded part, and nobody waits."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from rolecall import telemetry
from rolecall.launch import here, output
from rolecall.launch.output import CUT_NOTE, MAX_LINE_BYTES, TRACEBACK, Output, Splitter, Tracebacks, printable
from rolecall.launch.rank_process import RankProcess

DEADLINE = 30  # seconds; a fail-safe
LONG = 3_000_000  # bytes


# ---- lines


def split(*chunks: bytes) -> list[str]:
    splitter = Splitter()
    return [line for chunk in chunks for line in splitter.split(chunk)] + splitter.end()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\n\ntw", b"o"], ["one", "", "two"]),
        ([b"10%\r20%\r30%\ndone\n"], ["10%", "20%", "30%", "done"]),
        ([b"one\r\ntwo\r", b"\nthree"], ["one", "two", "three"]),
        (["\u00e9".encode()[:1], "\u00e9".encode()[1:] + b"\n"], ["\u00e9"]),
        ([b"\xff\x00\n"], ["\ufffd\x00"]),
        ([], []),
    ],
)
def test_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert split(*chunks) == lines


def test_a_line_that_is_too_long_is_cut_wherever_it_is() -> None:
    cut = "x" * MAX_LINE_BYTES + CUT_NOTE
    long = b"x" * LONG
    assert split(long + b"\nafter\n") == [cut, "after"]
    assert split(b"before\n" + long) == ["before", cut]
    chunks = [long[start : start + 1000] for start in range(0, LONG, 1000)]
    assert split(*chunks, b"\nafter\n") == [cut, "after"]


def test_what_would_break_the_display() -> None:
    assert printable("\x1b[31mred\x1b[0m\tand\x07 \x1b[2Jgone\x00") == "red\tand gone"


def test_a_traceback_is_shown_once_in_a_run() -> None:
    seen: set[tuple[str, str]] = set()
    one, other = Tracebacks("lead_0", seen), Tracebacks("sampler_1", seen)
    error = ['  File "pi.py", line 15, in hits', "    fail()", "ValueError: bad value"]

    def show(tracebacks: Tracebacks, *lines: str) -> list[str]:
        return [shown for line in lines for shown in tracebacks.show(line)] + tracebacks.end()

    assert show(one, "before", TRACEBACK, *error, "after") == [
        "lead_0: before",
        f"lead_0: {TRACEBACK}",
        *error,
        "lead_0: after",
    ]
    assert show(other, "before", TRACEBACK, *error, "after") == ["sampler_1: before", "sampler_1: after"]
    cause = ["", "The above exception was the direct cause of the following exception:", ""]
    assert show(one, TRACEBACK, *error, *cause, TRACEBACK, *error, "after") == ["lead_0: after"]
    assert show(other, TRACEBACK, *error[:2], "ValueError: worse")[-1] == "ValueError: worse"
    assert show(one, TRACEBACK, *error[:2])[1:] == error[:2]  # killed as it wrote


def test_what_a_rank_prints_has_its_name_and_its_log_has_it_already() -> None:
    stream = io.StringIO()
    for style in ("text", "json"):
        telemetry.setup_logging(style, "info", stream, role="sampler", ordinal=1)
        telemetry.log().info("joined", generation=3)
    lines = [*stream.getvalue().splitlines(), "rolecall: MODEL=x: cannot be imported", ""]
    assert len(lines) == 4
    rank = Tracebacks("sampler_1", set())
    assert [shown for line in lines for shown in rank.show(line)] == lines
    for line in ("3.14", '{"pi": 3.14}', "  indented", "2026-11-28: a date"):
        assert rank.show(line) == [f"sampler_1: {line}"]


# ---- a rank's process


def run(monkeypatch: pytest.MonkeyPatch, log: Path, program: str) -> tuple[int, list[str]]:
    """The exit code of a rank that is `program`, and the lines that were shown."""
    monkeypatch.setattr(here, "command", lambda: [sys.executable, "-S", "-c", "import os, sys\n" + program])
    lines: list[str] = []
    rank = RankProcess("rank", 0, dict(os.environ), log, lines.append)
    return asyncio.run(asyncio.wait_for(rank.supervise(), DEADLINE)), lines


def test_a_rank_that_prints_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, data = tmp_path / "log", bytes(range(256)) * 8192
    code, lines = run(monkeypatch, log, "sys.stdout.buffer.write(bytes(range(256)) * 8192); print('trains on')")
    assert code == 0
    assert lines[-1].endswith("trains on")
    assert log.read_bytes() == data + b"trains on\n"


def test_a_full_disk_does_not_stop_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = run(monkeypatch, Path("/dev/full"), f"print('x' * {LONG}); print('trains on')")
    assert code == 0
    (complaint,) = [line for line in lines if "No space left" in line]
    assert complaint.startswith("rank_0: its log /dev/full cannot be written any more")
    assert lines[-1] == "rank_0: trains on"


def test_the_end_of_a_rank_is_seen_while_others_hold_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(here, "LAST_OUTPUT_SECONDS", 0.1)
    program = "import time\npid = os.fork()\nif pid == 0: time.sleep(60)\nprint(pid, flush=True)\nos._exit(0)"
    code, lines = run(monkeypatch, tmp_path / "log", program)
    os.kill(int(lines[0].removeprefix("rank_0: ")), signal.SIGKILL)
    assert code == 0


def test_a_crash_is_reported_before_the_next_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    again, happened = tmp_path / "again", list[str]()
    program = f"import os; print('started', flush=True); os._exit(0 if os.path.exists({str(again)!r}) else 1)"

    async def crashed(role: str, ordinal: int) -> None:
        happened.append(f"{role}_{ordinal} reported")
        again.touch()

    monkeypatch.setattr(here, "command", lambda: [sys.executable, "-S", "-c", program])
    rank = RankProcess("worker", 0, dict(os.environ), tmp_path / "log", happened.append, crashed=crashed)
    assert asyncio.run(asyncio.wait_for(rank.supervise(), DEADLINE)) == 0
    started = "worker_0: started"
    assert happened == [started, "worker_0 crashed (exit code 1), restarting it", "worker_0 reported", started]


# ---- a terminal that does not read


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[str]]]:
    """The end of a pipe that is read, and the other one."""
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as stream:  # noqa: PTH123
        yield reader, stream


def test_nobody_waits_for_a_terminal_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[IO[bytes], IO[str]]
) -> None:
    monkeypatch.setattr(output, "MAX_WAITING_CHARACTERS", 1000)
    before = {*threading.enumerate()}
    shown = Output(pipe[1], pipe[1])
    (writer,) = {*threading.enumerate()} - before
    shown.line("x" * 200_000)  # more than a pipe holds
    texts = [os.read(pipe[0].fileno(), 1)]  # it is being printed
    for number in range(10_000):
        shown.line(f"line {number}")
    shown.close("the end", 0.01)
    assert writer.is_alive()

    def read() -> None:
        while not texts[-1].endswith(b"the end\n"):
            texts.append(os.read(pipe[0].fileno(), 2**16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(DEADLINE)
    writer.join(DEADLINE)
    lines = b"".join(texts).decode().splitlines()
    assert lines[0] == "x" * 200_000
    left_out = 10_000 - (len(lines) - 3)
    assert lines[1] == f"rolecall: {left_out} lines are not shown; the logs have them"
    assert lines[2:] == [*(f"line {number}" for number in range(left_out, 10_000)), "the end"]


def test_a_terminal_that_is_gone(pipe: tuple[IO[bytes], IO[str]]) -> None:
    before = {*threading.enumerate()}
    shown = Output(pipe[1], pipe[1])
    pipe[0].close()
    for number in range(3):
        shown.line(f"line {number}", error=number == 1)
    shown.picture("a picture")
    shown.close("the end", DEADLINE)
    assert {*threading.enumerate()} <= before
