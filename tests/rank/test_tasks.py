"""Tasks that are cancelled end, also where a cancellation gets lost on the way."""

from __future__ import annotations

import asyncio

from rolecall.rank import tasks


def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = list[int]()

    async def deaf() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(1)

    async def broken() -> None:
        raise ValueError

    async def main() -> None:
        everyone = [asyncio.create_task(one()) for one in (deaf, broken)]
        await asyncio.sleep(0)  # they begin
        await tasks.cancel(everyone)
        assert everyone[0].cancelled()
        assert isinstance(everyone[1].exception(), ValueError)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert lost == [1]
    asyncio.run(tasks.cancel(()))
