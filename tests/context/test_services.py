"""The members of a generation meet at rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolecall.errors import PeerLostError
from rolecall.wire import clock
from rolecall.wire.connecting import Address
from tests.context.contexts import AGENT, ONE, TWO, make

HERE, THERE = Address("agent_0", "127.0.0.1", 1), Address("observer_0", "127.0.0.1", 2)


def test_rank_0_goes_on_when_every_member_knows_the_others(tmp_path: Path) -> None:
    """It may hold the interpreter's lock then: a member without an answer would wait for it, and it for the member."""
    context = make(tmp_path)
    services = context.services
    context.group.lose(TWO)
    services.expect()
    services.arrived(HERE)
    services.ready(AGENT.name)
    answer = services.meet(THERE)  # the last one
    assert answer.result(1) == (HERE, THERE)
    with pytest.raises(TimeoutError):
        services.wait(0.01)
    assert services.missing() == [ONE.name]
    services.ready(ONE.name)
    assert services.wait(1) == (HERE, THERE)


def test_one_that_is_lost_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    context = make(tmp_path)
    services = context.services
    services.expect()
    services.arrived(HERE)
    services.ready(AGENT.name)
    answer = services.meet(THERE)
    services.ready(ONE.name)
    assert not answer.done()
    assert services.missing() == [TWO.name]
    context.group.lose(TWO)
    assert answer.result(1) == services.wait(1) == (HERE, THERE)


def test_who_joins_later_meets_at_once_and_is_found(tmp_path: Path) -> None:
    context = make(tmp_path)
    services = context.services
    context.group.lose(TWO)
    services.expect()
    for address in (HERE, THERE):
        services.arrived(address)
    with pytest.raises(PeerLostError, match="observer_1 was lost"):
        services.address(TWO.name, 0)
    early = services.address(TWO.name, 1)  # before it is there
    assert not early.done()
    joining = Address(TWO.name, "127.0.0.1", 3, join=1)
    assert services.meet(joining).result(0) == (HERE, THERE, joining)
    assert early.result(0) == services.address(TWO.name, 0).result(0) == joining
    services.arrived(joining._replace(join=0, port=4))  # late
    assert services.address(TWO.name, 1).result(0) == joining


def test_no_wait_ends_while_a_member_is_debugged() -> None:
    clock.hold("somebody")
    looks = iter([False, False, True])
    assert clock.wait(lambda _: next(looks), 1e-9)
    clock.hold("somebody", False)
    assert not clock.wait(lambda _: False, 1e-9)
