"""The logic of `make bench-peers` and `make bench-rl-quality`; no peer is needed."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest

from bench import bench_peers, bench_rl_quality, split
from bench.peers import process, report, zoo
from bench.peers.process import Run, Snapshot
from bench.peers.store import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_JSON", raising=False)


def solved(seconds: float, steps: int, wall: float | None = 10.0, score: float = 500.0) -> Run:
    return Run(2 * steps, 2 * seconds, 1.0, wall, [score], [Snapshot(1, 0.1, 9.0), Snapshot(steps, seconds, score)])


# ---- what programs print


def test_the_lines_of_a_program_make_a_run() -> None:
    run = Run()
    for event in (
        {"event": "begin", "at": 103.0},
        {"event": "snapshot", "steps": 50, "seconds": 2.0, "scores": [1.0, 3.0]},
        {"event": "end", "steps": 90, "seconds": 4.0, "paused": 1.5, "scores": [5.0], "updates": 60},
        {"event": "gone", "at": 110.0},
    ):
        run = process.add(run, event, 100.0)
    assert run == Run(90, 4.0, 3.0, 8.5, [5.0], [Snapshot(50, 2.0, 2.0)], updates=60)
    assert (run.steps_per_s, run.updates_per_s) == (22.5, 15.0)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_the_first_policy_at_the_threshold_counts() -> None:
    run = Run(snapshots=[Snapshot(1, 1.0, 474.9), Snapshot(2, 2.0, 475.0), Snapshot(3, 3.0, 500.0)])
    assert run.reached(475.0) == Snapshot(2, 2.0, 475.0)
    assert run.reached(501.0) is None


def program(*statements: str) -> list[str]:
    return [sys.executable, "-c", "; ".join(("import json, os, subprocess, sys, time", *statements))]


def test_a_program_that_fails_says_why() -> None:
    with (
        process.lines(program("sys.exit('no such environment')"), 30.0, {}) as events,
        pytest.raises(RuntimeError, match="exit code 1:\nno such environment"),
    ):
        list(events)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"
PIDS = "print(json.dumps({'pids': [os.getpid(), child.pid]}), flush=True)"


@pytest.mark.parametrize("hides", ["start_new_session=True", "env={}"])
def test_a_program_is_ended_with_all_that_it_started(hides: str) -> None:
    child = f"child = subprocess.Popen({SLEEPER}, {hides})"
    with process.lines(program(child, PIDS, "time.sleep(600)"), 60.0, {}) as events:
        pids = next(events)["pids"]
    assert all(gone(pid) for pid in pids)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "REPOSITORY", tmp_path)
    assert process.missing("sb3") == "sb3 is not installed (build/peers/sb3): make peers"
    group = tmp_path / "build" / "peers" / "sb3"
    group.mkdir(parents=True)
    assert process.missing("sb3") == "sb3 could not be installed (build/peers/sb3): make peers"
    (group / ".ready").touch()
    assert process.missing("sb3") is None


# ---- the peers' side of it


def options(**values: Any) -> report.Options:
    given = {
        "environment": "e",
        "seed": 1,
        "steps": 9,
        "seconds": 60.0,
        "threshold": 10.0,
        "every": 0.0,
        "episodes": 2,
        "memory": False,
        "sampled": False,
    }
    return report.Options(**{**given, **values})


def test_a_training_ends_at_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    scores = [[1.0, 2.0], [9.0, 12.0]]
    lines = report.Report(options(), lambda episodes: scores.pop(0)[:episodes])
    lines.begin()
    assert not lines.look(100)
    assert lines.look(200)
    lines.end(200)  # of a policy that was evaluated: not again
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["event"], event.get("steps"), event.get("scores")) for event in events] == [
        ("begin", None, None),
        ("snapshot", 100, [1.0, 2.0]),
        ("snapshot", 200, [9.0, 12.0]),
        ("end", 200, [9.0, 12.0]),
    ]


def test_evaluations_take_no_seconds_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def evaluate(episodes: int) -> list[float]:
        now[0] += 50.0
        return [0.0] * episodes

    lines = report.Report(options(), evaluate)
    lines.begin()
    now[0] += 4.0
    assert not lines.look(1)
    assert (lines.seconds, lines.paused) == (4.0, 50.0)
    now[0] += 56.0
    assert lines.look(2)  # the seconds are over


def test_the_masked_environment_hides_the_velocities() -> None:
    masked, whole = gymnasium.make(zoo.MASKED), gymnasium.make("CartPole-v1")
    shown, everything = masked.reset(seed=3)[0], whole.reset(seed=3)[0]
    assert list(shown) == [everything[0], everything[2]]
    assert masked.observation_space.contains(shown)
    assert (masked.spec.reward_threshold, masked.spec.max_episode_steps) == (475.0, 500)  # type: ignore[union-attr]


def test_every_row_has_published_settings() -> None:
    for row in split.ROWS.values():
        assert row.environment in zoo.tables(row.memory)[row.algorithm]
    for task in bench_peers.TASKS.values():
        assert task.names.get("sb3", task.environment) in zoo.tables()[task.algorithm]


# ---- the split


def test_no_environment_is_both_tuned_on_and_held_out() -> None:
    tuned, held_out = ({row.environment for row in part.values()} for part in (split.TUNED, split.HELD_OUT))
    assert not tuned & held_out
    assert len(held_out) >= 8
    for row in split.HELD_OUT.values():
        assert (row.random is not None) == (row.algorithm == "ppo")
        assert row.documented is None


def test_the_split_and_what_results_are_compared_with_are_documented() -> None:
    documented = (ROOT / "docs" / "rl.md").read_text()
    for name, row in split.HELD_OUT.items():
        assert name in documented or row.algorithm != "ppo"
    for row in split.TUNED.values():
        if row.documented:
            mean, error = row.documented
            assert (f"| {mean:,.1f} ± {error:,.1f} |" if error else f"| {mean:,.1f} |") in documented


# ---- what is kept


def test_a_rerun_measures_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_JSON", str(tmp_path / "results.json"))
    store = Store.open("peers")
    store.fail("b", TimeoutError("late"))
    store.keep("a", solved(1.0, 10))
    again = Store.open("peers")
    assert again.runs == {"a": solved(1.0, 10)}
    assert again.failures == {}  # to be tried again
    with pytest.raises(RuntimeError, match="holds no results of rl-quality"):
        Store.open("rl-quality")


def test_the_documented_returns_of_sb3_are_those_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_JSON", str(ROOT / "bench" / "peers" / "sb3_returns.json"))
    measured = bench_rl_quality.Measured(bench_rl_quality.choose(arguments(), quick=False), Store.open("rl-quality"))
    documented, kept = (ROOT / "docs" / "rl.md").read_text(), 0
    for name, row in measured.options.rows.items():
        if (scores := measured.scores("sb3", name)).values:
            kept += len(scores.values)
            assert f"| {row.steps:,} | {scores} ({len(scores.values)}) | {scores.worst:,.1f} |" in documented, name
    assert kept == len(measured.store.runs)


def test_a_run_that_ended_early_is_no_result() -> None:
    row = split.ROWS["CartPole-v1"]
    with pytest.raises(RuntimeError, match="ended after 99,999 of 100,000 steps"):
        bench_rl_quality.whole(Run(row.steps - 1), row)
    assert bench_rl_quality.whole(Run(row.steps), row).steps == row.steps


# ---- the bars


def peers(runs: dict[str, list[Run]], task: str) -> bench_peers.Measured:
    store = Store("peers")
    for who, each in runs.items():
        for seed, run in enumerate(each, 1):
            store.keep(f"{who}/{task}/{seed}", run)
    return bench_peers.Measured(store, [task], [1, 2, 3])


def test_the_median_seed_counts_and_one_that_fails_is_the_slowest() -> None:
    never = Run(100, 60.0, 1.0, None, [], [Snapshot(100, 60.0, 20.0)])
    measured = peers({"sb3": [solved(8.0, 1000), never, solved(4.0, 500)], "rllib": [never] * 3}, "CartPole-v1")
    assert measured.seconds("CartPole-v1", "sb3") == 8.0
    assert measured.steps("CartPole-v1", "sb3") == 1000
    assert measured.seconds("CartPole-v1", "rllib") == math.inf
    assert math.isnan(measured.seconds("CartPole-v1", "appo"))  # not measured


def test_the_better_way_of_inference_is_compared_with_the_fastest_peer() -> None:
    runs = {
        "observer": [solved(2.0, 2900, wall=5.0)],
        "agent": [solved(5.0, 4000, wall=9.0)],
        "sb3": [solved(6.0, 1000, wall=6.0)],
        "appo": [solved(3.9, 9000)],
    }
    met = {what: met for what, _, _, met in peers(runs, "CartPole-v1").bars()}
    expected = {"to the threshold": False, "its steps": True, "to the prompt": True}  # 3.9 / 2 s, 3 x 1000, 6 s
    assert met == {f"CartPole-v1: {what}": passed for what, passed in expected.items()}
    runs["appo"] = [solved(4.0, 9000)]
    assert all(met for *_, met in peers(runs, "CartPole-v1").bars())


def test_rates_are_compared() -> None:
    for factor, passes in ((2.0, True), (1.9, False)):
        runs = {"observer": [Run(round(factor * 1000), 10.0)], "agent": [Run(1, 10.0)], "sb3": [Run(1000, 10.0)]}
        assert [met for *_, met in peers(runs, "HalfCheetah-v5").bars()] == [passes]


@pytest.mark.parametrize("task", ["HalfCheetah-v5-sac", "CartPole-v1-dqn"])
def test_updates_of_off_policy_algorithms_are_compared(task: str) -> None:
    for our, passes in ((1500, True), (1499, False)):
        runs = {"observer": [Run(9000, 10.0, updates=our)], "sb3": [Run(1, 10.0, updates=1000)]}
        measured = peers(runs, task)
        assert [(what, met) for what, *_, met in measured.bars()] == [(f"{task}: updates/s", passes)]
        assert measured.to_json()["table"][task]["sb3"]["updates_per_s"] == 100.0


def test_what_is_not_measured_is_no_pass() -> None:
    assert [met for *_, met in peers({"sb3": [solved(3.0, 100)]}, "CartPole-v1").bars()] == [False] * 3
    assert peers({"observer": [solved(3.0, 100)]}, "CartPole-v1").bars() == []  # nothing to compare with


Pairs = dict[str, tuple[list[float], list[float]]]  # both sides' scores of each row


def qualities(pairs: Pairs) -> dict[str, bool]:
    chosen = bench_rl_quality.Options({name: split.ROWS[name] for name in pairs}, [1, 2, 3, 4])
    measured = bench_rl_quality.Measured(chosen, Store("rl-quality"))
    for name, sides in pairs.items():
        for side, scores in zip(("sb3", "rolecall"), sides, strict=True):
            for seed, score in enumerate(scores, 1):
                measured.store.keep(chosen.key(side, name, seed), Run(scores=[score]))
    assert json.dumps(measured.to_json())
    assert bench_rl_quality.tables(measured)
    return {what: met for what, *_, met in measured.bars()}


def quality(theirs: list[float], our: list[float], name: str = "Taxi-v4") -> list[bool]:
    return list(qualities({name: (theirs, our)}).values())


def test_a_standard_error_below_the_mean_still_passes() -> None:
    theirs = [100.0, 110.0, 120.0, 130.0]  # 115, its error 6.45
    assert quality(theirs, [108.6] * 4) == [True, True]
    assert quality(theirs, [108.4] * 4) == [False, True]
    assert quality(theirs, [99.0, 130.0, 130.0, 130.0]) == [True, False]


def test_without_velocities_it_takes_a_memory() -> None:
    assert quality([500.0] * 4, [500.0, 470.0] * 2, "masked-memory") == [False, False, False, True]
    assert quality([40.0] * 4, [480.0] * 4, "masked") == [True, True, False]
    assert quality([40.0] * 4, [50.0, 60.0] * 2, "masked") == [True, True, True]


def test_a_documented_result_may_fall_by_the_standard_error_of_the_difference() -> None:
    mean, error = split.ROWS["Walker2d-v5"].documented or (0.0, 0.0)
    for fallen, passes in ((error - 1, True), (error + 1, False)):
        assert quality([0.0] * 4, [mean - fallen] * 4, "Walker2d-v5") == [True, True, passes]
    spread = [mean - error - 500, mean - error + 400] * 2  # with an error of its own
    assert quality([0.0] * 4, spread, "Walker2d-v5") == [True, True, True]


def test_a_held_out_environment_is_gained_as_much_above_random_actions() -> None:
    assert quality([-100.0] * 4, [-119.0] * 4, "MountainCar-v0") == [True]  # 81 of 100 above -200
    assert quality([-100.0] * 4, [-121.0] * 4, "MountainCar-v0") == [False]
    assert quality([-200.0] * 4, [-200.0] * 4, "MountainCar-v0") == [True]  # nothing was gained
    assert quality([0.0] * 4, [0.01] * 4, "MiniGrid-KeyCorridorS3R1-v0") == [True]  # they are below random actions
    assert quality([0.0] * 4, [-0.01] * 4, "MiniGrid-KeyCorridorS3R1-v0") == [False]


def test_six_of_the_held_out_environments_are_within_a_standard_error() -> None:
    names = [name for name, row in split.HELD_OUT.items() if row.algorithm == "ppo"]
    for good, passes in ((6, True), (5, False)):
        pairs: Pairs = {name: ([100.0] * 4, [100.0 if at < good else 99.9] * 4) for at, name in enumerate(names)}
        assert qualities(pairs)["held out: within"] == passes
        assert "held out: within" not in qualities({name: pairs[name] for name in names[:7]})
    absent: Pairs = {name: ([100.0] * 4, []) for name in names}
    assert not any(qualities(absent).values())


@pytest.mark.parametrize("name", ["HalfCheetah-v5-sac", "MountainCar-v0-dqn"])
def test_off_policy_algorithms_are_compared_by_their_means(name: str) -> None:
    theirs = [100.0, 110.0, 120.0, 130.0]
    assert quality(theirs, [90.0, 120.0, 120.0, 120.0], name) == [True]
    assert quality(theirs, [108.4] * 4, name) == [False]


def arguments(**values: Any) -> argparse.Namespace:
    given = {
        "environments": None,
        "sides": ["sb3", "rolecall"],
        "seeds": None,
        "steps": None,
        "parallel": 1,
        "set": [],
        "rounds": 10,
    }
    return argparse.Namespace(**{**given, **values})


def test_settings_are_tried_on_tuned_environments_alone() -> None:
    tuned = bench_rl_quality.choose(arguments(environments="tuned", set=["LR=1"]), quick=False)
    assert tuned.rows == split.TUNED
    for names in (None, "held-out", "Ant-v5,Swimmer-v5"):
        with pytest.raises(ValueError, match=r"--set: .* is held out, .* --environments tuned"):
            bench_rl_quality.choose(arguments(environments=names, set=["LR=1"]), quick=False)
    theirs = bench_rl_quality.choose(arguments(environments="held-out", sides=["sb3"], set=["LR=1"]), quick=False)
    assert theirs.rows == split.HELD_OUT
