"""What a run leaves: the summary's contents, no secret among them, and a picture that shows something."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.job import registry
from rolecall.run import history, picture, report, rundir
from rolecall.run.history import History

PNG = b"\x89PNG\r\n\x1a\n"


def trained(job: str = "rl", **own: str) -> tuple[History, dict[str, Any]]:
    """Two generations of a hundred steps, and their summary."""
    run = History()
    notes: list[history.Note] = [("start", 0, 0.0, 3), ("train", 0, 1.0, 0)]
    if job == "rl":
        notes.append(("goal", 0, 1.0, 475.0))
    for step in range(1, 101):
        notes += [("score", step, 1.0 + step, 300 * math.sin(step / 50)), ("done", step, 1.0 + step, 64.0 * step)]
    run.note(notes)
    run.ended("killed")
    run.note([("start", 90, 200.0, 4), ("train", 90, 201.0, 0), ("score", 100, 211.0, 250.0)])
    run.note([("loss", 100, 211.0, 0.5), ("done", 100, 211.0, 6400.0)])
    loaded, settings = registry.load(job, **own)
    found = report.summary(
        job, settings, loaded.watch, run, "finished", "", [("agent", 0), ("observer", 0), ("observer", 3)],
        {"solved": True, "accuracy": float("nan")}, run.began + 3600,
    )  # fmt: skip
    return run, found


def test_the_summary_tells_what_became_of_the_run() -> None:
    run, found = trained()
    assert (found["job"], found["state"], found["steps"]) == ("rl", "finished", 100)
    assert found["training_seconds"] == run.seconds == 110.0
    assert (found["generations"], found["restarts"], found["ranks_lost"]) == (2, {"killed": 1}, {})
    assert found["world"] == {"agent": 1, "observer": 2}
    assert found["curve"]["label"] == "return"
    assert found["curve"]["final"] == 250.0
    assert found["curve"]["best"] == {"value": pytest.approx(300 * math.sin(79 / 50)), "step": 79}
    assert found["curve"]["goal"] == 475.0
    assert found["throughput"] == {"unit": "steps", "total": 6400.0, "per_second": pytest.approx(64.0)}
    assert found["result"] == {"solved": True, "accuracy": None}
    assert found["settings"]["ENV_ID"] == "CartPole-v1"
    assert found["torch"].startswith("2.")
    assert found["started"] < found["ended"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_best_perplexity_is_the_lowest() -> None:
    _, found = trained("rnn")
    assert found["curve"]["best"]["step"] == 1
    assert found["curve"]["goal"] is None


@pytest.mark.parametrize("by_file", [False, True])
def test_no_secret_is_in_it(tmp_path: Path, by_file: bool) -> None:
    (tmp_path / "token").write_text("sesame-of-ours\n")
    own = {"job_token_file": str(tmp_path / "token")} if by_file else {"job_token": "sesame-of-ours"}
    _, found = trained(**own)
    report.write(tmp_path, found)
    text = (tmp_path / rundir.SUMMARY).read_text()
    assert "sesame" not in text
    assert "JOB_TOKEN" not in text
    assert json.loads(text) == found


def test_a_run_that_has_not_come_far_has_a_summary_too() -> None:
    _, settings = registry.load("ps")
    watched = registry.get("ps").watch
    found = report.summary("ps", settings, watched, History(), "failed", "ps 0: broken", [], {}, 1.0)
    assert (found["steps"], found["started"], found["reason"]) == (0, None, "ps 0: broken")
    assert found["curve"]["best"] is found["throughput"]["per_second"] is None
    assert picture.title(found) == "ps, failed: after 0 steps in 0 s"


# ---- the picture


def left(directory: Path, run: History, found: dict[str, Any]) -> Path:
    report.write(directory, found)
    (directory / rundir.HISTORY).write_text("".join(json.dumps(row) + "\n" for row in run.rows()))
    return directory


def test_the_picture_shows_the_curve(tmp_path: Path) -> None:
    """It is drawn by a process of its own; what is looked at here are its size and colours."""
    from PIL import Image

    assert asyncio.run(report.draw(left(tmp_path, *trained()))) == ""
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
    run, found = trained(job)
    figure = picture.draw(run, found)
    above, below = figure.axes[:2]
    assert figure.get_suptitle() == f"{job}, finished: {found['curve']['label']} 250 after 100 steps in 110 s"
    drawn = {line.get_label(): line for line in above.get_lines()}
    label = found["curve"]["label"]
    assert list(drawn[label].get_xdata()) == [*range(1, 91), 100]
    assert ("goal 475" in drawn) == (job == "rl")
    assert [90, 90] in [list(line.get_xdata()) for line in above.get_lines()]  # the second generation's start
    assert below.get_ylabel() == f"{found['throughput']['unit']}/s"
    assert max(below.get_lines()[0].get_ydata()) == pytest.approx(64)


@pytest.mark.parametrize("points", [0, 1])
def test_next_to_nothing_can_be_drawn(tmp_path: Path, points: int) -> None:
    run = History()
    run.note([("start", 0, 0.0, 1), ("train", 0, 0.0, 0), *[("score", 1, 0.0, 3.0)] * points])
    _, settings = registry.load("ps")
    found = report.summary("ps", settings, registry.get("ps").watch, run, "stopped", "", [], {}, 1.0)
    assert picture.main([str(left(tmp_path, run, found))]) == 0
    assert (tmp_path / rundir.CURVE).read_bytes().startswith(PNG)


def test_what_keeps_it_from_being_drawn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path, *trained())
    (tmp_path / rundir.SUMMARY).unlink()
    assert rundir.SUMMARY in asyncio.run(report.draw(tmp_path))
    monkeypatch.setattr(report, "DRAWING", 0.01)
    assert asyncio.run(report.draw(tmp_path)) == "it took over 0.01 s"
    assert not (tmp_path / rundir.CURVE).exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (119, "119 s"), (120, "2 min"), (7300, "2.03 h"), (200_000, "2.31 d")]
)
def test_lasted(seconds: float, text: str) -> None:
    assert picture.lasted(seconds) == text
