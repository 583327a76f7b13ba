"""A job that sends MARKER from rank to rank, as an argument and as an answer, small and large."""

from __future__ import annotations

from rolecall import Context, Job, Role, Settings, remote

MARKER = b"a marker that nobody else may read "


class Keeper:
    def __init__(self, context: Context[Settings]) -> None:
        self.context = context

    @remote
    def keep(self, secret: bytes) -> bytes:
        return secret

    @remote
    def pass_on(self, secret: bytes) -> bytes:
        """By way of rank 0, and of this very rank."""
        again = self.context.call(self.context.rank0, Lead.keep, secret).result()
        return self.context.call(self.context.me, Keeper.keep, again).result()


class Lead:
    def __init__(self, context: Context[Settings]) -> None:
        self.context = context

    @remote
    def keep(self, secret: bytes) -> bytes:
        return secret

    def run(self) -> dict[str, int]:
        self.context.restore({})
        for _ in self.context.steps(3):
            for count in (1, 100, 100_000):
                for method in (Keeper.keep, Keeper.pass_on):
                    for answer in self.context.call_all(method, MARKER * count):
                        assert answer == MARKER * count
        return {"kept": 1}


JOB = Job([Role("lead", Lead), Role("keeper", Keeper, count=2)])
