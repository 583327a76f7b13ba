"""The restart budget across restarts of rank 0. What a gang does with it is in the scripts."""

from __future__ import annotations

from rolecall.gang.budget import after_restart
from rolecall.gang.protocol import Budget, Rules
from tests.gang.gangs import PS, Play

KILLED = "killed by SIGKILL; out of memory?"


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
