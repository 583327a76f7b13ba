"""`rolecall trace`: of a folder, and of a running job whose ranks a fake answers for."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import UsageError
from rolecall.observe.trace import command as trace
from rolecall.observe.trace.copies import Chunk
from rolecall.record import records
from tests.observe.traces import MS, UNIX, Worker, call, write

CHUNK = 700  # bytes of a reply


def workers() -> list[Worker]:
    server, trainer = Worker("ps", offset=10**12), Worker("trainer", 1, rank=1)
    for number in range(10):
        at = number * 10 * MS
        server.span("step", at, at + 10 * MS, step=number + 1)
        trainer.span("step", at, at + 10 * MS, step=number + 1)
        call(trainer, server, "exchange", at + 5 * MS, at + 5.1 * MS, at + 9 * MS, at + 9.1 * MS)
    return [server, trainer]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "trace", *workers())
    return tmp_path / "run"


# ---- a folder


def test_a_run_s_folder_is_written_where_its_spans_are(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.run([str(run_folder)]) == 0
    content = json.loads((run_folder / "trace" / "trace.json").read_text())
    assert {one["name"] for one in content["traceEvents"]} >= {"step", "exchange"}
    text = capsys.readouterr().out
    assert "40 spans of 2 ranks" in text
    assert "https://ui.perfetto.dev" in text


def test_the_summary_alone_writes_no_file(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.run([str(run_folder), "--summary"]) == 0
    assert not (run_folder / "trace" / "trace.json").exists()
    assert "calls, and the parts of their time" in capsys.readouterr().out


def test_damaged_files_are_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "trace" / "ps_9-1.jsonl").write_text("nothing\n")
    assert trace.run([str(run_folder)]) == 0
    output = capsys.readouterr()
    assert "ps_9-1.jsonl: does not begin with a process and is left out" in output.err
    assert "40 spans" in output.out


def test_a_folder_without_a_trace_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="start the run with TRACE=1"):
        trace.run([str(tmp_path)])


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "1e9"])
def test_seconds_are_a_number_in_bounds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        trace.run(["8000", "--seconds", seconds])
    assert end.value.code == 2
    assert "is not a number of seconds" in capsys.readouterr().err


# ---- a job that runs


class Job:
    """Answers queries for the ranks of `workers`, of whose files `before` lines precede the request."""

    def __init__(self, *ranks: Worker, before: int = 0) -> None:
        self.ranks = {one.name: one for one in ranks}
        self.before = before
        self.asked: list[tuple[str, Any]] = []
        self.failing: dict[str, str] = {}

    async def ask(
        self, target: str, what: str, arguments: dict[str, Any], to: Collection[str] | None, timeout: float
    ) -> dict[str, Any]:
        self.asked.append((what, arguments))
        return {name: self.reply(name, what, arguments) for name in to or self.ranks}

    def reply(self, name: str, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name in self.failing:
            return {"error": self.failing[name]}
        worker, file = self.ranks[name], records.file_name(1)
        lines = worker.file.decode().splitlines(keepends=True)[:-1]  # without rank 0's reading of its clock
        if what == "trace":
            return {file: len("".join(lines[: self.before]))} if self.before else {}
        offset = arguments["have"].get(file, 0)
        data = "".join(lines)[offset : offset + CHUNK]
        chunk = Chunk(file, offset, data[: data.rfind("\n") + 1], process=lines[0], clock_ns=worker.offset)
        return asdict(replace(chunk, sent_ns=-MS, received_ns=MS, wall_ns=UNIX))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    job = Job(*workers())
    monkeypatch.setattr(trace, "ask", job.ask)
    monkeypatch.setattr(trace, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(trace, "PERIOD_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    return job


@pytest.mark.parametrize("before", [0, 3])  # lines of an earlier recording
def test_a_running_job_is_recorded(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: int) -> None:
    job.before = before
    assert trace.run(["8000", "--seconds", "0.05", "--summary"]) == 0
    assert job.asked[0] == ("trace", {"seconds": 0.05})
    assert {what for what, _ in job.asked[1:]} == {"spans"}
    output = capsys.readouterr()
    assert "recording for 0.05 s: ps_0, trainer_1" in output.err
    assert f"{40 - 2 * max(0, before - 1)} spans of 2 ranks" in output.out
    assert f"ps: {10 - bool(before)} steps" in output.out
    assert "ps_0: within" in output.out  # its clock is a second ahead
    assert (tmp_path / "trace.json").exists()


def test_a_rank_that_does_not_reply_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.failing["trainer_1"] = "no reply within 10 s"
    assert trace.run(["8000", "--seconds", "0.05"]) == 0
    output = capsys.readouterr()
    assert "trainer_1: no reply within 10 s" in output.err
    assert "20 spans of 1 rank," in output.out
