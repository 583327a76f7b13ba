"""Where the ranks of a host go that stays away, and when: the rules, and what `rolecall run --hosts` does by them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolecall.config import Settings
from rolecall.launch import host, hosts, ssh
from rolecall.launch.room import Room, Seat
from rolecall.messages.hosts import Ready
from rolecall.record import rundir

RUN = "5a0c"


def room(*away: str, gpus: int = 0, hosts: str = "abcd") -> Room:
    room = Room(60.0)
    room.gpus |= dict.fromkeys(hosts, gpus)
    for name in away:
        room.lost(name, 0.0)
    return room


def test_ranks_wait_for_their_host_until_host_timeout() -> None:
    one = room("a")
    assert [one.left("a", now) for now in (0.0, 59.0, 60.0, 100.0)] == [60.0, 1.0, 0.0, 0.0]
    one.back("a", 100.0)
    assert one.left("a", 200.0) == one.left("b", 200.0) == 60.0
    one.lost("a", 200.0)
    assert one.left("a", 201.0) == 59.0


def test_if_all_were_away_this_machine_was() -> None:
    one = room(*"abcd")
    one.back("b", 500.0)
    assert one.left("a", 500.0) == 60.0
    one.back("c", 510.0)
    assert one.left("a", 510.0) == 50.0


@pytest.mark.parametrize(
    ("seat", "seats", "among", "away", "chosen"),
    [
        (Seat("a"), "abcd", "abcd", "a", "bcd"),
        (Seat("a"), "abbcd", "abcd", "a", "cdb"),
        (Seat("a"), "abcd", "abcd", "ab", "cd"),
        (Seat("a"), "abbc", "abbc", "a", "bc"),  # b is to have twice as many
        (Seat("a"), "abcd", "ab", "a", "b"),  # --role role=a,b
        (Seat("a"), "abcd", "a", "a", "no other host that it may use is connected"),
        (Seat("a"), "abcd", "abcd", "abcd", "no other host that it may use is connected"),
        (Seat("a", 1), "abcd", "abcd", "a", "bcd"),
        (Seat("a", 1), "abbcc", "abcd", "a", "d"),
        (Seat("a", 2), "abcd", "abc", "a", "gpus=2 are free on none of b, c"),
    ],
)
def test_the_hosts_with_room(seat: Seat, seats: str, among: str, away: str, chosen: str) -> None:
    others, problem = room(*away, gpus=2).others(seat, [Seat(name, 1) for name in seats], among)
    assert ("".join(others) or problem) == chosen
    assert bool(problem) != bool(others)


# ---- a run's ranks


class Fake:
    """A host, with the methods of `Host`."""

    def __init__(self, name: str, shares: bool) -> None:
        self.host, self.shares, self.connection, self.forwards = name, shares, None, list[tuple[int, int]]()
        self.ready = Ready("", 29400, 20000)

    async def take_over(self, directory: Path, run: str) -> bool:
        return self.shares

    async def forward(self, local: int, remote: int) -> None:
        self.forwards.append((local, remote))

    def stop_forwarding(self) -> None:
        self.forwards.clear()

    async def close(self) -> None:
        pass


def moved(shares: Sequence[str], copies: int = 0) -> tuple[dict[str, hosts.Place], list[str]]:
    """The places of a lead and a worker whose host `a` stays away, after both have asked twice to move; a worker is on
    `b`; and the lines that were shown."""
    run, shown = hosts.Hosts(hosts.Placement(("a", "b", "c"), {}, "python"), "rl"), list[str]()
    run.show_by(shown.append, lambda: shown.append("moved"))
    fakes = {name: Fake(name, name in shares) for name in "abc"}
    run.job = cast(Any, SimpleNamespace(needs=dict.fromkeys(("lead", "worker"), SimpleNamespace(gpus=None))))
    run.room, run._hosts, run._rank0, run._leader = room("a", hosts="abc"), cast(Any, fakes), "a", "lead_0"
    run._directory, run._job_settings = Path("kept"), Settings(job="rl", checkpoint_copies=copies)

    async def play() -> dict[str, hosts.Place]:
        places = {}
        for role, ordinal, name in (("lead", 0, "a"), ("worker", 0, "b"), ("worker", 1, "a")):
            place = run.place(role, ordinal)
            place.at, places[place.rank] = cast(Any, fakes[name]), place
        for rank in ("worker_1", "lead_0", "lead_0"):
            if places[rank].host == "a":
                await run.move(places[rank])
        await run.close()
        return places

    async def address(name: str) -> str:
        return f"{name}.example"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssh, "address", address)
        return asyncio.run(play()), shown


AWAY = "a, away for HOST_TIMEOUT=60 s"


def test_rank_0_moves_to_a_host_that_has_its_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for shares, copies in (("b", 0), ("", 1)):
        places, shown = moved(shares, copies)
        assert {rank: place.host for rank, place in places.items()} == {"lead_0": "b", "worker_0": "b", "worker_1": "c"}
        assert shown == [
            f"worker_1: moves from {AWAY}, to c",
            f"lead_0: moves from {AWAY}, to b; the other ranks start again with it",
            "moved",
        ]
        reach = {"MASTER_ADDR": "b.example", "MASTER_PORT": "29400"}
        assert places["worker_0"].variables == reach
        assert places["lead_0"].variables == reach | {"PORT": "29400", "METRICS_PORT": "20000", "RESUME": "1"}


def test_rank_0_waits_where_its_checkpoints_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    places, shown = moved("")
    assert places["lead_0"].host == "a"
    assert [line for line in shown if "lead_0" in line] == [
        f"lead_0: waits for {AWAY}: its checkpoints are not in c:kept, and CHECKPOINT_COPIES=0; set CHECKPOINT_DIR to "
        "one that hosts share"
    ]
    monkeypatch.setenv("MASTER_ADDR", "a.example")
    assert f"lead_0: waits for {AWAY}: MASTER_ADDR names it for the other ranks" in moved("bc", 1)[1]


def test_rank_0_takes_over_its_own_run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ssh, "run", lambda host, socket, words: words)
    there = host.Host("b", "python", tmp_path / "socket", "", pytest.fail)
    directory = tmp_path / "a b's"
    assert not asyncio.run(there.take_over(directory, RUN))
    rundir.lock(directory, rundir.COORDINATOR_LOCK, 0.0).release()
    rundir.write_generation(directory, rundir.Persisted(3, "pi", (), "another"))
    assert not asyncio.run(there.take_over(directory, RUN))
    assert (directory / rundir.COORDINATOR_LOCK).exists()
    rundir.write_generation(directory, rundir.Persisted(3, "pi", (), RUN))
    assert asyncio.run(there.take_over(directory, RUN))
    assert not (directory / rundir.COORDINATOR_LOCK).exists()
