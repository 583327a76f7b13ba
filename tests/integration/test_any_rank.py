"""Any rank can be killed, frozen or lost at any moment: training goes on, and nothing good on disk is harmed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app import checkpoint, rundir
from tests.integration.cluster import Cluster, Rank, alive, until

MakeCluster = Callable[..., Cluster]
RANKS = ("agent-0", "observer-1")


def training(cluster: MakeCluster, **settings: str) -> Cluster:
    """A job that trains, and has a checkpoint."""
    job = cluster(**{"CHECKPOINT_INTERVAL": "0.2", **settings}).start()
    job.trains()
    until(lambda: list(job.checkpoints.glob("checkpoint-*")), "a checkpoint")
    return job


def is_whole(job: Cluster) -> None:
    """Both observers are in a running generation, and it makes steps."""
    until(lambda: job.members() == 2, "both observers in the gang")
    job.trains()


@pytest.mark.parametrize("part", ["supervisor", "rank"])
@pytest.mark.parametrize("name", RANKS)
def test_frozen_and_thawed(cluster: MakeCluster, name: str, part: str) -> None:
    job = training(cluster)
    rank, other = job.ranks[name], job.observer(0)
    before = other.metric("gang_unreachable_total")
    with rank.frozen(part):
        if rank is job.agent:
            # whoever gets no answer ends its worker, within a lease
            until(lambda: other.metric("gang_unreachable_total") > before, "the silence to be noticed")
            until(lambda: other.metric("generation") == 0, "the other's worker to be ended")
        else:
            until(lambda: job.members() == 1, "the silent rank to be given up")
            job.trains()
    is_whole(job)
    assert all(each.process.poll() is None for each in job.ranks.values())  # type: ignore[union-attr]


def test_a_frozen_worker_that_was_given_up_writes_nothing(cluster: MakeCluster) -> None:
    """The agent's supervisor is killed while its worker is frozen; another takes over; then the old one thaws."""
    job = training(cluster)
    with job.agent.frozen("worker") as (old,):
        written = rundir.read_generation(job.checkpoints).number
        job.agent.kill_supervisor()
        job.agent.start()
        # the old worker holds the writer's lock until it is gone: so no new one can write beside it
        until(lambda: "the worker before this one has not ended" in job.agent.text(), "a new worker to be kept out")
        assert alive(old.pid)
        kept = set(job.checkpoints.glob(f"checkpoint-{written:06d}-*"))
    until(lambda: not alive(old.pid), "the thawed worker to end by itself")
    assert set(job.checkpoints.glob(f"checkpoint-{written:06d}-*")) <= kept
    is_whole(job)
    later = f"checkpoint-{written + 1:06d}"
    until(lambda: checkpoint.newest_first(job.checkpoints)[0].name > later, "the next worker's checkpoint")
    assert set(job.checkpoints.glob(f"checkpoint-{written:06d}-*")) <= kept


def test_all_ranks_killed_in_the_same_instant(cluster: MakeCluster) -> None:
    job = training(cluster)
    step = checkpoint.Checkpoints(job.checkpoints, "rl").newest().step  # type: ignore[union-attr]
    for rank in job.ranks.values():
        rank.kill()
    for rank in job.ranks.values():
        rank.start()
    is_whole(job)
    resumed = re.findall(r"resumed .*?iteration=(\d+)", job.agent.text())
    assert int(resumed[-1]) >= step


def test_agent_and_an_observer_killed_in_the_same_instant(cluster: MakeCluster) -> None:
    job = training(cluster)
    for name in RANKS:
        job.ranks[name].kill()
    for name in RANKS:
        job.ranks[name].start()
    is_whole(job)


def appears(rank: Rank, text: str) -> Callable[[], bool]:
    """Whether `text` comes up in the rank's log from now on."""
    seen = rank.text().count(text)
    return lambda: rank.text().count(text) > seen


@pytest.mark.parametrize("name", RANKS)
def test_killed_while_it_starts(cluster: MakeCluster, name: str) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start()
    rank = job.ranks[name]
    until(lambda: rank.get("/healthz")[0] == 200, "its supervisor to serve")
    rank.kill()
    rank.start()
    until(lambda: rank.worker(), "a worker of it")  # the settings' check, or the first generation
    rank.kill()
    rank.start()
    is_whole(job)


def test_killed_again_while_it_recovers(cluster: MakeCluster) -> None:
    job = training(cluster)
    for _ in range(3):
        first = job.agent.kill_worker()
        until(lambda first=first: (found := job.agent.worker()) and found.pid != first, "the next worker")
    job.agent.kill_worker()
    is_whole(job)


@pytest.mark.parametrize("name", RANKS)
def test_killed_while_the_gang_drains(cluster: MakeCluster, name: str) -> None:
    job = training(cluster)
    drains = appears(job.agent, "gang draining")
    job.observer(0).kill_worker()  # once it is back, the gang drains to take it in
    until(drains, "a drain")
    rank = job.ranks[name]
    rank.kill()
    rank.start()
    is_whole(job)


