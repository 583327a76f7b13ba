"""Members of one process that meet by real sockets: a lead of each generation, and players that stay."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.declare.remote import remote
from rolecall.declare.spec import Job, Role
from rolecall.declare.task import Attachment, Peer
from rolecall.rank.attaching import Attacher
from rolecall.torch_rpc.distributed import connect
from rolecall.wire.session import Session
from tests.context.contexts import Supervisor
from tests.ports import free_ports
from tests.wire.wires import DEADLINE, until

LEAD = Peer("lead", 0, 0)
_numbers = itertools.count()


class Lead:
    def __init__(self, context: Context[Any]) -> None:
        self.context = context
        self.go, self.entered = threading.Event(), threading.Semaphore(0)

    def run(self) -> None: ...

    @remote
    def double(self, number: int) -> int:
        return 2 * number

    @remote
    def hold(self) -> None:
        self.entered.release()
        self.go.wait(DEADLINE)


class Player:
    """What happens to it is in `seen`, in order."""

    def __init__(self, context: Context[Any]) -> None:
        self.context, self.seen = context, list[Any]()
        self.go, self.entered, self.cancelled = threading.Event(), threading.Semaphore(0), threading.Event()
        self.on_attached: Callable[[], object] = lambda: None
        self.on_run: Callable[[], object] = lambda: None
        self.answers = list[Any]()

    def attached(self, context: Context[Any]) -> None:
        self.seen.append(("attached", context.generation))
        self.on_attached()

    def run(self) -> None:
        self.seen.append(("run", self.context.generation))
        self.on_run()

    @remote
    def double(self, number: int) -> int:
        return 2 * number

    @remote(turn=True)
    def thread(self) -> str:
        return threading.current_thread().name

    @remote
    def hold(self) -> int:
        self.entered.release()
        self.go.wait(DEADLINE)
        try:
            self.answers.append(self.context.call(self.context.rank0, Lead.double, 21).result())
        except Exception as error:
            self.answers.append(error)
        self.entered.release()
        return 1

    @remote
    async def pause(self) -> None:
        self.entered.release()
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            self.cancelled.set()

    @remote(stream=True)
    def count(self) -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            self.cancelled.set()


JOB = Job([Role("lead", Lead), Role("player", Player, count=2, minimum=1)])


def players(*joins: int) -> tuple[Peer, ...]:
    """The members of a generation: the lead, and players with these joins."""
    return LEAD, *(Peer("player", number, 1 + number, join) for number, join in enumerate(joins))


class Member:
    """A context of one member, its supervisor, and a folder."""

    def __init__(self, world: World, name: str, attachment: Attachment | None) -> None:
        self.directory = world.directory / f"{name}-{next(_numbers)}"
        self.directory.mkdir()
        self.supervisor = Supervisor()
        self.context: Context[Any] = Context(
            world.settings,
            attachment,
            telemetry.build(telemetry.WORKER, CollectorRegistry()),
            JOB,
            self.supervisor,
            place=Peer("player", int(name[-1]), -1),
            seeds=(1, int(name[-1])),
        )

    def until(self, kind: str, generation: int, join: int = 0) -> None:
        until(lambda: (kind, generation, join) in self.supervisor.parts, f"{kind} {generation} {join}")


class Rank0(Member):
    """The lead of one generation."""

    def __init__(self, world: World, attachment: Attachment) -> None:
        super().__init__(world, LEAD.name, attachment)
        self.lead = Lead(self.context)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._thread.start()

    def _meet(self) -> None:
        try:
            connect(self.context, self.directory)
            self.context.serve(self.lead)
        except Exception as error:
            self.error = error

    def met(self) -> Rank0:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the generation has not met"
        if self.error:
            raise self.error
        return self

    def end(self) -> None:
        assert self.context.group.session is not None
        self.context.group.session.end()


class Stayer(Member):
    """A player whose worker stays. `prepare` sets up its object."""

    def __init__(
        self,
        world: World,
        number: int,
        prepare: Callable[[Player], object] = lambda _: None,
        *,
        make: Callable[[Context[Any]], Player] = Player,
    ) -> None:
        self.name = f"player_{number}"
        super().__init__(world, self.name, None)
        self.player: Player
        self._prepare, self._make = prepare, make
        self.attacher = Attacher(self.context, self._connect, stays=True)
        self.main = threading.Thread(target=self._run, name=f"main of player_{number}", daemon=True)
        self.main.start()

    def _connect(self, session: Session) -> None:
        connect(self.context, self.directory, None, session)

    def _run(self) -> None:
        try:
            player = self._make(self.context)
            self._prepare(player)
            self.player = player
            self.attacher.provide(functools.partial(self.context.serve, player), player.attached)
            self.supervisor.report_loaded()
            self.attacher.run_forever(player.run)
        except Exception as error:
            self.supervisor.fail(error)

    def attach(self, generation: int, members: tuple[Peer, ...], lost: tuple[str, ...] = ()) -> None:
        self.attacher.attach(Attachment(generation, self.place(members), members, lost))

    def place(self, members: tuple[Peer, ...]) -> Peer:
        return next(peer for peer in members if peer.name == self.name)


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (port,) = free_ports(1)
        self.settings = Settings(
            job="players",
            tls="off",
            master_addr="127.0.0.1",
            bind_addr="127.0.0.1",
            master_port=port,
            device="cpu",
            lease_seconds=1,
            connect_timeout=10,
        )
        self.members: list[Member] = []

    def stayer(self, number: int, prepare: Callable[[Player], object] = lambda _: None, **options: Any) -> Stayer:
        stayer = Stayer(self, number, prepare, **options)
        self.members.append(stayer)
        return stayer

    def begin(self, generation: int, members: tuple[Peer, ...], *stayers: Stayer) -> Rank0:
        """A generation whose members have met."""
        rank0 = self.rank0(generation, members)
        for stayer in stayers:
            stayer.attach(generation, members)
        rank0.met()
        for stayer in stayers:
            stayer.until("connected", generation, stayer.place(members).join)
        return rank0

    def rank0(self, generation: int, members: tuple[Peer, ...], lost: tuple[str, ...] = ()) -> Rank0:
        rank0 = Rank0(self, Attachment(generation, LEAD, members, lost))
        self.members.append(rank0)
        return rank0

    def close(self) -> None:
        for member in self.members:
            if session := member.context.group.session:
                session.end()
