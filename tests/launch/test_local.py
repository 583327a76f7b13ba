"""What `rolecall run` says at its end: how the run ended, and which files are its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.errors import FAILED, UNSAVED
from rolecall.launch.local import LocalRun
from rolecall.launch.rank_process import RankProcess
from rolecall.record import rundir


def last_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], directory: Path, code: int, *written: str
) -> str:
    """What is printed at the end of a run whose rank 0 has `written` files of its report and ends with `code`."""

    async def supervise(rank: RankProcess) -> int:
        if not rank.name.startswith("agent"):
            return 0
        for name in written:
            rundir.write_atomically(directory / name, b"of this run")
        return code

    monkeypatch.setattr(RankProcess, "supervise", supervise)
    run = LocalRun(describe.describe("rl", ["--observers", "1"]), Settings(job="rl", checkpoint_dir=directory), False)
    assert asyncio.run(asyncio.wait_for(run.run(), 60)) == code
    return capfd.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("code", [0, FAILED, UNSAVED])
def test_an_earlier_runs_files_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, code: int
) -> None:
    for name in (rundir.SUMMARY, rundir.PAGE):
        (tmp_path / name).write_text("of an earlier run")
    line = last_line(monkeypatch, capfd, tmp_path, code, rundir.PAGE)
    assert rundir.PAGE in line
    assert rundir.SUMMARY not in line
    assert (str(code) in line.split(";")[0]) == (code != 0)


def test_a_finished_run_lists_its_files_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rundir.write_done(tmp_path, {})
    (tmp_path / rundir.SUMMARY).write_text("of this run")
    assert rundir.SUMMARY in last_line(monkeypatch, capfd, tmp_path, 0)
