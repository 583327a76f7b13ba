"""Rank 0's disk is lost, and the run goes on from the copies of its checkpoints that members hold."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from tests.integration.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]


def test_rank_0_goes_on_from_a_members_copy(cluster: MakeCluster) -> None:
    """Of a job whose checkpoints have shards. The copies outlive the member's processes."""
    job = cluster(JOB="hybrid", TRAINERS="1", CHECKPOINT_COPIES="1", CHECKPOINT_INTERVAL="0.2")
    apart = job.directory / "apart"
    for role in ("master", "ps", "trainer"):
        job.add(role, 0, **({} if role == "master" else {"CHECKPOINT_DIR": str(apart / role)})).start()
    until(lambda: len([*apart.glob("*/copies/checkpoint-*")]) == 3, "copies, the older ones deleted")
    for rank in job.ranks.values():
        rank.kill()
    newest = max(path.name for path in apart.glob("*/copies/checkpoint-*"))
    shutil.rmtree(job.checkpoints)
    for rank in job.ranks.values():
        rank.start()
    until(lambda: "checkpoint brought back" in job.first.text(), "the newest copy to be brought back")
    job.trains()
    assert re.findall(r"resumed .*file=(\S+)", job.first.text())[-1] == newest
    generations = {path.name.split("-")[1] for path in job.checkpoints.glob("checkpoint-*")}
    assert max(generations) >= newest.split("-")[1]
    until(lambda: max(path.name for path in apart.glob("*/copies/checkpoint-*")) > newest, "a copy of the next one")