def test_killed_while_it_writes_checkpoints(cluster: MakeCluster) -> None:
    job = training(cluster, CHECKPOINT_INTERVAL="0.000001")
    for _ in range(3):
        until(appears(job.agent, "checkpoint "), "a checkpoint")
        job.agent.kill_worker()
        job.trains()
    is_whole(job)
    job.agent.kill()
    kept = checkpoint.newest_first(job.checkpoints)
    assert kept
    for path in kept:
        checkpoint.read(path, "rl")  # raises where one is torn


@pytest.mark.parametrize("name", RANKS)
def test_killed_at_the_finish(cluster: MakeCluster, name: str) -> None:
    job = cluster(ENV_ID="tests.integration.environments:Quick-v0").start()
    until(lambda: "Solved!" in job.agent.text(), "the end")
    rank = job.ranks[name]
    rank.kill()
    rank.start()
    assert [each.wait() for each in job.ranks.values()] == [0, 0, 0]
    assert (rundir.read_done(job.checkpoints) or {})["solved"] is True


def test_one_rank_after_the_other_is_terminated_and_comes_back(cluster: MakeCluster) -> None:
    job = training(cluster)
    for name in RANKS:
        rank = job.ranks[name]
        step = job.iterations()
        rank.terminate()
        assert rank.wait() == 0
        rank.start()
        is_whole(job)
        assert job.iterations() > step


# ---- no update twice, none that was acknowledged lost


def test_the_ledger_of_updates(cluster: MakeCluster) -> None:
    """Adam counts the updates that a policy got; the log tells which were acknowledged."""
    job = training(cluster, LOG_INTERVAL="1", MINIBATCHES="1")
    for hurt in ("drain", "kill", "drain", "kill all"):
        generation = job.agent.metric("generation")
        if hurt == "drain":
            job.observer(1).kill_worker()
        elif hurt == "kill":
            job.agent.kill_worker()
        else:
            for rank in job.ranks.values():
                rank.kill()
            for rank in job.ranks.values():
                rank.start()
        until(lambda g=generation: job.agent.metric("generation") > g, f"the generation after {hurt}")
        is_whole(job)
    for rank in job.ranks.values():
        rank.terminate()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]

    for path in checkpoint.newest_first(job.checkpoints):
        found = checkpoint.read(path, "rl")
        counts = {int(state["step"]) for state in found.state["learner"]["optimizer"]["state"].values()}
        assert counts == {found.step} == {found.state["iteration"]}

    last = saved = 0
    ended = ""
    events = re.findall(
        r"(Episode) (\d+)|(checkpoint) file=checkpoint-\d+-(\d+)|(resumed) .*?iteration=(\d+)"
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
            case "resumed":
                # a kill may come between a checkpoint's file and its line
                assert saved <= int(value) <= saved + (ended != "drained")
                assert last - int(value) == 0 or ended != "drained", "a finished step was lost by a drain"
                assert int(value) <= last
                last = saved = int(value)
                kinds.add(ended)
                ended = "killed with its supervisor"
    assert {"drained", "killed"} <= kinds


# ---- the disk


def test_a_torn_newest_checkpoint_is_passed_over_and_kept(cluster: MakeCluster) -> None:
    job = training(cluster)
    until(lambda: len(list(job.checkpoints.glob("checkpoint-*"))) > 1, "two checkpoints")
    for rank in job.ranks.values():
        rank.kill()
    newest, before = checkpoint.newest_first(job.checkpoints)[:2]
    newest.write_bytes(newest.read_bytes()[:-100])
    for rank in job.ranks.values():
        rank.start()
    until(lambda: f"resumed file={before.name}" in job.agent.text(), "the one before to be used")
    assert f"{newest.name} is torn" in job.agent.text()
    is_whole(job)


def test_no_good_checkpoint_is_a_refusal_that_touches_nothing(cluster: MakeCluster) -> None:
    job = training(cluster)
    for rank in job.ranks.values():
        rank.kill()
    for path in checkpoint.newest_first(job.checkpoints):
        path.write_bytes(path.read_bytes().replace(b'"rl"', b'"xy"', 1))
    kept = {path.name: path.read_bytes() for path in checkpoint.newest_first(job.checkpoints)}
    for rank in job.ranks.values():
        rank.start()
    assert [rank.wait() for rank in job.ranks.values()] == [2, 2, 2]
    assert {path.name: path.read_bytes() for path in checkpoint.newest_first(job.checkpoints)} == kept


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
    is_whole(job)
    good = checkpoint.newest_first(volume / "run")[0]
    checkpoint.read(good, "rl")
    written = appears(job.agent, "checkpoint file=")
    filler.unlink()
    until(written, "a checkpoint once there is room")
    is_whole(job)


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
    is_whole(job)
