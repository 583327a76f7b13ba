"""A worker that stays is a part of one generation after the other."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.context.context import Context
from rolecall.declare.task import Attachment
from rolecall.errors import PeerLostError, UsageError
from rolecall.wire.messages import Deadline, Request
from tests.rank.attaching import LEAD, Lead, Player, World, players
from tests.wire.wires import DEADLINE, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_the_same_object_serves_one_generation_after_the_other(world: World) -> None:
    one = world.stayer(0)
    one.until("loaded", 0)
    one.supervisor.parts.clear()
    for generation in (1, 2):
        rank0 = world.begin(generation, players(0), one)
        assert rank0.context.call("player_0", Player.double, 4).result(DEADLINE) == 8
        assert one.context.call(one.context.rank0, Lead.double, 5).result(DEADLINE) == 10
        assert (one.context.generation, one.context.rank) == (generation, 1)
        one.attacher.detach()
        rank0.end()
    world.begin(2, players(1), one)  # the same again, as another part
    assert one.supervisor.parts == [
        ("connected", 1, 0),
        ("detached", 1, 0),
        ("connected", 2, 0),
        ("detached", 2, 0),
        ("connected", 2, 1),
    ]
    until(lambda: len(one.player.seen) == 6, "its run")
    assert one.player.seen == [(what, number) for number in (1, 2, 2) for what in ("attached", "run")]
    assert not one.supervisor.failures


def test_calls_end_with_the_generation_at_both_ends(world: World) -> None:
    one = world.stayer(0)
    rank0 = world.begin(1, players(0), one)
    lost = list[str]()
    one.context.on_lost(lost.append)
    there = [rank0.context.call("player_0", method) for method in (Player.hold, Player.pause)]
    stream = rank0.context.call("player_0", Player.count)
    assert next(stream) == 0
    back = one.context.call("lead_0", Lead.hold)
    for semaphore in (one.player.entered, one.player.entered, rank0.lead.entered):
        assert semaphore.acquire(timeout=DEADLINE)
    one.attacher.detach()
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        back.result(1)
    for call in there:
        with pytest.raises(PeerLostError):
            call.result(DEADLINE)
    assert one.player.cancelled.wait(DEADLINE)
    with pytest.raises(PeerLostError, match="generation 1 has ended"):
        one.context.call("lead_0", Lead.double, 1)
    rank0.end()
    world.begin(2, players(0), one)
    # what still runs belongs to the generation that has ended
    one.player.go.set()
    assert one.player.entered.acquire(timeout=DEADLINE)
    assert [str(answer) for answer in one.player.answers] == ["generation 1 has ended"]
    assert not lost


def test_a_call_of_an_ended_generation_is_not_executed(world: World) -> None:
    """It has waited for its turn."""
    go = threading.Event()
    one = world.stayer(0, lambda player: setattr(player, "on_run", lambda: go.wait(DEADLINE)))
    rank0 = world.begin(1, players(0), one)
    until(lambda: ("run", 1) in one.player.seen, "its run")
    rank0.context.call("player_0", Player.thread)
    until(lambda: one.context.dispatcher._turns.qsize(), "it waits")
    one.attacher.detach()
    rank0.end()
    rank0 = world.begin(2, players(0), one)
    go.set()
    assert rank0.context.call("player_0", Player.thread).result(DEADLINE) == "main of player_0"
    assert one.player.seen == [("attached", 1), ("run", 1), ("attached", 2)]  # the first run went on


def test_run_that_loses_its_generation_runs_again(world: World) -> None:
    def run(player: Player) -> None:
        player.context.call(player.context.rank0, Lead.hold).result()

    one = world.stayer(0, lambda player: setattr(player, "on_run", lambda: run(player)))
    for generation, ordered in ((1, True), (2, False)):
        rank0 = world.begin(generation, players(0), one)
        assert rank0.lead.entered.acquire(timeout=DEADLINE)
        if ordered:
            one.attacher.detach()
            rank0.end()
        else:  # it notices first
            rank0.end()
            until(lambda: one.context.group.has_lost_rank0(), "its loss")
            one.attacher.detach()
    rank0 = world.begin(3, players(0), one)
    assert rank0.lead.entered.acquire(timeout=DEADLINE)
    assert [each for each in one.player.seen if each[0] == "run"] == [("run", 1), ("run", 2), ("run", 3)]
    assert not one.supervisor.failures


@pytest.mark.parametrize("error", [ValueError("on purpose"), PeerLostError("player_1 does not answer")])
def test_run_that_fails_in_its_generation_ends_the_worker(world: World, error: Exception) -> None:
    def fail() -> None:
        raise error

    one = world.stayer(0, lambda player: setattr(player, "on_run", fail))
    world.begin(1, players(0), one)
    one.main.join(DEADLINE)
    assert one.supervisor.failures == [error]


def test_a_constructor_that_needs_its_peers_waits_for_them(world: World) -> None:
    def make(context: Context[Any]) -> Player:
        player = Player(context)
        player.answers.append(context.call("lead_0", Lead.double, 3).result())
        player.answers.append(context.queue("q", 2, at=context.me).put(1))
        return player

    one = world.stayer(0, make=make)
    one.until("loaded", 0)
    world.begin(1, players(0), one)
    until(lambda: ("run", 1) in getattr(getattr(one, "player", None), "seen", []), "its run")
    assert one.player.answers == [6, None]
    assert one.player.seen == [("attached", 1), ("run", 1)]


def test_calls_wait_until_attached_has_returned(world: World) -> None:
    go = threading.Event()

    def attached(player: Player) -> None:
        player.answers.append(player.context.call("lead_0", Lead.double, 2).result())
        assert go.wait(DEADLINE)

    one = world.stayer(0, lambda player: setattr(player, "on_attached", lambda: attached(player)))
    one.until("loaded", 0)
    rank0 = world.rank0(1, players(0))
    one.attach(1, players(0))
    call = rank0.met().context.call("player_0", Player.double, 1)
    until(lambda: one.player.answers == [4], "its own call")
    until(lambda: one.context.dispatcher._early, "the call")
    assert ("connected", 1, 0) not in one.supervisor.parts
    go.set()
    assert call.result(DEADLINE) == 2
    one.until("connected", 1)


def test_attached_is_given_up_with_its_generation(world: World) -> None:
    def attached(player: Player) -> None:
        if player.context.generation == 1:
            player.context.call("lead_0", Lead.hold).result()

    one = world.stayer(0, lambda player: setattr(player, "on_attached", lambda: attached(player)))
    one.until("loaded", 0)
    rank0 = world.rank0(1, players(0))
    one.attach(1, players(0))
    assert rank0.met().lead.entered.acquire(timeout=DEADLINE)
    one.attacher.detach()
    rank0.end()
    world.begin(2, players(0), one)
    assert [part[:2] for part in one.supervisor.parts] == [("loaded", 0), ("detached", 1), ("connected", 2)]
    assert not one.supervisor.failures


def test_a_meeting_is_given_up_with_its_generation(world: World) -> None:
    one = world.stayer(0)
    one.until("loaded", 0)
    one.attach(1, players(0))  # nobody is there
    one.attacher.detach()
    world.begin(2, players(0), one)
    world.members[-1].context.group.session.end()  # type: ignore[union-attr]
    one.attacher.detach()
    rank0 = world.rank0(3, players(0, 0))  # the other one does not come
    one.attach(3, players(0, 0))
    until(lambda: LEAD.name in rank0.context.services._addresses and len(rank0.context.services._addresses) == 2, "one")
    rank0.end()
    one.until("lost", 3)  # by itself
    world.begin(4, players(0), one)
    assert not one.supervisor.failures


# ---- joins


def test_a_member_joins_a_running_generation(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    rank0 = world.begin(1, players(0), one)
    joined = {rank0: list[str](), one: list[str]()}
    for member, names in joined.items():
        member.context.on_joined(names.append)
    members = players(0, 1)
    two.attach(1, members)
    two.until("connected", 1, 1)
    assert two.context.call("lead_0", Lead.double, 1).result(DEADLINE) == 2  # before the others are told
    for member in joined:
        member.context.group.update(Attachment(1, member.context.me, members))
        assert [peer.name for peer in member.context.peers("player")] == ["player_0", "player_1"]
        assert member.context.call("player_1", Player.double, 3).result(DEADLINE) == 6
        assert dict(member.context.call_each(Player.double, 1)) == dict.fromkeys(members[1:], 2)
    assert two.context.call("player_0", Player.double, 4).result(DEADLINE) == 8
    assert (two.context.rank, rank0.context.world_size) == (2, 3)
    until(lambda: list(joined.values()) == [["player_1"], ["player_1"]], "what is told")


def test_a_lost_member_joins_again(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    rank0 = world.begin(1, players(0, 0), one, two)
    told, context = list[tuple[str, str]](), rank0.context
    context.on_lost(lambda name: told.append(("lost", name)))
    context.on_joined(lambda name: told.append(("joined", name)))
    for member in (context, one.context):
        assert member.call("player_1", Player.double, 3).result(DEADLINE) == 6
    two.attacher.detach()  # the others notice
    until(lambda: rank0.supervisor.lost == [players(0, 0)[2]] and one.context.lost, "its loss")
    with pytest.raises(PeerLostError):
        context.call("player_1", Player.double, 1).result(DEADLINE)
    members = players(0, 1)
    for member in (context, one.context):
        member.group.update(Attachment(1, member.me, members[:2] + players(0, 0)[2:], ("player_1",)))
    two.attach(1, members)
    two.until("connected", 1, 1)
    for member in (context, one.context):
        member.group.update(Attachment(1, member.me, members))
        assert member.call("player_1", Player.double, 3).result(DEADLINE) == 6
    assert two.context.call("player_0", Player.double, 3).result(DEADLINE) == 6
    until(lambda: told == [("lost", "player_1"), ("joined", "player_1")], "what is told")
    # what is late about its earlier part does not count
    context.give_up(players(0, 0)[2])
    context.group.disconnected("player_1", 0, PeerLostError("late"))
    assert rank0.supervisor.lost == [players(0, 0)[2]]
    assert not context.lost


def test_a_member_is_lost_and_back_in_one_update(world: World) -> None:
    one, two = world.stayer(0), world.stayer(1)
    rank0 = world.begin(1, players(0, 0), one, two)
    told = list[str]()
    rank0.context.on_lost(lambda name: told.append(f"-{name}"))
    rank0.context.on_joined(lambda name: told.append(f"+{name}"))
    held = rank0.context.call("player_1", Player.hold)
    assert two.player.entered.acquire(timeout=DEADLINE)
    rank0.context.group.update(Attachment(1, LEAD, players(0, 2)))
    until(lambda: told == ["-player_1", "+player_1"], "what is told")
    with pytest.raises(PeerLostError):
        held.result(DEADLINE)


def test_a_stale_part_can_neither_call_nor_be_called(world: World) -> None:
    one, old = world.stayer(0), world.stayer(1)
    rank0 = world.begin(1, players(0, 0), one, old)
    new = world.stayer(1)
    new.attach(1, players(0, 1))
    new.until("connected", 1, 1)  # rank 0 has taken its call
    with pytest.raises(PeerLostError):
        old.context.call("lead_0", Lead.double, 1).result(DEADLINE)
    members = players(0, 1)
    rank0.context.group.update(Attachment(1, LEAD, members))
    one.context.group.update(Attachment(1, members[1], members))
    with pytest.raises(PeerLostError):
        old.context.call("player_0", Player.double, 1).result(DEADLINE)
    assert one.context.call("player_1", Player.double, 1).result(DEADLINE) == 2
    assert new.player.context.call("player_0", Player.double, 2).result(DEADLINE) == 4


def test_rank_0_has_a_member_replaced(world: World) -> None:
    one = world.stayer(0)
    rank0 = world.begin(1, players(0), one)
    for context, name, problem in (
        (one.context, "player_0", "only rank 0"),
        (rank0.context, "lead_0", "this is rank 0"),
        (rank0.context, "player_7", "no peer 'player_7'"),
    ):
        with pytest.raises(UsageError, match=problem):
            context.replace(name)
    rank0.context.replace(players(0)[1])
    assert (rank0.supervisor.replaced, rank0.supervisor.lost) == ([players(0)[1]], [])
    assert not rank0.context.peers("player")


def test_the_owner_keeps_its_queues(world: World) -> None:
    one = world.stayer(0)
    for generation in (1, 2):
        rank0 = world.begin(generation, players(0), one)
        queue = rank0.context.queue("q", 3, at=rank0.context.members[1])
        if generation == 1:
            queue.put("kept")
        else:
            assert queue.get(DEADLINE) == "kept"
        one.attacher.detach()
        rank0.end()


# ---- what is left behind


def test_nothing_is_left_behind(world: World) -> None:
    one = world.stayer(0)
    one.until("loaded", 0)

    def cycle(number: int) -> None:
        rank0 = world.begin(number, players(0), one)
        assert rank0.context.call("player_0", Player.double, 4).result(DEADLINE) == 8
        assert one.context.call("lead_0", Lead.double, 4).result(DEADLINE) == 8
        one.attacher.detach()
        rank0.end()

    cycle(1)
    gc.collect()
    threads, files = set(threading.enumerate()), len([*Path("/proc/self/fd").iterdir()])
    for number in range(2, 22):
        cycle(number)
    gc.disable()  # nothing waits for it
    try:
        until(lambda: not set(threading.enumerate()) - threads, "the ends of threads")
        until(lambda: len([*Path("/proc/self/fd").iterdir()]) <= files, "the ends of files")
    finally:
        gc.enable()
    assert not [*world.directory.rglob("wire-*")]


def test_what_is_internal_needs_no_object(world: World) -> None:
    """A caller asks for stacks, say, while its call waits."""
    go = threading.Event()
    one = world.stayer(0, lambda player: setattr(player, "on_attached", lambda: go.wait(DEADLINE)))
    one.until("loaded", 0)
    rank0 = world.rank0(1, players(0))
    one.attach(1, players(0))
    waiting = rank0.met().context.call("player_0", Player.double, 1)
    request = Request("examine", ("agent_0", ((1, "double"),)), {}, DEADLINE, internal=True)
    rank0.context.group.connected.call("player_0", request, Deadline(DEADLINE)).result(DEADLINE)
    assert not waiting.done()
    go.set()
    assert waiting.result(DEADLINE) == 2
