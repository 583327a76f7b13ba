"""A run's report: the summary's contents, no secret among them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.observe import report
from rolecall.record import history, rundir
from rolecall.record.history import History, Record


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


def test_summary_counts_joins_and_stays() -> None:
    run = History()
    run.keep_workers(2, 2)
    run.add_ranks(3, 2, "trainer_1-3")
    run.lose_rank("replaced", 2, "ps_0 wants another worker of trainer_1")
    run.record([Record("joined", 7, 1.0, 0.5), Record("joined", 8, 2.0, 0.25)])
    run.stall("ended", 2.0)
    summary = short(run, "finished")
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
