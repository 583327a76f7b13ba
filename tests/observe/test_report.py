"""A run's report: the summary's contents, no secret among them, and a picture that shows something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.observe import picture, report
from rolecall.record import history, rundir
from rolecall.record.history import History

PNG = b"\x89PNG\r\n\x1a\n"


def trained(job: str = "rl", **values: str) -> tuple[History, dict[str, Any]]:
    """Two generations of a hundred steps, and their summary."""
    run = History()
    records: list[history.Record] = [("start", 0, 0.0, 3), ("train", 0, 1.0, 0)]
    if job == "rl":
        records.append(("goal", 0, 1.0, 475.0))
    for step in range(1, 101):
        records += [("score", step, 1.0 + step, 300 * math.sin(step / 50)), ("done", step, 1.0 + step, 64.0 * step)]
    run.record(records)
    run.end_generation("killed")
    run.record([("start", 90, 200.0, 4), ("train", 90, 201.0, 0), ("score", 100, 211.0, 250.0)])
    run.record([("loss", 100, 211.0, 0.5), ("done", 100, 211.0, 6400.0)])
    loaded, settings = registry.load(job, **values)
    titles: dict[str, Any] = {"score": loaded.score, "unit": loaded.unit, "lower": loaded.lower}
    members, result = [("agent", 0), ("observer", 0), ("observer", 3)], {"solved": True, "accuracy": float("nan")}
    end = run.began + 3600
    summary = report.summary(job, variables(settings), run, "finished", "", members, result, end, **titles)
    return run, summary


def variables(settings: Settings) -> dict[str, Any]:
    """The settings of a run, of which a supervisor has those that all jobs share, and those of the job as JSON."""
    shared = Settings(**{name: getattr(settings, name) for name in Settings.model_fields})
    return report.settings_of(shared, settings.model_dump(mode="json", exclude=set(Settings.model_fields)))


def short(run: History, state: str, reason: str = "") -> dict[str, Any]:
    """The summary of a run of `ps` that has no members and no result."""
    job, settings = registry.load("ps")
    return report.summary(
        "ps", variables(settings), run, state, reason, [], {}, 1.0, score=job.score, unit=job.unit, lower=job.lower
    )


def test_summary_has_the_results_of_the_run() -> None:
    run, summary = trained()
    assert (summary["job"], summary["state"], summary["steps"]) == ("rl", "finished", 100)
    assert summary["training_seconds"] == run.seconds == 110.0
    assert (summary["generations"], summary["restarts"], summary["ranks_lost"]) == (2, {"killed": 1}, {})
    assert summary["world"] == {"agent": 1, "observer": 2}
    assert summary["curve"]["label"] == "return"
    assert summary["curve"]["final"] == 250.0
    assert summary["curve"]["best"] == {"value": pytest.approx(300 * math.sin(79 / 50)), "step": 79}
    assert summary["curve"]["goal"] == 475.0
    assert summary["throughput"] == {"unit": "steps", "total": 6400.0, "per_second": pytest.approx(64.0)}
    assert summary["result"] == {"solved": True, "accuracy": None}
    assert summary["settings"]["ENV_ID"] == "CartPole-v1"
    assert summary["torch"].startswith("2.")
    assert summary["started"] < summary["ended"]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_the_best_perplexity_is_the_lowest() -> None:
    _, summary = trained("rnn")
    assert summary["curve"]["best"]["step"] == 1
    assert summary["curve"]["goal"] is None


@pytest.mark.parametrize("by_file", [False, True])
def test_summary_has_no_secret(tmp_path: Path, by_file: bool) -> None:
    (tmp_path / "token").write_text("open-sesame-of-ours\n")
    values = {"job_token_file": str(tmp_path / "token")} if by_file else {"job_token": "open-sesame-of-ours"}
    _, summary = trained(**values)
    report.write(tmp_path, summary)
    text = (tmp_path / rundir.SUMMARY).read_text()
    assert "sesame" not in text
    assert "JOB_TOKEN" not in text
    assert json.loads(text) == summary


def test_untrained_run_has_a_summary() -> None:
    summary = short(History(), "failed", "ps 0: broken")
    assert (summary["steps"], summary["started"], summary["reason"]) == (0, None, "ps 0: broken")
    assert summary["curve"]["best"] is summary["throughput"]["per_second"] is None
    assert picture.title(summary) == "ps, failed: after 0 steps in 0 s"


# ---- the picture


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a picture takes is not what is tested here, and a busy machine takes longer."""
    monkeypatch.setattr(report, "DRAW_SECONDS", 200.0)


