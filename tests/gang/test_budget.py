"""Generations without progress: how many, how long, what is said of them, and what outlives rank 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.errors import FAILED
from rolecall.gang.budget import SAME_STEP, after_restart
from rolecall.gang.protocol import Budget, Effect, Outcome, Rules, Verdict
from rolecall.observe.memory import oom_kills, ran_out
from tests.gang.gangs import PS, FakeMember, Play, trains

FEW = Rules(max_restarts=5)
KILLED = "killed by SIGKILL; out of memory?"


def ends(play: Play, member: FakeMember, outcome: Outcome = "killed", error: str = KILLED) -> None:
    """Its worker ends, and the next generation starts, after its pause."""
    number = play.gang.number
    member.ends(outcome, error=error)
    play.tick()
    for _ in range(200):
        if play.gang.state == "failed" or play.gang.number > number:
            return
        play.wait(0.5)
        play.settle()
    raise AssertionError(play.gang.missing(play.now))


def test_a_worker_that_is_killed_at_the_same_step_again_and_again_fails_the_job() -> None:
    play, (ps, first, second) = trains(PS, FEW, step=312)
    for _ in range(5):
        assert play.gang.state == "running"
        ends(play, first)
    assert (play.gang.state, play.gang.code) == ("failed", FAILED)
    assert play.gang.reason == "worker of trainer 0 killed by SIGKILL 5 times at step 312; out of memory?"
    assert play.effects[-1] == Effect("failed", verdict=Verdict(play.gang.reason, FAILED))
    assert {member.directive.kind for member in (ps, first, second)} == {"failed"}
    assert ps.directive.final


@pytest.mark.parametrize("outcome", ["killed", "lost", "silent", "crashed", "stopped"])
def test_whatever_ends_them(outcome: Outcome) -> None:
    play, (_, first, _) = trains(PS, replace(FEW, max_failures=100))
    for _ in range(5):
        ends(play, first, outcome, "")
    assert play.gang.state == "failed"
    assert "5 times at step 1" in play.gang.reason


def test_a_program_that_kills_its_worker_at_the_same_step_is_certain_after_a_few() -> None:
    play, (ps, *_) = trains(PS, Rules(), step=40)
    ended = 0
    while play.gang.state == "running" and ended < Rules().max_restarts:
        ps.sends(step=40)
        ends(play, ps, "killed", KILLED)
        ended += 1
    assert play.gang.state == "failed"
    assert ended == SAME_STEP
    assert play.gang.code == FAILED
    assert play.gang.reason == f"worker of ps 0 killed by SIGKILL {SAME_STEP} times at step 40; out of memory?"


def test_so_is_one_that_does_so_at_the_first_step_after_a_checkpoint() -> None:
    play, (ps, *_) = trains(PS, Rules(), step=40)
    play.gang.resumed(40)
    for _ in range(SAME_STEP):
        assert play.gang.state == "running"
        ends(play, ps, "killed", KILLED)
        play.gang.resumed(40)  # the worker is killed before it sends a step
    assert play.gang.state == "failed"


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([40, 31, 38, 25], KILLED),  # from outside, at any step
        ([40], "killed by SIGKILL; out of memory"),  # counted by the kernel: another limit mends it
        ([0], KILLED),  # no step in these generations: nothing says that it is the same place
    ],
)
def test_kills_from_outside_and_for_lack_of_memory_are_not_called_that(steps: list[int], error: str) -> None:
    play, (ps, *_) = trains(PS, Rules(), step=40)
    for turn in range(2 * SAME_STEP):
        if step := steps[turn % len(steps)]:
            ps.sends(step=step)
        ends(play, ps, "killed", error)
    assert play.gang.state == "running"


def test_an_elastic_role_below_its_minimum() -> None:
    play, (agent, one, two) = trains(rules=FEW)
    for _ in range(5):
        agent.sends(state="running")
        two.ends("killed", error=KILLED)
        ends(play, one)
    assert play.gang.reason == "worker of observer 0 killed by SIGKILL 5 times at step 1; out of memory?"


def test_a_rank_that_is_restarted_again_and_again() -> None:
    play, (_, first, _) = trains(PS, FEW)
    for _ in range(5):
        play.leaves(first)
        first = play.join("trainer", 0)
        for _ in range(20):
            play.wait(0.5)
            play.settle()
    assert play.gang.reason == "trainer 0 was started again 5 times at step 1"


def test_deaths_with_a_new_step_in_between_never_add_up() -> None:
    play, (ps, first, _) = trains(PS, replace(FEW, max_restarts=2, progress_timeout=1.0))
    for step in range(2, 50):
        ends(play, first)
        ps.sends(step=step)
        play.tick()
    assert play.gang.state == "running"


def test_a_newer_checkpoint_is_progress_though_its_step_is_not_the_newest() -> None:
    play, (_, first, _) = trains(PS, FEW, step=100)
    for step in range(10, 30):
        ends(play, first)
        play.gang.resumed(step)
    assert play.gang.state == "running"
    for _ in range(5):
        play.gang.resumed(29)
        ends(play, first)
    assert play.gang.state == "failed"


def test_pauses_grow_between_generations_without_progress() -> None:
    play, (ps, first, _) = trains(PS, replace(FEW, max_restarts=12))
    pauses = []
    for _ in range(10):
        ended = play.now
        ends(play, first)
        pauses.append(play.now - ended)
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == FEW.longest_pause
    ps.sends(step=2)
    ended = play.now
    ends(play, first)
    assert play.now - ended == 0.5


def test_a_pause_longer_than_rejoin_timeout_is_no_wait_for_a_rank() -> None:
    play, (_, first, _) = trains(PS, replace(FEW, max_restarts=12, rejoin_timeout=5.0))
    for _ in range(10):
        ends(play, first)
    assert play.gang.state == "running"


def test_drains_without_progress_are_bounded_by_time_alone() -> None:
    play, (agent, _, _) = trains(rules=replace(FEW, max_restarts=1, progress_timeout=100.0))
    for _ in range(5):
        assert play.gang.state == "running"
        play.wait(25)
        ends(play, agent, "drained", "")
    assert play.gang.state == "failed"
    assert play.gang.reason.startswith("no new step for 102 s: drained 5 times")


def test_a_long_first_step_is_no_loop() -> None:
    """Two deaths, hours apart, in generations that were still loading."""
    play, (_, first, _) = trains(PS, Rules(), step=0)
    for _ in range(2):
        play.wait(5000)
        ends(play, first)
    assert play.gang.state == "running"
    play.wait(5000)
    ends(play, first)
    assert play.gang.state == "failed"


def test_deaths_of_a_program_whose_steps_are_unknown_add_up_within_progress_timeout() -> None:
    rules = replace(FEW, steps=False, progress_timeout=100.0)
    play, (_, first, _) = trains(PS, rules, step=0)
    for _ in range(20):
        play.wait(30)
        ends(play, first)
    assert play.gang.state == "running"
    for _ in range(5):
        ends(play, first)
    assert play.gang.state == "failed"


# ---- what outlives rank 0


def test_the_budget_is_persisted_with_a_generation() -> None:
    play, (_, first, _) = trains(PS, FEW, step=7)
    ends(play, first)
    play.wait(3)
    ends(play, first)
    budget = play.effects[-1].budget
    assert (budget.step, budget.fruitless) == (7, 2)
    assert budget.seen == {f"worker of trainer 0 {KILLED}": 2}
    assert budget.seconds == pytest.approx(3, abs=1)


def test_a_new_coordinator_goes_on_with_it() -> None:
    spent = Budget(7, 0, 4, 10.0, {f"worker of trainer 0 {KILLED}": 4})
    play = Play(PS, FEW, budget=spent)
    members = [play.join("ps"), play.join("trainer", 0), play.join("trainer", 1)]
    play.settle()
    play.wait(5)
    play.settle()
    members[0].sends(step=7)
    ends(play, members[1])
    assert play.gang.reason == "worker of trainer 0 killed by SIGKILL 5 times at step 7; out of memory?"


def test_a_rank_0_that_is_killed_whole_again_and_again_fails_the_job_once_all_are_there() -> None:
    budget = Budget()
    for _ in range(5):
        budget = after_restart(budget, 0, killed=True)
    play = Play(PS, FEW, budget=budget)
    play.join("ps")
    play.wait(60)
    assert play.gang.state == "gathering"
    play.join("trainer", 0)
    play.join("trainer", 1)
    play.settle()
    play.tick()
    assert play.gang.state == "failed"
    assert play.gang.reason == "rank 0 was killed 5 times at step 0"


def test_where_memory_ran_out_the_job_does_not_fail_for_good() -> None:
    """It may have more of it when it is started again."""
    memory = "killed by SIGKILL; out of memory (limit 260 MiB, peak 260 MiB)"
    play, (ps, first, _) = trains(PS, FEW, step=7)
    for _ in range(5):
        ends(play, first, error=memory)
    assert (play.gang.state, play.gang.code, ps.directive.final) == ("failed", FAILED, False)
    assert play.gang.reason.endswith("killed by SIGKILL 5 times at step 7; out of memory (limit 260 MiB, peak 260 MiB)")
    assert not [effect for effect in play.effects if effect.kind == "failed"]
    spent = after_restart(Budget(7, 0, 4, 10.0, {f"worker of trainer 0 {memory}": 4}), 0, killed=True)
    play = Play(PS, FEW, budget=spent)
    first, *_ = [play.join("trainer", 0), play.join("ps"), play.join("trainer", 1)]
    play.settle()
    ends(play, first, error=memory)
    assert play.gang.state == "running"


def test_a_restart_of_rank_0() -> None:
    spent = Budget(312, 300, 4, 10.0, {"trainer 0 was started again": 4})
    assert after_restart(spent, 300, killed=False) == spent
    assert after_restart(spent, 300, killed=True).fruitless == 5
    assert after_restart(spent, 310, killed=True) == Budget(310, 310)
    assert after_restart(spent, 200, killed=True) == Budget(200, 200)  # another checkpoint was put there


def test_a_wait_for_ranks_does_not_fail_the_job_for_good() -> None:
    play = Play(PS, FEW)
    first = play.join("ps")
    play.wait(FEW.rejoin_timeout + 1)
    assert (play.gang.state, play.gang.code, first.directive.final) == ("failed", FAILED, False)
    assert play.effects == []


# ---- the kernel's counter


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_counter_of_ones_own_cgroup(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert oom_kills(tmp_path, membership) is None
    write(membership, "0::/pods/rank\n")
    write(tmp_path / "memory.events", "low 0\noom 9\noom_kill 9\n")
    assert oom_kills(tmp_path, membership) == 9  # a container sees its own at the root
    write(tmp_path / "pods/rank/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert oom_kills(tmp_path, membership) == 2
    write(membership, "5:memory:/docker/abc\n0::/\n")
    (tmp_path / "memory.events").unlink()
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(tmp_path, membership) == 4
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")  # an old kernel
    assert oom_kills(tmp_path, membership) is None


def test_that_memory_ran_out_is_said_with_its_limit_and_peak(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    write(membership, "0::/pods/rank\n")
    write(tmp_path / "pods/rank/memory.events", "oom_kill 2\n")
    assert ran_out(2, tmp_path, membership) == ""
    assert ran_out(None, tmp_path, membership) == ""
    assert ran_out(1, tmp_path, membership) == "out of memory"
    write(tmp_path / "pods/rank/memory.max", "max\n")
    write(tmp_path / "pods/rank/memory.peak", f"{259 * 2**20}\n")
    assert ran_out(1, tmp_path, membership) == "out of memory (peak 259 MiB)"
    write(tmp_path / "pods/rank/memory.max", f"{260 * 2**20}\n")
    assert ran_out(1, tmp_path, membership) == "out of memory (limit 260 MiB, peak 259 MiB)"
    write(membership, "5:memory:/docker/abc\n0::/\n")
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill 4\n")
    write(tmp_path / "memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "memory/docker/abc/memory.max_usage_in_bytes", f"{5 * 2**20}\n")
    assert ran_out(3, tmp_path, membership) == "out of memory (peak 5 MiB)"
