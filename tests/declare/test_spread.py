"""How a score spreads: from what a job logs, through the run's history, and the band of its curve."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolecall import Context
from rolecall.jobs.rl.messages import Episode
from rolecall.jobs.rl.score import MEAN_EPISODES, Score
from rolecall.record import history
from rolecall.record.history import History, Point, Row, Start
from tests.context.contexts import Supervisor
from tests.record.histories import journal

NAMES = ("score", "score_low", "score_high")


def scored(step: int, at: float, value: float, low: float, high: float, late: float = 0.0) -> list[Row]:
    """What a worker sends of a score and its spread; `late`, as where another process computes meanwhile."""
    return [
        Point("score", step, value, at),
        Point("score_low", step, low, at + 1e-5 + late),
        Point("score_high", step, high, at + 2e-5 + late),
    ]


def band(run: History) -> list[tuple[int, float, float]]:
    return [(low.step, low.value, high.value) for low, high in run.spread()]


# ---- what is logged


def test_a_spread_is_recorded_after_its_score(context: Context[Any], supervisor: Supervisor) -> None:
    context.start(0)
    supervisor.records.clear()
    context.log(1, done=8, score=0.25, spread=(torch.tensor(0.125), 0.5))
    context.log(2, done=9, score=0.5)
    context.log(3, done=10, spread=(1.0, 2.0))  # without a score there is nothing to spread
    assert supervisor.records == [
        ("score", 1, 0.25),
        ("score_low", 1, 0.125),
        ("score_high", 1, 0.5),
        ("done", 1, 8),
        ("score", 2, 0.5),
        ("done", 2, 9),
        ("done", 3, 10),
    ]
    assert all(type(value) is float for _, _, value in supervisor.records[:3])


# ---- what is kept


def test_it_is_kept_where_its_score_is(tmp_path: Path) -> None:
    run = journal(tmp_path)
    run.record([Start(1, 0)])
    for step in range(1, 20_001):
        run.record(scored(step, step / 10, float(step), step - 1.0, step + 1.0, late=0.04 * (step % 3)))
    run.finish()
    asyncio.run(run.save())
    rows, _ = history.read_rows(run.path)
    written = {name: [row.step for row in rows if isinstance(row, Point) and row.name == name] for name in NAMES}
    assert written["score"] == written["score_low"] == written["score_high"]
    assert len(written["score"]) < 19_000
    for read in (run.history, History(rows)):
        steps = [point.step for point in read.curves["score"]]
        assert len(steps) < 4000
        assert band(read) == [(step, step - 1.0, step + 1.0) for step in steps]


def test_a_resume_cuts_it_too() -> None:
    run = journal()
    run.record([Start(1, 0), *scored(1, 1.0, 5.0, 4.0, 6.0), *scored(2, 2.0, 6.0, 5.0, 7.0)])
    run.record([Start(2, 1), *scored(2, 1.0, 8.0, 7.0, 9.0)])
    assert band(run.history) == [(1, 4.0, 6.0), (2, 7.0, 9.0)]


def test_a_bound_that_is_no_number_leaves_its_step_out(context: Context[Any], supervisor: Supervisor) -> None:
    context.start(0)
    supervisor.records.clear()
    context.log(1, score=5.0, spread=(math.nan, 6.0), temperature=math.inf)
    assert supervisor.records == [("score", 1, 5.0), ("score_high", 1, 6.0)]


# ---- over the observers of `rl`


def test_it_is_that_of_the_observers_mean_returns_in_the_scores_own_episodes() -> None:
    score = Score(None, "episodes")
    random = np.random.default_rng(0)
    for _ in range(30):
        observers = [
            [Episode(float(random.normal(10 * number)), 1) for _ in range(random.integers(0, 9))] for number in range(3)
        ]
        score.add(observers)
        assert len(score.observers) == len(score.returns) == len(score.lengths)
        spread, mean = score.spread, score.mean
        assert spread is not None
        assert mean is not None
        assert spread[0] <= mean <= spread[1]
    assert spread == pytest.approx((0.0, 20.0), abs=1.0)


def test_every_observer_is_among_the_last_episodes() -> None:
    """Also where one observer has more than those by itself, and another few."""
    score = Score(None, "episodes")
    score.add(
        [
            [Episode(float(number), 1)] * count
            for number, count in ((1, 3 * MEAN_EPISODES), (2, 3 * MEAN_EPISODES), (3, 6))
        ]
    )
    assert score.spread == (1.0, 3.0)
    counts = [list(score.returns).count(float(number)) for number in (1, 2, 3)]
    assert counts == [49, 50, 1]
    assert score.returns[-1] == 3.0


def test_it_continues_from_its_state() -> None:
    score, resumed = Score(None, "episodes"), Score(None, "episodes")
    score.add([[Episode(1.0, 1)], [Episode(5.0, 1)]])
    resumed.load_state_dict(score.state_dict())
    for one in (score, resumed):
        one.add([[Episode(2.0, 1)]])
        assert one.spread == (1.5, 5.0)
