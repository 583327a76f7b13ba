"""Rank 0 knows who has what of a name."""

from __future__ import annotations

import asyncio

import pytest

from rolecall.weights import registry as module
from rolecall.weights.manifest import VersionId
from rolecall.weights.registry import Offer, Registry

LEAD, ONE, TWO = ("lead_0", 0), ("player_0", 0), ("player_1", 0)
FIRST, SECOND = VersionId(1, 1, "lead_0"), VersionId(1, 2, "lead_0")
LONG = 20.0


@pytest.fixture(autouse=True)
def gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.0)


def test_whoever_waits_is_offered_what_comes_and_shares_it() -> None:
    async def run() -> None:
        registry = Registry(dict)
        for member in (ONE, TWO):
            await registry.weights_tell("policy", member, None, True)
        waiting = [asyncio.ensure_future(registry.weights_newer("policy", None, LONG)) for _ in (ONE, TWO)]
        await asyncio.sleep(0)
        await registry.weights_tell("other", LEAD, SECOND, False)
        await registry.weights_tell("policy", LEAD, FIRST, False)
        offer = Offer(FIRST, ("lead_0",), ("player_0", "player_1"))
        assert await asyncio.gather(*waiting) == [offer, offer]
        await registry.weights_tell("policy", ONE, FIRST, True)
        late = ("player_2", 4)
        await registry.weights_tell("policy", late, None, True)
        assert await registry.weights_newer("policy", None, LONG) == offer._replace(holders=("lead_0", "player_0"))
        assert await registry.weights_newer("policy", FIRST, 0.0) is None
        await registry.weights_tell("policy", LEAD, SECOND, False)
        assert await registry.weights_newer("policy", FIRST, LONG) == Offer(
            SECOND, ("lead_0",), ("player_0", "player_1", "player_2")
        )

    asyncio.run(run())


def test_who_is_lost_holds_nothing_and_a_new_part_is_another() -> None:
    async def run() -> None:
        parts = dict[str, int]()
        registry = Registry(lambda: parts)
        await registry.weights_tell("policy", ONE, FIRST, True)
        await registry.weights_tell("policy", TWO, FIRST, True)
        await registry.weights_tell("policy", LEAD, SECOND, False)
        parts["lead_0"] = 1  # its part 0 is lost: the newest is what others have
        assert await registry.weights_newer("policy", None, LONG) == Offer(FIRST, ("player_0", "player_1"), ())
        assert await registry.weights_newer("policy", FIRST, 0.0) is None
        parts["player_0"] = 1  # lost, and back
        await registry.weights_tell("policy", ("player_0", 1), None, True)
        assert await registry.weights_newer("policy", None, LONG) == Offer(FIRST, ("player_1",), ())
        waiting = asyncio.ensure_future(registry.weights_newer("policy", FIRST, LONG))
        await asyncio.sleep(0)
        again = VersionId(1, 3, "lead_0")
        await registry.weights_tell("policy", ("lead_0", 1), again, False)
        assert (await waiting) == Offer(again, ("lead_0",), ("player_0", "player_1"))

    asyncio.run(run())


def test_publications_are_numbered_by_name() -> None:
    async def run() -> None:
        registry = Registry(dict)
        assert [await registry.weights_number(name) for name in ("policy", "policy", "other")] == [1, 2, 1]

    asyncio.run(run())


def test_a_waiter_that_gives_up_leaves_nothing() -> None:
    async def run() -> None:
        registry = Registry(dict)
        waiting = asyncio.ensure_future(registry.weights_newer("policy", None, LONG))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await registry.weights_newer("policy", None, 0.0) is None
        await registry.weights_tell("policy", LEAD, FIRST, False)
        assert waiting.cancelled()

    asyncio.run(run())
