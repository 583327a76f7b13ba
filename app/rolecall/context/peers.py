"""A rank's view of its generation: who it is, who its peers are, and calls to them."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.context.pace import Deadline, Pace, Phase
from rolecall.context.progress import Supervision
from rolecall.declare.remote import NOT_SERVED, is_in_turn, require_unbound
from rolecall.declare.spec import Job
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.record.recorder import recorder

S = TypeVar("S", bound=Settings)
Lost = Literal["skip", "raise", "answer"]
EXAMINED = 2.0  # seconds that a call may take past its deadline, to find out why
Answers = queue.SimpleQueue[tuple[str, Any]]


@dataclass
class Peers(Generic[S]):
    """`mapped` are peers that CUDA tensors can be sent to."""

    settings: S
    me: Peer
    members: tuple[Peer, ...]
    generation: int
    metrics: Any
    job: Job | None = None
    supervision: Supervision = field(default_factory=Supervision)
    lost: set[str] = field(default_factory=set)
    mapped: set[str] = field(default_factory=set)
    transport: Any = None  # `rolecall.torch_rpc.rpc.TorchRpc`, once connected
    store: Any = None  # the generation's torch Store, where its workers meet
    _drain: threading.Event = field(default_factory=threading.Event)
    _listeners: list[Callable[[str], None]] = field(default_factory=list)
    _answers: list[Answers] = field(default_factory=list)  # of `call_each`, under way

    def __post_init__(self) -> None:
        self.logger = telemetry.log()
        self.pace = Pace(self.settings.phase_timeout, self.settings.stuck_seconds, first=self.me.rank == 0)

    @property
    def rank(self) -> int:
        """This rank, from 0 on, among the members of the generation."""
        return self.me.rank

    @property
    def world_size(self) -> int:
        """The number of members of the generation, lost ones included."""
        return len(self.members)

    def peers(self, role: str) -> list[Peer]:
        """The generation's members with `role`, by ordinal, without those that were lost."""
        return [peer for peer in self.members if peer.role == role and peer.name not in self.lost]

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Says that the block is loading, restoring, compiling, evaluating or saving: a phase, which may take
        PHASE_TIMEOUT seconds, and not a step that is stuck. Calls that it makes have as long. `restore`, `save` and
        `evaluating` say so themselves; rank 0 is loading until it begins to train, another rank until its RankObject is
        set.
        """
        with self.pace.phase(name):
            yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The phase in which training pauses for an evaluation, which alerts know too."""
        self.metrics.evaluating.set(1)
        try:
            with self.pace.phase("evaluating"):
                yield
        finally:
            self.metrics.evaluating.set(0)

    # ---- calls

    def call(self, to: Peer | str, function: Callable[..., Any], *args: Any, timeout: float = -1.0) -> Any:
        """Calls `function(*args)` at the peer `to`. Returns a torch future of the answer. It raises RemoteError for
        what the function raised, PeerLostError for a peer that is gone or silent, and CallTimeoutError for one that is
        alive and has not answered within `timeout` seconds (-1: RPC_TIMEOUT, in a phase PHASE_TIMEOUT; 0: no deadline).
        A peer that has answered no call yet may be loading, and has PHASE_TIMEOUT more. Calls are counted and timed
        under the function's name.

        A member of an elastic role whose connection is found closed is given up.

        Raises UsageError for a function that the peer cannot import, a method of an object, and an `in_turn` at rank 0.
        """
        name = to if isinstance(to, str) else to.name
        require_unbound(function)
        if is_in_turn(function) and name == self.members[0].name:
            raise UsageError(f"{function.__name__} {NOT_SERVED}")
        return self._connected.call(name, function, *args, timeout=self._limit(name, timeout))

    def _limit(self, to: str, timeout: float) -> Deadline:
        return self.pace.limit(to, timeout, self.settings.rpc_timeout)

    def call_each(self, role: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0,
                  lost: Lost | None = None) -> Iterator[tuple[Peer, Any]]:  # fmt: skip
        """Calls `function(*args)` at every member with `role`; yields each with its answer, as they come.

        A member that is gone, or does not answer within `timeout` seconds, is given up: the gang replaces it. With
        `lost` "skip", the default for an elastic role, it is left out; "answer" yields a PeerLostError in place of its
        answer; "raise", the default for the other roles, raises the PeerLostError or CallTimeoutError. What the
        function raised is raised here, as RemoteError. If no member is left, raises PeerLostError, or yields nothing
        while the job drains.

        The calls are made at once, whether the answers are looked at or not.
        """
        answers = self._call_each(role, function, args, timeout, lost)
        next(answers)  # makes the calls
        return answers

    def _call_each(self, role: str, function: Callable[..., Any], args: tuple[Any, ...], timeout: float,
                   lost: Lost | None) -> Iterator[tuple[Peer, Any]]:  # fmt: skip
        spec = next((each for each in (self.job.roles if self.job else ()) if each.name == role), None)
        if self.job and spec is None:
            raise UsageError(self.job.no_role(role))
        lost = lost or ("skip" if spec and spec.elastic else "raise")
        self.require_peers(role)
        answers: Answers = queue.SimpleQueue()
        self._answers.append(answers)
        try:
            waiting = {peer.name: peer for peer in self.peers(role)}
            limit = max((self._limit(name, timeout) for name in waiting), default=0.0)
            for name in waiting:
                future = self.call(name, function, *args, timeout=timeout)
                future.add_done_callback(lambda answered, name=name: answers.put((name, answered)))
            yield self.me, None  # to `call_each`; the answers follow
            answered_by_any = False
            while waiting:
                # longer than the calls' own deadline: each call ends, and with it this wait
                with recorder.span("wait"):
                    name, answered = answers.get(
                        timeout=limit + EXAMINED + self.settings.rpc_timeout if timeout else None
                    )
                peer = waiting.pop(name, None)
                if peer is None:
                    continue
                try:
                    value = self._outcome(name, answered)
                except (PeerLostError, CallTimeoutError) as error:
                    if lost == "raise":
                        raise
                    self.give_up(name, stuck=str(error) if isinstance(error, CallTimeoutError) else "")
                    if lost == "skip":
                        continue
                    value = (
                        error if isinstance(error, PeerLostError) else PeerLostError(f"{name} was given up: {error}")
                    )
                    value.__cause__ = error.__cause__ if value is error else error
                answered_by_any = True
                yield peer, value
            if not answered_by_any:
                self.require_peers(role)  # all were lost meanwhile
        finally:
            self._answers.remove(answers)

    def call_all(self, role: str, function: Callable[..., Any], *args: Any, timeout: float = -1.0,
                 lost: Lost | None = None) -> Iterator[Any]:  # fmt: skip
        """The answers of `call_each`, without the members that gave them."""
        return (value for _, value in self.call_each(role, function, *args, timeout=timeout, lost=lost))

    def _outcome(self, name: str, answered: Any) -> Any:
        """The answer of a call to `name`. Raises what the call failed with."""
        if answered is None or name in self.lost:
            raise PeerLostError(f"{name} was lost")
        try:
            return answered.value()
        except (PeerLostError, CallTimeoutError) as error:
            self._log_given_up(name, error)
            raise

    def _log_given_up(self, name: str, error: Exception) -> None:
        self.logger.warning("peer given up", peer=name, problem=str(error))

    def wait_all(self, calls: list[Any]) -> list[Any]:
        """The answers of calls to peers that this rank cannot do without. Raises what the first that fails raises, as
        soon as it does."""
        return self._connected.wait_all(calls)  # type: ignore[no-any-return]

    def on_disconnect(self, to: Peer | str, gone: Callable[[str], None]) -> None:
        """Calls `gone(name)`, from another thread, as soon as the peer `to` has ended or its connection broke.

        For a peer that is not called while it works. The gang notices one that falls silent.
        """
        self._connected.on_disconnect(to if isinstance(to, str) else to.name, gone)

    def join_group(self, role: str, timeout: float) -> None:
        """Makes torch's default process group of the members with `role`, all of which call this. Collectives time
        out after `timeout` seconds. NCCL where each has a GPU of its own, gloo otherwise. Raises PeerLostError.
        """
        self._connected.join_group(self, role, timeout)

    @property
    def _connected(self) -> Any:
        if self.transport is None:
            raise RuntimeError("this context is not connected to any peer")
        return self.transport

    # ---- peers that are lost

    def lose(self, name: str) -> None:
        """Takes `name` out of this generation: its calls are refused, calls to it are given up."""
        if name in self.lost:
            return
        self.lost.add(name)
        for answers in list(self._answers):
            answers.put((name, None))
        for listener in self._listeners:
            listener(name)

    def give_up(self, name: str, stuck: str = "") -> None:
        """Loses `name`, which rank 0 found dead, silent or `stuck`, as the text says, and has the gang replace its
        worker: a stuck one counts as a failure. Raises UsageError for a name that no member has."""
        peer = next((peer for peer in self.members if peer.name == name), None)
        if peer is None:
            raise UsageError(f"no peer {name!r} in this generation ({', '.join(peer.name for peer in self.members)})")
        if name in self.lost:
            return
        self.lose(name)
        report = functools.partial(self.supervision.report_lost, peer.role, peer.ordinal)
        if stuck and self.rank == 0:
            self._connected.end_stuck(name, stuck, otherwise=report)
        else:
            report()

    def disconnected(self, name: str, error: PeerLostError) -> None:
        """A call found the connection to `name` closed: a member of an elastic role is given up. The worker of another
        has ended, and its supervisor says how."""
        elastic = {role.name for role in (self.job.roles if self.job else ()) if role.elastic}
        peers = (peer for peer in self.members if peer.name == name and peer.name not in self.lost)
        if any(peer.role in elastic for peer in peers):
            self._log_given_up(name, error)
            self.give_up(name)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(name)`, from another thread, for every peer that is lost from now on."""
        self._listeners.append(listener)

    def require_peers(self, role: str) -> None:
        """Raises PeerLostError where no peer with `role` is left, unless a drain is ordered within two leases."""
        # the gang ends such a generation, or drains it
        if not self.peers(role) and not self._drain.wait(2 * self.settings.lease_seconds):
            raise PeerLostError(f"no {role} is left")
