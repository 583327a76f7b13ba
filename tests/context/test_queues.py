"""A queue at its owner: what its metrics say."""

from __future__ import annotations

import asyncio
import queue
import weakref
from pathlib import Path
from typing import Any

import pytest

from rolecall.context.context import Context
from rolecall.context.queues import Queue, Queues
from tests.context.contexts import make, value


def of(context: Context[Any], metric: str, *labels: str) -> float:
    return value(getattr(context.metrics, metric).labels("q", *labels))


def test_metrics_follow_a_queue(tmp_path: Path) -> None:
    context = make(tmp_path)
    items: Queue[int] = context.queue("q", 2)
    assert (of(context, "queue_size"), of(context, "queue_depth")) == (2, 0)
    items.put(1)
    items.put(2)
    waiting = items.put_async(3)
    assert (of(context, "queue_depth"), of(context, "queue_items")) == (2, 2)  # the third waits for room
    assert items.get() == 1
    waiting.result(0)
    assert (of(context, "queue_depth"), of(context, "queue_items")) == (2, 3)
    assert [items.get(), items.get()] == [2, 3]
    assert of(context, "queue_depth") == 0
    assert of(context, "queue_wait_seconds", "put") > 0 == of(context, "queue_wait_seconds", "get")


@pytest.mark.parametrize("method", ["put", "get"])
def test_a_wait_that_is_given_up_counts(tmp_path: Path, method: str) -> None:
    context = make(tmp_path)
    items: Queue[int] = context.queue("q", 1)
    if method == "put":
        items.put(1)
        with pytest.raises(queue.Full):
            items.put(2, timeout=0.01)
    else:
        with pytest.raises(queue.Empty):
            items.get(timeout=0.01)
    assert 0.01 <= of(context, "queue_wait_seconds", method) < 5


class Item:
    """What a queue may keep."""


@pytest.mark.parametrize("how", ["here", "of a peer", "cancelled"])
def test_what_is_given_up_is_kept_no_more(tmp_path: Path, how: str) -> None:
    queues = make(tmp_path).group.queues
    queues.open("full", 1).put(0)
    kept = list[weakref.ref[Any]]()
    for _ in range(3):
        item = Item()
        kept.append(weakref.ref(item))
        match how:
            case "here":
                with pytest.raises(queue.Full):
                    Queue("full", 1, queues.open("full", 1), lambda *_: pytest.fail("a call"), 10.0).put(
                        item, timeout=0
                    )
            case "of a peer":
                assert not asyncio.run(queues.queue_put("full", 1, item, 0.001))
            case _:
                putter = queues.open("full", 1).put(item)
                putter.cancel()
                kept.append(weakref.ref(putter))
                getter = queues.open("empty", 1).get()
                getter.cancel()
                kept.append(weakref.ref(getter))
                del putter, getter
        del item
    assert [each for each in kept if each() is not None] == []
    assert queues.open("full", 1).snapshot() == [0]


def test_a_new_owner_begins_with_the_depth_that_it_restores(tmp_path: Path) -> None:
    before: Queue[int] = make(tmp_path).queue("q", 3)
    for number in range(3):
        before.put(number)
    context = make(tmp_path)
    context.metrics.queue_depth.labels("q").set(3)  # its worker's files have the value of the one before
    items: Queue[int] = context.queue("q", 3)
    assert of(context, "queue_depth") == 0
    items.load_state_dict(before.state_dict())
    assert of(context, "queue_depth") == 3


def test_an_item_whose_getter_has_gone_is_in_the_queue_again(tmp_path: Path) -> None:
    context = make(tmp_path)
    queues: Queues = context.group.queues

    async def steps() -> None:
        getter = asyncio.create_task(queues.queue_get("q", 2, None))
        await asyncio.sleep(0)  # it waits
        queues.open("q", 2).put("item")
        getter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getter

    asyncio.run(steps())
    assert of(context, "queue_depth") == len(queues.open("q", 2)) == 1
