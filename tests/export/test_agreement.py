"""Ranks with other settings than rank 0's are refused; which settings must agree is said where they are declared."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.gang.member import Member, Request
from rolecall.gang.protocol import Answer, Directive, Heartbeat, RejectedError, SharedSettings, WorkerStatus
from tests.gang.gangs import PS, RULES, Play

OURS = SharedSettings("ours", {"BATCH_SIZE": 32, "LR": 0.1, "SEED": 1})


def refused(**changes: Any) -> RejectedError:
    play = Play(PS, settings=OURS)
    heartbeat = Heartbeat("trainer", 1, "x", 1, node="here", digest="theirs")
    with pytest.raises(RejectedError) as error:
        play.receive(replace(heartbeat, **changes))
    assert error.value.reason == "settings"
    assert not play.gang.members
    return error.value


def test_the_difference_is_named() -> None:
    text = str(refused(settings={**OURS.values, "BATCH_SIZE": 64}))
    assert text.startswith("trainer_1 has BATCH_SIZE=64, rank 0 has BATCH_SIZE=32; give every rank the same settings")
    text = str(refused(settings={**OURS.values, "BATCH_SIZE": 64, "LR": 0.2}, ordinal=None))
    assert text.startswith("trainer on here has BATCH_SIZE=64, LR=0.2, rank 0 has BATCH_SIZE=32, LR=0.1; ")
    text = str(refused(settings={"A": "x" * 1000, "B": 1, "C": None}))
    assert "and 2 more" in text
    assert len(text) < 500


@pytest.mark.parametrize("settings", [None, OURS.values, {}])
def test_a_difference_that_is_not_known_is_refused_all_the_same(settings: dict[str, Any] | None) -> None:
    assert "trainer_1 has " in str(refused(settings=settings))


def test_values_travel_only_while_the_coordinator_has_not_answered() -> None:
    identity = Heartbeat("trainer", 1, "x", 0, digest=OURS.digest, settings=OURS.values)
    member = Member(RULES, identity, WorkerStatus, 0.0)

    def told(request: Request | None) -> dict[str, Any] | None:
        assert request is not None
        assert request.beat.heartbeat is not None
        assert request.beat.heartbeat.digest == OURS.digest
        return request.beat.heartbeat.settings

    first = member.start(0.0).request
    assert first is not None
    assert told(first) == OURS.values
    member.answered(first, Answer("lead", Directive("stop", 1, 1, role="trainer"), members=()), 0.1)
    later = member.leave("SIGTERM", 0.1).request
    assert later is not None
    assert told(later) is None
    member.failed(later, "reset", 1.0)  # the coordinator may be another now, with other settings
    assert told(member.changed(1.0).request) == OURS.values


DIFFER = {
    "rl": {"OBSERVERS", "MIN_OBSERVERS", "MAX_OBSERVERS"},
    "ps": {"TRAINERS", "MIN_TRAINERS", "MAX_TRAINERS", "DATA_DIR", "NUM_GPUS"},
    "rnn": {"CORPUS"},
    "hybrid": {"TABLE_DIR"},
    "script": {"SCRIPT"},
}


@pytest.mark.parametrize("job", registry.JOBS)
def test_all_of_a_jobs_settings_agree_but_paths_devices_and_the_counts_of_elastic_roles(job: str) -> None:
    described = describe.describe(job)
    agreed = set(described.agreement(Settings()).values)
    assert agreed == {*described.variables, "SEED", "LEASE_SECONDS", "INSTANCE"} - DIFFER[job]


def test_a_users_job_says_what_may_differ_and_secrets_never_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("""
from pydantic import SecretStr
from rolecall import Context, Job, PerRank, Role, Settings

class Mine(Settings):
    width: int = 3
    folder: PerRank[str] = "/data"
    key: SecretStr = SecretStr("")

def lead(context: Context[Mine]) -> None: ...

JOB = Job([Role("lead", lead)], settings=Mine)
""")
    monkeypatch.setenv("KEY", "very, very secret")
    passed = describe.ADAPTER.validate_json(describe.describe(f"{tmp_path}/mine.py").to_json())
    agreement = passed.agreement(Settings(job_token="very, very secret"))
    assert set(agreement.values) == {"WIDTH", "SEED", "LEASE_SECONDS", "INSTANCE"}
    assert "secret" not in json.dumps(asdict(agreement))
    assert agreement.digest != passed.agreement(Settings(seed=7)).digest
    assert agreement.digest == passed.agreement(Settings(rpc_timeout=77, threads=9)).digest
