"""What the gang does and scripts do not print: its budget across restarts of rank 0, counts of joins and stays, and its
size under churn."""

from __future__ import annotations

import pickle

import pytest

from rolecall.gang import roster
from rolecall.gang.budget import after_restart
from rolecall.gang.protocol import Budget, Event, RoleSpec, Rules
from tests.gang.gangs import PS, RULES, FakeMember, Play, trains

KILLED = "killed by SIGKILL; out of memory?"
ROLES = (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 1, 1, 4, True, stays=True))
ROUNDS = 30  # after which everything that is kept for a while has been


# ---- the budget


def spent(rules: Rules, budget: Budget, error: str, deaths: int) -> Play:
    """A gang that goes on with `budget`, in which the first trainer's worker is killed so often."""
    play = Play(PS, rules, budget=budget)
    members = [play.join("ps"), play.join("trainer", 0), play.join("trainer", 1)]
    play.settle()
    play.wait(rules.longest_pause)
    play.settle()
    members[0].sends(step=7)
    for _ in range(deaths):
        members[1].ends("killed", error=error)
        play.wait(rules.longest_pause)
        play.settle()
    return play


def test_budget_is_written_with_a_generation() -> None:
    play = spent(Rules(max_restarts=5, longest_pause=3.0), Budget(), KILLED, deaths=3)
    budget = play.effects[-1].budget
    assert (budget.step, budget.fruitless) == (7, 3)
    assert budget.seen == {f"worker of trainer_0 {KILLED}": 3}
    assert budget.seconds == 6.0


def test_new_coordinator_goes_on_with_the_budget() -> None:
    left = Budget(7, 0, 4, 10.0, {f"worker of trainer_0 {KILLED}": 4})
    play = spent(Rules(max_restarts=5, longest_pause=5.0), left, KILLED, deaths=1)
    assert play.gang.reason == "worker of trainer_0 killed by SIGKILL 5 times at step 7; out of memory?"


def test_budget_spent_by_memory_is_renewed_at_the_next_start() -> None:
    memory = "killed by SIGKILL; out of memory (limit 260 MiB, peak 260 MiB)"
    left = after_restart(Budget(7, 0, 4, 10.0, {f"worker of trainer_0 {memory}": 4}), 0, killed=True)
    assert spent(Rules(max_restarts=5, longest_pause=5.0), left, memory, deaths=1).gang.state == "running"


def test_killed_rank_0_counts_unless_the_checkpoint_is_another() -> None:
    spent = Budget(312, 300, 4, 10.0, {"trainer_0 was started again": 4})
    assert after_restart(spent, 300, killed=False) == spent
    assert after_restart(spent, 300, killed=True).fruitless == 5
    assert after_restart(spent, 310, killed=True) == Budget(310, 310)
    assert after_restart(spent, 200, killed=True) == Budget(200, 200)


# ---- joins and stays


def running() -> tuple[Play, FakeMember, FakeMember]:
    play = Play(ROLES)
    agent, observer = play.join("agent"), play.join("observer")
    play.settle()
    assert play.running == [("agent", 0), ("observer", 0)]
    return play, agent, observer


def events(play: Play, kind: str) -> list[Event]:
    return [event for event in play.events if event.kind == kind]


def test_members_of_a_batch_have_seconds_each() -> None:
    play, _, _ = running()
    play.join("observer", 1)
    play.join("observer", 2)
    for _ in range(3):
        play.settle()
        play.wait(1.0)
    joined = events(play, "joined")
    assert sum(len(event.joins) for event in joined) == 2
    assert all(max(event.joins) == event.seconds for event in joined)


def test_workers_that_stay_are_counted_when_the_next_generation_begins() -> None:
    play, agent, observer = running()
    assert [event.stayed for event in events(play, "generation")] == [0]
    agent.ends("killed")
    play.tick()
    assert observer.directive.kind == "detach"
    observer.sends(state="ready", epoch=observer.directive.epoch)
    play.settle()
    play.wait(1.0)
    play.settle()
    assert [event.stayed for event in events(play, "generation")] == [0, 1]
    agent.ends("killed")
    play.tick()
    observer.ends("killed")  # this one does not
    play.settle()
    play.wait(1.0)
    play.settle()
    assert [event.stayed for event in events(play, "generation")] == [0, 1, 0]


# ---- churn


def churn(play: Play, ordinal: int | None, rounds: int) -> int:
    """The size of the gang after that many ranks came and went, each a process of its own on its own node."""
    for number in range(rounds):
        member = play.join("observer", ordinal, f"{play.joined:016}", node=f"node-{play.joined:08}")
        play.settle()
        play.leaves(member)
        play.wait(RULES.lease + 1)
        assert len(play.gang.members) == 3, number
    return len(pickle.dumps(play.gang))


@pytest.mark.parametrize("ordinal", [2, None])
def test_ranks_that_come_and_go_leave_nothing(monkeypatch: pytest.MonkeyPatch, ordinal: int | None) -> None:
    monkeypatch.setattr(roster, "MAX_REMEMBERED", 10)
    play, _ = trains()
    before = churn(play, ordinal, ROUNDS)
    assert churn(play, ordinal, ROUNDS) < before + 200  # numbers grow by a digit
