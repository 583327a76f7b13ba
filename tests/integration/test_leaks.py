"""Generation after generation, and step after step: threads, descriptors, memory and metric files stay as they are.

`make leaks` runs many instead of a few (GENERATIONS, STEPS), and prints what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.cluster import Cluster, Rank, until

GENERATIONS = int(os.environ.get("GENERATIONS", "3"))
STEPS = int(os.environ.get("STEPS", "120"))
WARM = 2  # generations after which everything has been used once
GROWTH = 8 * 2**20  # bytes; an interpreter's heap breathes


def measured(rank: Rank, temporary: Path) -> dict[str, int]:
    """What a rank's supervisor, fork server and tunnel hold, and the metric files of all ranks."""
    supervisor = psutil.Process(rank.pid)
    (server,) = [child for child in supervisor.children() if child.children()]
    port = int(rank.environment["PORT"])
    (tunnel,) = [
        child
        for child in supervisor.children()
        if any(one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in child.net_connections())
    ]
    counts = {"metric files": len(list(temporary.glob("rolecall-*/*.db")))}
    for name, process in (("supervisor", supervisor), ("fork server", server), ("tunnel", tunnel)):
        counts[f"{name} file descriptors"] = process.num_fds()
        counts[f"{name} threads"] = process.num_threads()
        counts[f"{name} memory"] = process.memory_info().rss
        counts[f"{name} children"] = len(process.children())
    return counts


@pytest.mark.timeout(60 + 20 * GENERATIONS)
def test_generation_after_generation_nothing_grows(cluster: Callable[..., Cluster]) -> None:
    job = cluster(NUM_ENVS="2", ROLLOUT_STEPS="4", CHECKPOINT_INTERVAL="0.2", REJOIN_INTERVAL="0.1").start()
    job.trains()
    before: dict[str, dict[str, int]] = {}
    for number in range(WARM + GENERATIONS):
        if number == WARM:
            before = everyone(job)
        generation = job.agent.metric("generation")
        job.agent.kill_worker()
        until(lambda g=generation: job.agent.metric("generation") > g, "the next generation")
        until(lambda: job.members() == 2, "both observers")
        job.trains(1)
    after = everyone(job)
    for name, values in after.items():
        for what, value in values.items():
            was = before[name][what]
            print(f"{name:12} {what:28} {was:12,} before, {value:12,} after {GENERATIONS} generations")
            if what.endswith("memory"):
                assert value < was + GROWTH, (name, what)
            else:
                assert value <= was + 1, (name, what)  # a connection may be open at the moment


def everyone(job: Cluster) -> dict[str, dict[str, int]]:
    for rank in job.ranks.values():
        until(lambda rank=rank: rank.worker(), f"a worker of {rank.name}")
    return {name: measured(rank, Path(job.temporary)) for name, rank in job.ranks.items()}


@pytest.mark.timeout(60 + STEPS)
def test_step_after_step_the_split_model_needs_no_more_memory(cluster: Callable[..., Cluster]) -> None:
    """Each step has gradients that cross calls, and forward passes that the other rank keeps."""
    job = cluster(JOB="rnn", CHECKPOINT_INTERVAL="3600").start(1)
    curve = []
    for step in range(STEPS // 4, STEPS + 1, STEPS // 4):
        until(lambda s=step: job.first.metric("step") >= s, f"step {step}", 60 + STEPS)
        workers = [until(rank.worker, f"a worker of {rank.name}") for rank in job.ranks.values()]
        curve.append([worker.memory_info().rss for worker in workers])
        print(f"step {step:6,}: ps {curve[-1][0] / 2**20:.1f} MiB, trainer {curve[-1][1] / 2**20:.1f} MiB")
    assert job.first.metric("generation") == 1
    for before, after in zip(curve[0], curve[-1], strict=True):
        assert after < before + GROWTH
