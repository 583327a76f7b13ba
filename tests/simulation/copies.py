"""A model of rolecall/copies around its choice, which is under test: what a member's disk holds, and rank 0's part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rolecall.copies import choice
from rolecall.copies.choice import Claim, Known, Return, Source, Stem
from rolecall.errors import CallTimeoutError, PeerLostError
from rolecall.messages.worker import Result
from tests.simulation.rules import CALL_TIMEOUT, HANGING, PHASE, RULES

if TYPE_CHECKING:
    from tests.simulation.promises import Promises
    from tests.simulation.worker import Worker

LOOK = 1.0  # between two looks for a member that is waited for
RETRY = 10.0  # after a checkpoint that could not be copied
COPYING = (0.01, 0.1, 0.1, 0.5, 3.0)  # how long a checkpoint may take to another disk

Then = Callable[[Any], None]
Wait = Callable[[Then], None]  # has a function called with the answer, or with what went wrong
Steps = Generator[Wait, Any, Any]


class CopyError(Exception):
    """A copy that cannot be taken, or cannot be used."""


@dataclass(eq=False)
class Store:
    """What a machine's disk holds for a member; of each checkpoint, whether it is whole."""

    machine: str
    known: Known = field(default_factory=Known)
    held: dict[Stem, bool] = field(default_factory=dict)
    coming: tuple[Worker, Stem] | None = None  # on its way, to this process

    def perform(self, promises: Promises, me: Worker, method: str, arguments: tuple[Any, ...]) -> Any:
        """A method that `me` is called for: its answer, or what it raises."""
        try:
            return getattr(self, method)(promises, me, *arguments)
        except CopyError as error:
            return error

    def copies_claim(self, promises: Promises, me: Worker, generation: int) -> Claim:
        self.known = self.known.begun(generation)
        promises.tells(self, generation)
        return Claim(self.machine, tuple(sorted(self.held, reverse=True)), self.known.checkpoint, self.known.holders)

    def copies_note(self, promises: Promises, me: Worker, known: Known) -> None:
        self.known = self.known.noted(known)
        promises.remembers(self, known)

    def copies_read(self, promises: Promises, me: Worker, checkpoint: Stem) -> None:
        if not self.held.get(checkpoint):
            raise CopyError("is not here, or torn")

    def copies_begin(self, promises: Promises, me: Worker, checkpoint: Stem) -> None:
        if checkpoint[0] < self.known.newest(self.held):
            raise CopyError("a newer generation has begun")
        promises.takes_copy(self, checkpoint)
        self.coming = me, checkpoint

    def copies_commit(
        self, promises: Promises, me: Worker, checkpoint: Stem, whole: bool, kept: Collection[Stem]
    ) -> None:
        if self.coming != (me, checkpoint) or not whole:
            raise CopyError("has not come as a whole")
        self.held[checkpoint] = True
        self.held = {stem: whole for stem, whole in self.held.items() if stem == checkpoint or stem in kept}


