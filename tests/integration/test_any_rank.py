"""Any rank can be killed, frozen or lost at any moment: training goes on, and nothing good on disk is harmed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rolecall.checkpoint import checkpoint
from rolecall.record import history, rundir
from tests.integration.cluster import Cluster, alive, until

MakeCluster = Callable[..., Cluster]


@pytest.mark.parametrize(("name", "part"), [("agent-0", "supervisor"), ("observer-1", "rank")])
def test_frozen_and_thawed(kept: Cluster, name: str, part: str) -> None:
    rank, other = kept.ranks[name], kept.observer(0)
    before = other.metric("gang_unreachable_total")
    with rank.frozen(part):
        if rank is kept.agent:
            # whoever gets no answer ends its worker, within a lease
            until(lambda: other.metric("gang_unreachable_total") > before, "the silence to be noticed")
            until(lambda: other.metric("generation") == 0, "the other's worker to be ended")
        else:
            until(lambda: kept.members() == 1, "the silent rank to be given up")
            kept.trains()
    kept.is_whole()
    assert all(each.process.poll() is None for each in kept.ranks.values())  # type: ignore[union-attr]


def test_a_frozen_worker_that_was_given_up_writes_nothing(kept: Cluster) -> None:
    """The agent's supervisor is killed while its worker is frozen, and the fork server, which would kill it; another
    takes over; then the old ones thaw."""
    with kept.agent.frozen("fork server") as (_, old):
        written = rundir.read_generation(kept.checkpoints).number
        refused = kept.agent.appears("the previous worker has not ended")
        kept.agent.kill_supervisor()
        kept.agent.start()
        # the old worker holds the writer's lock until it is gone: so no new one can write beside it
        until(refused, "a new worker to be kept out")
        assert alive(old.pid)
        made = set(kept.checkpoints.glob(f"checkpoint-{written:06d}-*"))
    until(lambda: not alive(old.pid), "the thawed worker to end by itself")
    assert set(kept.checkpoints.glob(f"checkpoint-{written:06d}-*")) <= made
    kept.is_whole()
    later = f"checkpoint-{written + 1:06d}"
    until(lambda: checkpoint.newest_first(kept.checkpoints)[0].name > later, "the next worker's checkpoint")
    assert set(kept.checkpoints.glob(f"checkpoint-{written:06d}-*")) <= made


def training(cluster: MakeCluster, observers: int = 1, **settings: str) -> Cluster:
    """A job that trains, and has a checkpoint."""
    job = cluster(**{"CHECKPOINT_INTERVAL": "0.2", **settings}).start(observers)
    job.trains()
    until(lambda: list(job.checkpoints.glob("checkpoint-*")), "a checkpoint")
    return job


def test_a_containers_first_process_restarts_a_rank_that_is_killed_during_its_start(cluster: MakeCluster) -> None:
    job = cluster(OBSERVERS="1", CHECKPOINT_INTERVAL="0.2", cold={"agent-0"})
    agent = job.add("agent", 0)
    agent.arguments = ["rank", "--restarts", "5"]
    agent.start()
    job.add("observer", 0).start()
    until(lambda: agent.get("/healthz")[0] == 200, "its supervisor to serve")
    (rank,) = psutil.Process(agent.pid).children()
    rank.kill()
    until(lambda: "the rank crashed, restarting it" in agent.text(), "the restart")
    job.trains()
    for each in job.ranks.values():
        each.terminate()
        assert each.wait() == 0


# ---- no update twice, none that was acknowledged lost


def test_the_ledger_of_updates(cluster: MakeCluster) -> None:
    """Adam counts the updates that a policy got; the log tells which were acknowledged."""
    job = training(cluster, 2, LOG_INTERVAL="1", MINIBATCHES="1", EPOCHS="1")
    for hurt in ("join", "kill", "drain", "kill all"):
        counter = "gang_joins_total" if hurt == "join" else "generation"
        before = job.agent.metric(counter)
        if hurt == "join":
            job.observer(1).kill_worker()
        elif hurt == "kill":
            job.agent.kill_worker()
        elif hurt == "drain":
            job.agent.terminate()
            assert job.agent.wait() == 0
            job.agent.start()
        else:
            for rank in job.ranks.values():
                rank.kill()
            for rank in job.ranks.values():
                rank.start()
        until(lambda c=counter, b=before: job.agent.metric(c) > b, f"what follows {hurt}")
        job.is_whole()
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]

    for path in checkpoint.newest_first(job.checkpoints):
        found = checkpoint.read(path, "rl")
        counts = {int(state["step"]) for state in found.state["learner"]["optimizer"]["state"].values()}
        assert counts == {found.step}

    last = saved = 0
    ended = ""
    events = re.findall(
        r"(Episode) (\d+)|(checkpoint) file=checkpoint-\d+-(\d+)|(resumed) .*?step=(\d+)"
        r"|(gang stopped) cause=(\w+)",
        job.agent.text(),
    )
    kinds = set()
    for event in events:
        kind, value = (*filter(None, event), "")[:2]
        match kind:
            case "Episode":
                assert int(value) == last + 1, f"update {value} after {last}"
                last = int(value)
            case "checkpoint":
                saved = int(value)
            case "gang stopped":
                ended = value
                last = last if saved else 0  # there is nothing to resume from yet
            case "resumed":
                # a kill may come between a checkpoint's file and its line, whichever update that is of
                assert saved <= int(value)
                assert int(value) == saved or ended != "drained"
                assert last - int(value) == 0 or ended != "drained", "a finished step was lost by a drain"
                assert int(value) <= last
                last = saved = int(value)
                kinds.add(ended)
                ended = "killed with its supervisor"
    assert {"drained", "killed"} <= kinds


# ---- the disk


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    directory = tmp_path / "volume"
    directory.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a file system cannot be mounted here (needs root)")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remount(mode: str, volume: Path) -> list[str]:
    return ["mount", "-o", f"remount,{mode}", str(volume)]


def steps_noted(directory: Path, more_than: float) -> list[int]:
    found = [point.step for point in history.read(directory).curves["done"]]
    return found if found and found[-1] > more_than else []


def test_a_volume_that_fills_up_does_not_stop_training(cluster: MakeCluster, volume: Path) -> None:
    job = training(cluster, CHECKPOINT_DIR=str(volume / "run"))
    filler = volume / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(2**20))
    until(lambda: job.agent.metric("checkpoint_failures_total") > 0, "a checkpoint to fail")
    assert "no checkpoint written; training goes on" in job.agent.text()
    job.trains()
    generation = job.agent.metric("generation")
    job.agent.kill_worker()  # a number for the next generation finds a place all the same
    until(lambda: job.agent.metric("generation") > generation, "the next generation")
    job.is_whole()
    good = checkpoint.newest_first(volume / "run")[0]
    checkpoint.read(good, "rl")
    written, step = job.agent.appears("checkpoint file="), job.iterations()
    filler.unlink()
    until(written, "a checkpoint once there is room")
    # what was noted while there was none is not lost
    noted = until(lambda: steps_noted(volume / "run", more_than=step), "the history to go on")
    assert noted[: int(step)] == list(range(1, int(step) + 1))
    assert job.agent.text().count("history cannot be written") <= 1
    job.is_whole()


def test_a_volume_that_turns_read_only(cluster: MakeCluster, volume: Path) -> None:
    job = training(cluster, CHECKPOINT_DIR=str(volume / "run"))
    job.agent.kill()
    # the old worker may have the volume open for a moment
    until(lambda: not subprocess.run(remount("ro", volume), capture_output=True).returncode, "a read-only volume")
    job.agent.start()
    assert job.agent.wait() == 2
    assert f"CHECKPOINT_DIR={volume / 'run'}: cannot be written (Read-only file system)" in job.agent.text()
    subprocess.run(remount("rw", volume), check=True)
    job.agent.start()
    job.is_whole()


def test_a_stopped_worker_is_given_up(kept: Cluster) -> None:
    rank = kept.agent
    silent = rank.metric("worker_restarts_total", cause="silent")
    stopped = rank.kill_worker(signal.SIGSTOP)
    until(lambda: not alive(stopped), "the silent worker to be ended")
    until(lambda: rank.metric("worker_restarts_total", cause="silent") > silent, "the cause to be counted")
    kept.trains()
    until(lambda: kept.members() == 2, "both observers")


@pytest.mark.parametrize("part", ["supervisor", "rank"])  # a job manager such as Slurm signals all processes
def test_drain_on_sigterm_and_resume_loses_no_step(kept: Cluster, part: str) -> None:
    for process in [process for rank in kept.ranks.values() for process in rank.processes(part)]:
        process.terminate()
    assert [rank.wait() for rank in kept.ranks.values()] == [0, 0, 0]
    newest = checkpoint.Checkpoints(kept.checkpoints, "rl").newest()
    assert newest is not None
    assert newest.step > 0
    assert f"checkpoint-{newest.generation:06d}-{newest.step:010d}" in kept.agent.text()
    for rank in kept.ranks.values():
        rank.start()
    until(lambda: f"step={newest.step}" in kept.agent.text().split("resumed")[-1], "the resumed step")
    kept.trains()


def test_observer_leaves_and_another_joins(kept: Cluster) -> None:
    kept.observer(1).terminate()
    assert kept.observer(1).wait() == 0
    until(lambda: kept.members() == 1, "the observer to be gone")
    kept.observer(1).start()
    until(lambda: kept.members() == 2, "the newcomer")
    kept.trains()
    assert kept.observer(1).metric("generation") == kept.agent.metric("generation")