def left(directory: Path, run: History, summary: dict[str, Any]) -> Path:
    """`directory`, with the files of this run."""
    report.write(directory, summary)
    (directory / rundir.HISTORY).write_text("".join(json.dumps(row) + "\n" for row in run.rows()))
    return directory


def test_the_picture_shows_the_curve(tmp_path: Path) -> None:
    """It is drawn by a prepared process, which starts before there is anything to draw, and draws what there is at the
    end; what is looked at are its size and colours.
    """
    from PIL import Image

    prepared = report.Picture(tmp_path)
    prepared.prepare()
    process = prepared._process
    assert process is not None
    prepared.prepare()
    assert prepared._process is process
    left(tmp_path, *trained())
    assert asyncio.run(prepared.draw()) == ""
    assert prepared._process is process
    with Image.open(tmp_path / rundir.CURVE) as image:
        assert image.format == "PNG"
        assert image.size == (1200, 600)
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    assert (pixels == 255).all(axis=1).sum() > 400_000
    for colour in (picture.BLUE, picture.GREEN, picture.ORANGE):
        distance = np.abs(pixels - list(bytes.fromhex(colour[1:]))).sum(axis=1)
        assert (distance < 40).sum() > 100, colour


@pytest.mark.parametrize("job", ["rl", "rnn"])
def test_what_the_picture_says(job: str) -> None:
    run, summary = trained(job)
    figure = picture.draw(run, summary)
    above, below = figure.axes[:2]
    assert figure.get_suptitle() == f"{job}, finished: {summary['curve']['label']} 250 after 100 steps in 110 s"
    drawn = {line.get_label(): line for line in above.get_lines()}
    label = summary["curve"]["label"]
    assert list(drawn[label].get_xdata()) == [*range(1, 91), 100]
    assert ("goal 475" in drawn) == (job == "rl")
    assert [90, 90] in [list(line.get_xdata()) for line in above.get_lines()]  # the second generation's start
    assert below.get_ylabel() == f"{summary['throughput']['unit']}/s"
    assert max(below.get_lines()[0].get_ydata()) == pytest.approx(64)


@pytest.mark.parametrize("points", [0, 1])
def test_empty_history_can_be_drawn(tmp_path: Path, points: int) -> None:
    run = History()
    run.record([("start", 0, 0.0, 1), ("train", 0, 0.0, 0), *[("score", 1, 0.0, 3.0)] * points])
    summary = short(run, "stopped")
    assert picture.main([str(left(tmp_path, run, summary))]) == 0
    assert (tmp_path / rundir.CURVE).read_bytes().startswith(PNG)


def draw(directory: Path) -> str:
    return asyncio.run(report.Picture(directory).draw())


def test_drawing_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path, *trained())
    (tmp_path / rundir.SUMMARY).unlink()
    assert rundir.SUMMARY in draw(tmp_path)
    monkeypatch.setattr(report, "DRAW_SECONDS", 0.01)
    assert draw(tmp_path) == "it took over 0.01 s"
    assert not (tmp_path / rundir.CURVE).exists()


def test_a_prepared_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    prepared = report.Picture(tmp_path)
    prepared.prepare()
    process = prepared._process
    assert process is not None
    process.kill()
    process.wait(60)
    left(tmp_path, *trained())
    assert asyncio.run(prepared.draw()) == ""
    assert prepared._process is not process
    assert (tmp_path / rundir.CURVE).read_bytes().startswith(PNG)


def test_a_prepared_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    supervisor = (
        "import os, sys; from pathlib import Path; from rolecall.observe.report import Picture; "
        "picture = Picture(Path(sys.argv[1])); picture.prepare(); print(picture._process.pid, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", supervisor, str(tmp_path)], capture_output=True, timeout=60)
    descriptor = -1
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(int(ended.stdout))
    if descriptor >= 0:
        assert select.select([descriptor], [], [], 60)[0], "the picture's process has not ended"
        os.close(descriptor)
    assert not (tmp_path / rundir.CURVE).exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (119, "119 s"), (120, "2 min"), (7300, "2.03 h"), (200_000, "2.31 d")]
)
def test_duration(seconds: float, text: str) -> None:
    assert picture.duration(seconds) == text
