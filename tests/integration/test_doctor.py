"""`rolecall doctor` beside ranks that run: all is well, and it disturbs nobody."""

from __future__ import annotations

import json
import sys
from typing import Any

from rolecall.tunnel import keys
from tests import commands
from tests.integration.cluster import Cluster, Rank


def examined(rank: Rank, code: int, **changes: str) -> dict[str, dict[str, Any]]:
    """What a doctor with the rank's environment says, by check; it ends with `code`."""
    done = commands.run([sys.executable, "-m", "rolecall", "doctor", "--json"], env={**rank.environment, **changes})
    told = json.loads(done.stdout)
    assert done.returncode == code, done.stdout
    assert done.stderr == ""
    assert rank.environment["JOB_TOKEN"] not in done.stdout
    return {check["name"]: check for check in told["checks"]}


def test_ranks_that_are_well(kept: Cluster) -> None:
    generation, text = kept.agent.metric("generation"), kept.agent.text()
    for rank in (kept.agent, kept.observer(0)):
        checks = examined(rank, 0)
        assert {name for name, check in checks.items() if check["state"] == "not checked"} == set(), checks
        assert {name for name, check in checks.items() if check["state"] == "problem"} == set(), checks
        assert checks["ports"]["text"].count("is held by this rank, which runs") == 2
        assert checks["rank 0"]["text"] == "it answers; the gang is running"
    assert kept.agent.metric("generation") == generation
    assert "connection rejected" not in kept.agent.text()[len(text) :]
    kept.trains()


def test_a_rank_with_another_token_beside_them(kept: Cluster) -> None:
    checks = examined(kept.observer(0), 2, JOB_TOKEN=keys.new_token())
    assert {name for name, check in checks.items() if check["state"] == "problem"} == {"credentials", "rank 0"}
    kept.trains()
