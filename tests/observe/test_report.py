"""A run's report: the summary's contents, no secret among them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.observe import report
from rolecall.record import rundir
from rolecall.record.history import Goal, History, Point, Row, Stall, Start
from tests.record import histories


def trained(job: str = "rl", **values: str) -> tuple[History, dict[str, Any]]:
    """Two generations of a hundred steps, and their summary."""
    rows: list[Row] = [Start(3, 0), *([Goal(475.0)] if job == "rl" else [])]
    for step in range(1, 101):
        rows += [Point("score", step, 300 * math.sin(step / 50), step), Point("done", step, 64.0 * step, step)]
    rows += [histories.ended("killed"), Start(4, 90, 100.0, "killed"), Point("score", 100, 250.0, 110.0)]
    run = History([*rows, Point("loss", 100, 0.5, 110.0), Point("done", 100, 6400.0, 110.0)])
    _, settings = registry.load(job, **values)
    members, result = [("agent", 0), ("observer", 0), ("observer", 3)], {"solved": True, "accuracy": float("nan")}
    end = run.began + 3600
    summary = report.summary(describe.describe(job), variables(settings), run, "finished", "", members, result, end)
    return run, summary


def variables(settings: Settings) -> dict[str, Any]:
    """The settings of a run, of which a supervisor has those that all jobs share, and those of the job as JSON."""
    shared = Settings(**{name: getattr(settings, name) for name in Settings.model_fields})
    return report.settings_of(shared, settings.model_dump(mode="json", exclude=set(Settings.model_fields)))


def short(run: History, state: str, reason: str = "") -> dict[str, Any]:
    """The summary of a run of `ps` that has no members and no result."""
    _, settings = registry.load("ps")
    return report.summary(describe.describe("ps"), variables(settings), run, state, reason, [], {}, 1.0)


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


def test_summary_counts_joins_and_stays() -> None:
    run = histories.journal()
    run.happened("stayed", 2, count=2)
    run.happened("joined", 2, reason="trainer_1-3", count=3)
    run.happened("lost", 2, "replaced", "ps_0 wants another worker of trainer_1")
    run.record([Stall("joined", 0.5), Stall("joined", 0.25)])
    run.stalled("ended", 2.0)
    summary = short(run.history, "finished")
    assert (summary["ranks_joined"], summary["workers_stayed"], summary["ranks_lost"]) == (3, 2, {"replaced": 1})
    assert summary["stalled_seconds"] == {"joined": 0.75, "ended": 2.0}


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
    summary = short(History(), "failed", "ps_0: broken")
    assert (summary["steps"], summary["started"], summary["reason"]) == (0, None, "ps_0: broken")
    assert summary["curve"]["best"] is summary["throughput"]["per_second"] is None
