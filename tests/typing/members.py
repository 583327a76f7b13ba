"""A role whose methods the programs beside this file call."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

from rolecall import Context, Settings, remote


class Counter:
    def __init__(self, context: Context[Settings]) -> None:
        self.total = context.seed()

    @remote
    def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    @remote(idempotent=True)
    def describe(self, name: str, unit: str = "") -> dict[str, float]:
        return {f"{name} {unit}": float(self.total)}

    @remote(serial=True)
    async def scored(self, item: str, weights: dict[str, float], *, scale: float = 1.0) -> float:
        return weights[item] * scale * self.total

    @remote(turn=True)
    def reset(self) -> None:
        self.total = 0

    @remote(stream=True)
    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    @remote
    async def later(self, text: str) -> str:
        return text

    @remote
    def promised(self, share: float) -> concurrent.futures.Future[float]:
        answer: concurrent.futures.Future[float] = concurrent.futures.Future()
        answer.set_result(share * self.total)
        return answer
