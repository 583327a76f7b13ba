"""Unmodified programs as ranks: the five examples, each with ranks killed; the shapes of PyTorch's own; arguments,
signals, errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.integration.cluster import Cluster, alive, until

MakeCluster = Callable[..., Cluster]


@dataclass(frozen=True)
class Example:
    """A program in examples/: `steps` is the variable that bounds its work, `saved` what rank 0 prints once it has
    saved, `other` a rank that is killed.
    """

    name: str
    steps: str
    saved: str
    other: int


EXAMPLES = (
    Example("reinforce", "EPISODES", "episode 10 ", 1),
    Example("parameter_server", "ROUNDS", "round 1 ", 2),
    Example("rnn", "STEPS", "step 20 ", 2),
    Example("ddp_rpc", "ROUNDS", "round 1 ", 2),
    Example("pipeline", "STEPS", "step 20 ", 1),
)


def printed(job: Cluster, rank: int) -> list[str]:
    """The lines of a rank's log that the program has printed."""
    lines = job.member(rank).text().splitlines()
    return [line for line in lines if line[:1].islower() and not line.startswith("rolecall: ")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_survives_its_ranks(cluster: MakeCluster, example: Example) -> None:
    """Without end at first: another rank's worker is killed, then the whole of rank 0, which ends the training."""
    script = f"examples/{example.name}.py:run_worker"
    job = cluster(JOB="script", SCRIPT=script, **{example.steps: "1000000"}).start(3)
    until(lambda: example.saved in job.first.text(), "a checkpoint")
    resumed = job.first.appears("resumed ")
    job.member(example.other).kill_worker()
    until(resumed, "the next generation, from the checkpoint")
    job.first.kill()
    job.first.environment[example.steps] = "1"
    job.first.start()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    lines = printed(job, 0)
    assert lines[-2].startswith("resumed ")
    assert lines[-1] == "done"
    done = json.loads((job.checkpoints / "DONE").read_text())
    assert done["ranks"] == 3
    assert done["generation"] >= 3


def test_run_as_main_with_processes_of_its_own(cluster: MakeCluster) -> None:
    """One for each rank, started anew by Python: they meet through Rolecall, since nobody is at their address, and end
    with their generation.
    """
    job = cluster(
        JOB="script",
        SCRIPT="tests/integration/spawning.py",
        SCRIPT_ARGS="--rank {rank} --world_size={world_size}",
    ).start(2)
    until(lambda: "trains" in printed(job, 1), "training")
    started = [process for rank in job.ranks.values() for process in rank.processes("worker")[0].children()]
    assert len(started) == 2
    job.member(1).kill_worker()
    until(lambda: not any(alive(process.pid) for process in started), "the end of what the workers have started")
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0]
    assert [printed(job, rank) for rank in range(2)] == [["served"], ["trains", "trains", "falls"]]


def test_calls_that_are_answered_together(cluster: MakeCluster) -> None:
    """The function has further parameters; RPC and a process group meet at one address."""
    job = cluster(
        JOB="script", SCRIPT="tests/integration/programs.py:average", SCRIPT_ARGS="--scale 10 -- 3 True"
    ).start(3)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert printed(job, 0) == ["averages [15.0, 30.0, 45.0]", "whole True"]


def test_sigterm_reaches_a_program_that_handles_it(cluster: MakeCluster) -> None:
    """One rank is asked to leave: the program stops in all of them, and continues where it was."""
    job = cluster(JOB="script", SCRIPT="examples/pipeline.py:run_worker", STEPS="1000000").start(3)
    until(lambda: "step 20 " in job.first.text(), "training")
    job.member(2).terminate()
    assert job.member(2).wait() == 0
    until(lambda: "stopped" in printed(job, 0), "the program to stop")
    assert "cause=drained" in job.first.text()
    resumed = job.first.appears("resumed ")
    job.member(2).start()
    until(resumed, "the next generation")
    # as a job manager does: the program's end by its own handler is not the job's
    for process in [process for rank in job.ranks.values() for process in rank.processes()]:
        process.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert printed(job, 0)[-1] == "stopped"
    assert not (job.checkpoints / "DONE").exists()
    assert "outcome=" not in job.logs()


def test_sigterm_ends_a_program_that_does_not_handle_it(cluster: MakeCluster) -> None:
    job = cluster(JOB="script", SCRIPT="examples/rnn.py:run_worker", STEPS="1000000").start(3)
    until(lambda: "step 20 " in job.first.text(), "training")
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert "cause=drained" in job.first.text()
    assert "outcome=" not in job.logs()
    assert not (job.checkpoints / "DONE").exists()


def test_a_program_that_ignores_sigterm_is_ended(cluster: MakeCluster) -> None:
    job = cluster(JOB="script", SCRIPT="tests.integration.programs:ignore", DRAIN_TIMEOUT="2").start(2)
    until(lambda: all("ready" in printed(job, rank) for rank in (0, 1)), "both programs")
    job.first.terminate()
    assert job.first.wait() == 0
    assert printed(job, 1) == ["ready", "no"]
    assert "the program did not end after SIGTERM" in job.first.text()
    assert "outcome=" not in job.logs()


def test_addresses_of_a_program_lead_to_its_peers(cluster: MakeCluster) -> None:
    job = cluster(JOB="script", SCRIPT="tests.integration.programs:meet").start(3)
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert [printed(job, rank) for rank in range(3)] == [
        ["sums [3.0, 3.0, 3.0, 3.0, 1.0, 7]"],
        ["sums [3.0, 3.0, 3.0, 3.0, 1.0, 7]"],
        ["sums [3.0, 3.0, 3.0, 3.0, 7]"],
    ]


def test_an_exception_is_the_programs_own_traceback(cluster: MakeCluster) -> None:
    job = cluster(JOB="script", SCRIPT="tests/integration/programs.py:fail", MAX_FAILURES="2").start(2)
    assert [rank.wait() for rank in job.ranks.values()] == [3, 3]
    ends = job.member(1).text().split("outcome=failed")[1:]
    assert len(ends) >= 2
    for end in ends:
        head, place, code, last = end.split("\n")[1:5]
        assert head == "Traceback (most recent call last):"
        assert "tests/integration/programs.py" in place
        assert place.endswith(", in fail")
        assert (code.strip(), last) == ('raise ValueError("broken on purpose")', "ValueError: broken on purpose")
    assert not (job.checkpoints / "DONE").exists()
