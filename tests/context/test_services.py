"""The members of a generation meet at rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolecall.context.services import Services
from rolecall.wire.connecting import Address
from tests.context.contexts import make

HERE, THERE = Address("lead_0", "127.0.0.1", 1), Address("ps_0", "127.0.0.1", 2)


def test_rank_0_goes_on_when_every_member_knows_the_others(tmp_path: Path) -> None:
    """It may hold the interpreter's lock then: a member without an answer would wait for it, and it for the member."""
    context = make(tmp_path)
    services = Services(frozenset({"lead_0", "ps_0"}), context.supervision, context.progress, lambda: 0)
    services.arrived(HERE)
    services.ready("lead_0")
    answer = services.meet(tuple(THERE))  # the last one
    assert answer.result(1).addresses == (HERE, THERE)
    with pytest.raises(TimeoutError):
        services.wait(0.01)
    assert services.missing() == ["ps_0"]
    services.ready("ps_0")
    assert services.wait(1).addresses == (HERE, THERE)