class Keeper:
    """Rank 0's part, of `worker`. What keeping.py has a thread wait for, it yields."""

    def __init__(self, worker: Worker) -> None:
        assert worker.session is not None
        self.worker, self.session, self.simulation = worker, worker.session, worker.simulation
        self.clock, self.disk = worker.clock, worker.simulation.disk
        self.here = worker.rank.store
        self.machines: dict[str, str] = {}
        self.holders: dict[str, Stem] = {}
        self.claimed: Mapping[str, Claim] = {}  # what was said last
        self.waits_until = 0.0  # for a holder
        self._wanted: Stem | None = None
        self._changes = self._done = 0
        self._copies = False  # its thread runs
        self._waiters: list[Callable[[], None]] = []

    def go(self, steps: Steps, value: Any = None) -> None:
        """Does `steps`, which wait for answers."""
        try:
            wait = steps.send(value)
        except StopIteration:
            return
        wait(lambda answer: self.clock.at(0, self.worker, self.go, steps, answer))

    def _sleep(self, seconds: float) -> Wait:
        return lambda then: self.clock.at(seconds, self.worker, then, None)

    def _pause(self, seconds: float) -> Wait:
        """Until something changes, or for so long."""

        def wait(then: Then) -> None:
            waits = [then]

            def once() -> None:
                if waits:
                    waits.pop()(None)

            self._waiters.append(once)
            self.clock.at(seconds, self.worker, once)

        return wait

    # -- calls

    def members(self) -> list[str]:
        session = self.session
        return [peer.name for peer in session.attachment.members[1:] if peer.name not in session.lost]

    def _ask(self, name: str, method: str, *arguments: Any) -> Wait:
        def wait(then: Then) -> None:
            session, clock = self.session, self.clock
            quick = method in ("copies_claim", "copies_note")
            if name == session.me.name:
                answer = self.here.perform(self.simulation.promises, self.worker, method, arguments)
                clock.at(0.001, self.worker, then, answer)
            elif session.over or name in session.lost:
                clock.at(0, self.worker, then, PeerLostError(f"{name} was lost"))
            else:
                limit = CALL_TIMEOUT if quick else PHASE
                session.call(
                    name,
                    method,
                    limit,
                    lambda error: then(session.answer if error is None else error),
                    internal=True,
                    arguments=arguments,
                )

        return wait

    def _ask_all(self, names: Collection[str], method: str, *arguments: Any) -> Wait:
        def wait(then: Then) -> None:
            answers: dict[str, Any] = {}

            def answered(name: str, answer: Any) -> None:
                answers[name] = answer
                if len(answers) == len(names):
                    then({name: answers[name] for name in names})

            for name in names:
                self._ask(name, method, *arguments)(partial(answered, name))

        return wait

    def _claims(self) -> Steps:
        names = (self.session.me.name, *self.members())
        answers = yield self._ask_all(names, "copies_claim", self.worker.generation)
        self.claimed = {name: answer for name, answer in answers.items() if isinstance(answer, Claim)}
        self.machines |= {name: claim.machine for name, claim in self.claimed.items()}
        return self.claimed

    # -- back

    def restore(self, then: Callable[[Stem], None]) -> Steps:
        """As Checkpoints.newest: `then` is called with the checkpoint that training goes on from."""
        held, repaired, problem = self.disk.held, set[Stem](), ""
        claims = yield from self._claims()
        if source := choice.source(max(held, default=None), claims):
            problem = yield from self._bring(source, claims)
        torn = True
        while torn and not problem:
            torn = False
            for stem in sorted(held, reverse=True):
                if held[stem]:
                    then(stem)
                    return
                if stem not in repaired:
                    repaired.add(stem)
                    older = max((each for each in held if each < stem), default=None)
                    claims = yield from self._claims()
                    if source := choice.source(older, claims):
                        torn, problem = True, (yield from self._bring(source, claims))
                        break
            else:
                problem = "no usable checkpoint" if held else ""
                if problem:
                    self.simulation.promises.gives_up(self, max(held), problem, 0.0)
        if problem:
            self.worker.end(Result("refused", problem))
        else:
            then((0, 0))

    def _bring(self, source: Source, claims: Collection[str]) -> Steps:
        story, began = self.simulation.story, self.worker.now
        back, told = Return(source, claims, began + RULES.rejoin_timeout), False
        while True:
            while name := back.next():
                self.simulation.ambushes.enter("bringing back")
                yield self._sleep(self.clock.random.choice(COPYING))
                answer = yield self._ask(name, "copies_read", back.checkpoint)
                if answer is None:
                    yield from self._written(back.checkpoint)
                    story.count("checkpoint brought back")
                    story.log(f"checkpoint {back.checkpoint} brought back from {name}")
                    return ""
                story.log(f"the copy of {back.checkpoint} at {name}: {answer}")
                back.failed(name, str(answer), lost=isinstance(answer, PeerLostError | CallTimeoutError))
            if not (absent := back.awaited(self.worker.now)):
                break
            if not told:
                told, self.waits_until = True, self.clock.now + RULES.rejoin_timeout
                story.count("wait for a holder")
                story.log(f"{back.checkpoint} is with {', '.join(absent)}")
            yield self._sleep(LOOK)
            if self.worker.drain:
                self.worker.end(Result("drained", step=back.checkpoint[1]))
            back.look((yield from self._claims()))
        problem = f"the newest checkpoint {back.checkpoint} cannot be brought back: {back.problem}"
        self.waits_until = 0.0
        self.simulation.promises.gives_up(self, back.checkpoint, problem, self.worker.now - began)
        return problem

    def _written(self, checkpoint: Stem) -> Steps:
        while self.disk.hangs_until > self.clock.now:
            yield self._sleep(HANGING)
        yield self._sleep(self.disk.latency(self.clock))
        self.disk.held[checkpoint] = True

    # -- copies of what rank 0 writes

    def written(self, checkpoint: Stem) -> None:
        self._wanted = checkpoint
        self._notify()
        if not self._copies:
            self._copies = True
            self.go(self._run())

    def changed(self, name: str) -> None:
        """A member has joined, or was lost."""
        self.machines.pop(name, None)
        self.holders.pop(name, None)
        self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()

    def wait(self, then: Callable[[], None]) -> Steps:
        """Until members hold the newest checkpoint, for `drain_timeout` at most."""
        end = self.worker.now + RULES.drain_timeout
        while self._copies and self._done != self._changes and self.worker.now < end:
            yield self._pause(end - self.worker.now)
        then()

    def _run(self) -> Steps:
        while True:
            while self._done == self._changes:
                yield self._pause(1000.0)
            changes, wanted = self._changes, self._wanted
            problem = (yield from self._copy(wanted)) if wanted else ""
            if not problem:
                self._done = changes
                self._wake()
            elif self._changes == changes:
                yield self._pause(RETRY)

    def _copy(self, checkpoint: Stem) -> Steps:
        problem, disk, members = "", self.disk, self.members()
        changes = self._changes
        if not {*members} <= self.machines.keys():
            yield from self._claims()
        machines = {name: self.machines[name] for name in members if name in self.machines}
        chosen = choice.holders(machines, self.here.machine, self.simulation.copies, self.holders)
        for name in chosen:
            if self.holders.get(name) == checkpoint:
                continue
            answer = yield self._ask(name, "copies_begin", checkpoint)
            if answer is None:
                self.simulation.ambushes.enter("copying")
                yield self._sleep(self.clock.random.choice(COPYING))
                commit = checkpoint, disk.held.get(checkpoint, False), tuple(disk.held)
                answer = yield self._ask(name, "copies_commit", *commit)
            if answer is None:
                self.holders[name] = checkpoint
            elif checkpoint not in disk.held:
                return ""
            else:
                problem = f"{name}: {answer}"
                self.simulation.story.log(f"{checkpoint} is not copied to {problem}")
        holders = tuple(name for name in chosen if self.holders.get(name) == checkpoint)
        if holders:
            note = Known(self.worker.generation, checkpoint, holders)
            answers = yield self._ask_all(machines, "copies_note", note)
            well = not problem and changes == self._changes
            self.simulation.promises.notes(self, checkpoint, holders, machines, well=well)
            self.simulation.ambushes.enter("copied")
            problem = next((str(error) for error in answers.values() if error is not None), problem)
        return problem
