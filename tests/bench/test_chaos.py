"""The soak tool's pure parts: its plan, its statistics, and what it reads from a recording."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.declare import registry
from tests.chaos import jobs, series
from tests.chaos.hurt import Strike
from tests.chaos.measure import Recording, measure
from tests.chaos.plan import DECK, KINDS, Event, Shape, plan
from tests.chaos.series import Sample, Step

SHAPE = Shape(("agent-0", "observer-0", "observer-1", "observer-2"), "observer", 2, 4)
FIXED = Shape(("ps-0", "trainer-0", "trainer-1"))
DECK_SIZE = sum(count for *_, count in DECK)


# ---- the plan


def test_same_seed_gives_the_same_events() -> None:
    assert plan(7, 50, 2.0, SHAPE) == plan(7, 50, 2.0, SHAPE)
    assert plan(7, 50, 2.0, SHAPE) != plan(8, 50, 2.0, SHAPE)
    assert plan(7, 20, 2.0, SHAPE) == plan(7, 50, 2.0, SHAPE)[:20]


@pytest.mark.parametrize("seed", range(5))
def test_a_deck_covers_every_kind_and_rank_0(seed: int) -> None:
    events = plan(seed, DECK_SIZE, 2.0, SHAPE)
    # a join that finds no place is a leave, and the other way round
    assert {event.kind for event in events} | {"join", "leave"} == set(KINDS)
    for kind, target, _ in DECK:
        if target == "first":
            assert any(event.kind == kind and event.ranks == ("agent-0",) for event in events)


@pytest.mark.parametrize("seed", range(20))
def test_events_hurt_ranks_that_are_there(seed: int) -> None:
    present = set(SHAPE.ranks)
    for event in plan(seed, 100, 2.0, SHAPE):
        if event.kind == "join":
            assert not present & set(event.ranks)
            present |= set(event.ranks)
        else:
            assert present >= set(event.ranks)
        if event.kind == "leave":
            present -= set(event.ranks)
        if event.kind == "kill all":
            assert present == set(event.ranks)
        assert len(set(event.ranks)) == (len(present) if event.kind == "kill all" else 1 + (event.kind == "kill two"))
        assert SHAPE.least <= len(present) - 1 <= SHAPE.most


def test_no_cuts_without_a_network_and_no_joins_in_a_fixed_job() -> None:
    assert not [event for event in plan(1, 100, 2.0, SHAPE, cuts=False) if event.kind == "cut"]
    assert not [event for event in plan(1, 100, 2.0, FIXED) if event.kind in ("join", "leave")]
    assert all(event.kind.startswith("kill") for event in plan(1, 100, 2.0, SHAPE, only="kill"))


# ---- steps from samples


def samples(*changes: tuple[float, int, int | None]) -> list[Sample]:
    return [Sample(*change) for change in changes]


def test_a_gauge_that_outlives_its_worker_is_no_step() -> None:
    # generation 1 made step 12; the worker of generation 2 resumes from 10
    found = series.made(samples((0, 1, 11), (1, 1, 12), (2, 0, 12), (3, 2, 12), (4, 2, 11), (5, 2, 12)))
    assert found == [Step(0, 1, 11), Step(1, 1, 12), Step(4, 2, 11), Step(5, 2, 12)]


def test_a_new_supervisor_has_no_gauge_until_the_first_step() -> None:
    # the first step may have the same number as the last one that was seen
    found = series.made(samples((0, 1, 11), (1, 0, None), (2, 2, None), (3, 2, 0), (4, 2, 11)))
    assert found == [Step(0, 1, 11), Step(4, 2, 11)]


def test_a_first_step_with_the_number_of_the_last_one() -> None:
    # generation 1 made step 12 and left a checkpoint of 11
    seen = [
        Sample(0, 1, 12),
        Sample(1, 0, 12),
        Sample(2, 2, 12),
        Sample(3, 2, 12, recoveries=1),
        Sample(4, 2, 13, 0, 1),
    ]
    assert series.made(seen) == [Step(0, 1, 12), Step(3, 2, 12), Step(4, 2, 13)]
    # the recovery of a step that was seen already is no other step
    seen = [Sample(0, 1, 12), Sample(2, 2, 12), Sample(3, 2, 11), Sample(3.1, 2, 11, recoveries=1)]
    assert series.made(seen) == [Step(0, 1, 12), Step(3, 2, 11)]


def test_the_step_that_training_goes_on_with() -> None:
    # the event at 1.5; step 13 was made before it and seen after
    steps = [Step(1, 1, 12), Step(1.6, 1, 13), Step(4, 2, 12)]
    assert series.next_step(steps, 1.5) == Step(1.6, 1, 13)
    assert series.next_step(steps, 1.5, beyond=1) == Step(4, 2, 12)
    assert series.next_step(steps, 4.0) is None


def test_pauses() -> None:
    steps = [Step(0, 1, 1), Step(5, 1, 2), Step(6, 1, 3), Step(8, 2, 4), Step(8.5, 2, 5)]
    assert series.longest_pause(steps, 5, 10) == 1  # of one generation
    assert series.longest_pause(steps, 4, 10) == 5  # it was going on
    assert series.longest_pause(steps, 9, 10) is None


def test_steps_lost() -> None:
    steps = [Step(0, 1, 9), Step(1, 1, 10), Step(2, 2, 9), Step(3, 3, 8), Step(4, 4, 9)]
    # 10 was resumed from 8, 9 from 7, and 8 from 8
    assert series.lost(steps) == 2 + 2 + 0
    assert series.lost(steps, 2, 4) == 2
    assert series.lost([]) == 0


# ---- statistics


def test_summary() -> None:
    found = series.summary([None, *range(1, 101)])
    assert (found.count, found.median, found.p95, found.worst) == (100, 50.5, 95, 100)
    assert series.summary([3.0]) == series.Summary(1, 3.0, 3.0, 3.0)
    assert series.summary([]).count == 0
    assert math.isnan(series.summary([None]).median)


# ---- an event's numbers

RANK_0_KILLED = Recording(
    samples((0.0, 1, 9), (0.5, 1, 10), (1.1, 1, 11), (1.2, 0, None), (5.0, 2, None), (5.5, 2, 10), (5.7, 2, 11)),
    {"agent-0": [0.0, 1.5], "observer-0": [0.0]},
)
KILLED = Strike(Event(1, "kill rank", ("agent-0",), 1.0), 1.0, 1.0, settled=7.0, whole=6.0)


def test_a_killed_rank_0_ends_the_generation() -> None:
    found = measure(KILLED, RANK_0_KILLED, SHAPE)
    assert (found.target, found.ended, found.lost) == ("rank 0", True, 2)
    assert (found.next_step, found.after_start, found.whole) == (4.5, 4.0, 5.0)


def test_taking_a_killed_elastic_rank_in_again_is_a_drain() -> None:
    strike = replace(KILLED, event=Event(1, "kill worker", ("observer-0",), 1.0))
    going_on = samples((0.5, 1, 10), (1.2, 1, 11), (1.5, 1, 12), (3.0, 0, 12), (4.0, 2, 13))
    found = measure(strike, Recording(going_on, {"observer-0": [0.0]}, drains=[3.0]), SHAPE)
    assert (found.target, found.ended, found.generations, found.lost) == ("elastic", False, 1, 0)
    assert found.next_step == pytest.approx(0.2)
    assert found.pause == pytest.approx(0.7)
    assert found.after_start is None


@pytest.mark.parametrize(
    ("kind", "noticed"), [("stop worker", 2.0), ("stop supervisor", 6.0), ("stop rank", 6.0), ("cut", 6.0)]
)
def test_a_silent_rank_is_noticed(kind: str, noticed: float) -> None:
    strike = replace(KILLED, event=Event(1, kind, ("observer-0",), 1.0, 8.0), over=9.0, settled=12.0)
    notices = [(0.5, "agent-0 earlier"), (3.0, "observer-0 of itself"), (7.0, "agent-0 of the other")]
    found = measure(strike, Recording(samples((0.5, 1, 10), (1.5, 1, 11)), {"observer-0": [0.0]}, notices), SHAPE)
    assert found.must_notice
    assert found.noticed == noticed


def test_a_silence_within_the_lease_need_not_be_noticed() -> None:
    strike = replace(KILLED, event=Event(1, "stop rank", ("observer-0",), 1.0, 5.0))
    assert not measure(strike, RANK_0_KILLED, SHAPE).must_notice


def test_a_slow_disk_costs_no_lease() -> None:
    event = Event(1, "slow disk", ("agent-0",), 1.0, 4.0)
    strike = replace(KILLED, event=event, over=5.0)
    notices = [
        (0.5, 'agent-0 gang_restarts_total cause="silent"'),
        (1.5, 'agent-0 worker_restarts_total cause="killed"'),
        (2.0, 'agent-0 gang_restarts_total cause="silent"'),
        (3.0, "observer-0 gang_unreachable_total"),
        (6.0, "observer-0 gang_unreachable_total"),
    ]
    recording = replace(RANK_0_KILLED, notices=notices)
    assert measure(strike, recording, SHAPE).leases_lost == 2
    assert measure(replace(strike, event=replace(event, kind="kill worker")), recording, SHAPE).leases_lost == 0


@pytest.mark.parametrize(
    ("ledger", "summary", "wrong"),
    [
        ({}, {}, ""),
        ({}, {"samples": 69}, "samples 69, not 70"),
        ({"version": 8}, {"epochs": 4}, "epochs 4, not 7, updates 9, not 8"),
        ({"used": torch.tensor([0, 4], dtype=torch.uint8)}, {}, "samples are used of the epochs after the last, 7"),
    ],
)
def test_inexact_sums_of_samples_are_reported(ledger: dict[str, Any], summary: dict[str, Any], wrong: str) -> None:
    none = torch.zeros(2, dtype=torch.uint8)
    ledger = {"epoch": 7, "version": 9, "samples": 10, "used": none, "following": none, **ledger}
    assert jobs.counted(ledger, {"epochs": 7, "updates": 9, "samples": 70, **summary}) == wrong


def test_the_finish_of_rl_keeps_what_its_checkpoints_depend_on() -> None:
    soak, defaults = jobs.SOAKS["rl"], registry.get("rl").settings.model_fields
    finishing = soak.finishing(Path())
    for name in registry.get("rl").pinned:
        given = [settings.get(name.upper(), defaults[name].default) for settings in (soak.hurting, finishing)]
        assert given[0] == given[1], name
