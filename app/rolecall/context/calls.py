"""Calls of peers' methods: to one, to all of a role, to the first of a role, to any of a role, and maps."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from rolecall.context.gradients import Differentiable, cross
from rolecall.context.group import Group
from rolecall.context.mapping import Mapping
from rolecall.context.passes import Passes
from rolecall.context.shared import Sharing
from rolecall.declare import registry
from rolecall.declare.remote import Remote, require_remote
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, PeerLostError, UsageError
from rolecall.links.pool import Lost, Pool
from rolecall.record.recorder import recorder
from rolecall.wire import apart
from rolecall.wire.future import Future, Stream
from rolecall.wire.messages import Forward, Request
from rolecall.wire.session import Session

P = ParamSpec("P")
T = TypeVar("T")
I = TypeVar("I")  # noqa: E741 an item of a map
Later = Coroutine[Any, Any, T] | concurrent.futures.Future[T]  # what a method may return in place of its answer
Answers = queue.SimpleQueue[tuple[str, concurrent.futures.Future[Any]]]  # with the names of who has given them
NOT_SERVED = "has turn=True, which rank 0 never serves: the job is over once its `run` has returned"


class Calls:
    """Calls of a member's peers, with options: `timeout` in seconds (-1: see `call`; in a phase, PHASE_TIMEOUT; 0: no
    deadline), `lost` (see `call_each`), and `role`, which is needed if several roles have the method. `internal` calls
    are of what each worker offers its peers, whatever its role. Calls to a role go only to those members that are in
    `to`, such as `peers(role)[2:5]`, and to no other that joins meanwhile. A `map` has up to `window` calls under way
    at each member."""

    def __init__(
        self,
        group: Group,
        timeout: float = -1.0,
        lost: Lost | None = None,
        role: str = "",
        to: Sequence[Peer] | None = None,
        *,
        window: int = 1,
        internal: bool = False,
        passes: Passes | None = None,
    ) -> None:
        self._group, self._timeout, self._lost, self._role, self._to = group, timeout, lost, role, to
        self._window, self._internal, self._passes = window, internal, passes or Passes(group)

    def options(
        self,
        *,
        timeout: float | None = None,
        lost: Lost | None = None,
        role: str = "",
        to: Sequence[Peer] | None = None,
        window: int | None = None,
    ) -> Calls:
        """The same calls with other options. Raises UsageError for a `window` below 1, and a `to` that has others than
        peers."""
        if to is not None and (isinstance(to, str | Peer) or not all(isinstance(peer, Peer) for peer in to)):
            raise UsageError(f'options(to={to!r}): give a list of peers, such as context.peers("worker")[:2]')
        if window is not None and window < 1:
            raise UsageError(f"options(window={window}): at least one call is under way at a member")
        return Calls(
            self._group,
            self._timeout if timeout is None else timeout,
            self._lost if lost is None else lost,
            role or self._role,
            self._to if to is None else to,
            window=window or self._window,
            internal=self._internal,
            passes=self._passes,
        )

    # ---- to one peer

    @overload
    def call(  # type: ignore[overload-overlap]  # the last one takes what the others leave
        self, to: Peer | str, method: Callable[Concatenate[Any, P], Iterator[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[T]: ...
    @overload
    def call(
        self,
        to: Peer | str,
        method: Callable[Concatenate[Any, P], Later[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...
    @overload
    def call(
        self, to: Peer | str, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]: ...
    def call(self, to: Peer | str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `method`, named by its class such as `Sampler.hits`, of the peer `to`. Returns a `Future` of its
        answer; of a method with `stream`, a `Stream`. They raise RemoteError for what the method raised, PeerLostError
        for a peer that is gone or silent, and CallTimeoutError for one that is alive and has not answered before the
        deadline. A `timeout` of yours counts from the call. Without one, the method may run for STUCK_SECONDS, and a
        peer that says nothing for RPC_TIMEOUT is lost. A call may wait PHASE_TIMEOUT for a peer that loads, and for its
        turn if it has no `timeout`. A member of an elastic role whose connection is found closed is given up.

        Raises UsageError for what is no method marked by `remote`, and for one with `turn` at rank 0.
        """
        mark, name = require_remote(method), to if isinstance(to, str) else to.name
        self._require_served(mark, method, name)
        return self._send(name, mark, method, args, kwargs)

    def _require_served(self, mark: Remote, method: Callable[..., Any], name: str) -> None:
        if mark.turn and name == self._group.members[0].name:
            raise UsageError(f"{method.__qualname__} {NOT_SERVED}")

    def _send(
        self,
        name: str,
        mark: Remote,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        waits: bool = True,
    ) -> Any:
        """Calls a peer. Without `waits`, the caller does not wait for it to read."""
        crossing = None
        if mark.grad:
            crossing = cross(self._passes, self._ask, name, method)
            forward = crossing.leave(args, kwargs) if crossing else Forward(args, kwargs)
            args, kwargs = (forward,), {}
        group = self._group
        deadline = group.watchdog.limit(self._timeout, group.settings.rpc_timeout)
        request = Request(method.__name__, args, kwargs, deadline.total, internal=self._internal)
        waits = waits and not self._internal  # a checkpoint is not held up by a member that does not read
        call = group.connected.call(name, request, deadline, stream=mark.stream, waits=waits)
        return Differentiable(call, crossing) if mark.grad else call

    def _ask(self, name: str, method: str, argument: Any) -> Future[Any]:
        """Calls one of the services of a peer's worker as a part of what a call with these options does."""
        group = self._group
        deadline = group.watchdog.limit(self._timeout, group.settings.rpc_timeout)
        request = Request(method, (argument,), {}, deadline.total, internal=True)
        answer: Future[Any] = group.connected.call(name, request, deadline, nested=True)
        return answer

    # ---- to a role

    @overload
    def call_each(
        self,
        method: Callable[Concatenate[Any, P], Later[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[tuple[Peer, T]]: ...
    @overload
    def call_each(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[tuple[Peer, T]]: ...
    def call_each(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[tuple[Peer, Any]]:
        """Calls `method` at every member of the role whose class has it, at once. Yields each with its answer, as they
        come.

        A member that is gone, or does not answer before the deadline, is given up: the gang replaces it. With the
        option `lost="skip"`, the default for an elastic role, it is left out. `lost="answer"` yields a PeerLostError in
        place of its answer. `lost="raise"`, the default for other roles, raises the PeerLostError or CallTimeoutError.
        What the method raised is raised here, as RemoteError. If no member is left, raises PeerLostError, or yields
        nothing while the job drains; if others than those in `to` are, it yields nothing. A member that joins meanwhile
        is called the next time. Leaving the iterator, as by `break` once enough have answered, cancels the calls that
        are still out.
        """
        mark, group, role = require_remote(method), self._group, self._role_of(method)
        if mark.stream:
            raise UsageError(f"{method.__qualname__} is a stream: call it at one peer at a time")
        group.require_peers(role)
        called = {peer.name: peer for peer in self._members(role)}
        for name in called:
            self._require_served(mark, method, name)
        answers: Answers = queue.SimpleQueue()
        session = group.session
        calls = list[Future[Any]]()
        for name in called:
            future = self._send(name, mark, method, args, kwargs, waits=False)
            calls.append(future)
            future.then(lambda answered, name=name: answers.put((name, answered)))
        elastic = group.is_elastic(role)
        lost = self._lost or ("skip" if elastic else "raise")

        def cancel() -> None:
            for call in calls:
                call.cancel()

        def read() -> Generator[tuple[Peer, Any], None, None]:
            try:
                yield from self._collect(role, called, answers, lost=lost, session=session)
            except Exception:  # not at the generator's end, which a collection may bring
                cancel()
                raise

        def close() -> None:
            values.close()
            cancel()

        def drop() -> None:
            for call in calls:
                call.drop()

        values = read()
        return Stream(values, close, drop)

    def _members(self, role: str) -> list[Peer]:
        if other := next((peer for peer in self._to or () if peer.role != role), None):
            raise UsageError(f"options(to=): {other} is no {role}")
        return [peer for peer in self._group.peers(role) if self._is_named(peer)]

    def _is_named(self, peer: Peer) -> bool:
        return self._to is None or peer in self._to

    @overload
    def call_all(
        self,
        method: Callable[Concatenate[Any, P], Later[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[T]: ...
    @overload
    def call_all(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[T]: ...
    def call_all(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The answers of `call_each`, without the members that gave them."""
        answers: Iterator[tuple[Peer, Any]] = self.call_each(method, *args, **kwargs)
        return (value for _, value in answers)

    def _collect(
        self,
        role: str,
        called: dict[str, Peer],
        answers: Answers,
        *,
        lost: Lost,
        session: Session | None,
    ) -> Iterator[tuple[Peer, Any]]:
        group, any_answered = self._group, False
        while called:
            with recorder.span("wait"):
                name, answered = answers.get()  # each call ends at its own deadline
            peer = called.pop(name)
            try:
                value = self._outcome(peer, answered)
            except (PeerLostError, CallTimeoutError) as error:
                if lost == "raise" or error.is_remote or (session is not None and session.ended):
                    raise
                group.give_up(peer, stuck=str(error) if isinstance(error, CallTimeoutError) else "")
                if lost == "skip":
                    continue
                value = error
                if isinstance(error, CallTimeoutError):
                    value = PeerLostError(f"{name} was given up: {error}")
                    value.__cause__ = error
            any_answered = True
            yield peer, value
        if not any_answered:
            group.require_peers(role)  # all were lost meanwhile

    def _outcome(self, peer: Peer, answered: concurrent.futures.Future[Any]) -> Any:
        """The answer of a call to `peer`. Raises what the call failed with."""
        if peer.name in self._group.lost:
            raise PeerLostError(f"{peer.name} was lost")
        try:
            return answered.result()
        except CallTimeoutError as error:
            if not error.is_remote:
                self._group.logger.warning("peer given up", peer=peer.name, problem=str(error))
            raise

    @overload
    def first(
        self,
        k: int,
        method: Callable[Concatenate[Any, P], Later[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]: ...
    @overload
    def first(
        self, k: int, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    def first(self, k: int, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method` at every member of its role. Returns the first `k` answers, in the order in which they came,
        and cancels the other calls: a method that has not begun never does, an `async` one is cancelled, and one that
        runs goes on to its end for nobody. Their members stay.

        A member that is gone or late is given up, as by `call_each`. Raises PeerLostError as soon as fewer than `k` can
        still answer, unless `lost="raise"`, the default for roles that are not elastic, raises before; and UsageError
        for a `k` that the role cannot have.
        """
        role, group = self._role_of(method), self._group
        members, lost = self._members(role), self._lost or ("skip" if group.is_elastic(role) else "raise")
        known = [peer for peer in group.members if peer.role == role and self._is_named(peer)]
        specs = registry.roles(group.job, group.settings) if group.job and self._to is None else ()
        most = max(len(known), *(spec.count for spec in specs if spec.name == role), 1)
        name = f"first({k}, {method.__qualname__})"
        if not 1 <= k <= most:
            raise UsageError(f"{name}: the role {role} has {len(known)} members; ask for 1 to {most} answers")
        calls = self.options(to=members, lost="raise" if lost == "raise" else "answer")
        each: Any = calls.call_each(method, *args, **kwargs) if k <= len(members) else iter(())
        answers, out = list[Any](), len(members)
        for _, answer in each:
            if isinstance(answer, PeerLostError):
                out -= 1
            else:
                answers.append(answer)
            if len(answers) == k or out < k:
                each.close()
        if len(answers) < k:
            raise PeerLostError(f"{name}: {out} members of the role {role} can answer")
        return answers

    # ---- a map

    @overload
    def map(
        self,
        method: Callable[Concatenate[Any, I, P], Later[T]],
        items: Iterable[I],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        method: Callable[Concatenate[Any, I, P], T],
        items: Iterable[I],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[T]: ...
    def map(self, method: Callable[..., Any], items: Iterable[Any], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Calls `method(item, *args, **kwargs)` for each of `items` at some member of its role. Yields the answers in
        the order of the items.

        Each member has up to `window` calls at a time, by default one, and gets the next item as soon as it has
        answered. Items are read when a member has room for one, in this thread, while the next answer is asked for: the
        iterable may be endless, and may depend on answers that were given out. While it waits, none is given out. At
        most 16 answers a call wait here. Members that join take part at once; while there is none, the map waits for up
        to REJOIN_TIMEOUT. `args` and `kwargs` of 64 KiB or more are sent to each member once: neither the method nor
        the caller may change them before the end.

        If a member of an elastic role is gone or late, it is given up, and its items are called again if the method is
        `idempotent`, until six members in a row were lost with one. Otherwise the option `lost` decides: "raise", the
        default, raises PeerLostError or CallTimeoutError, "skip" leaves the item out, and "answer" yields the error.
        What the method raised is raised here, as RemoteError; the end of the generation as PeerLostError. Leaving the
        iterator cancels the calls that are still out.
        """
        mapping = self._map(method, items, args, kwargs, ordered=True)
        answers = mapping.answers()
        return Stream((answer for _, answer in answers), partial(_close, answers, mapping), mapping.drop)

    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[Any, I, P], Later[T]],
        items: Iterable[I],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[tuple[I, T]]: ...
    @overload
    def map_unordered(
        self,
        method: Callable[Concatenate[Any, I, P], T],
        items: Iterable[I],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[tuple[I, T]]: ...
    def map_unordered(
        self, method: Callable[..., Any], items: Iterable[Any], /, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[Any, Any]]:
        """As `map`, but yields each item with its answer, as the answers come."""
        mapping = self._map(method, items, args, kwargs, ordered=False)
        answers = mapping.answers()
        return Stream(answers, partial(_close, answers, mapping), mapping.drop)

    def _map(
        self,
        method: Callable[..., Any],
        items: Iterable[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        ordered: bool,
    ) -> Mapping:
        mark, group, role = require_remote(method), self._group, self._role_of(method)
        if mark.stream or mark.grad:
            kind = "is a stream" if mark.stream else "has grad=True"
            raise UsageError(f"{method.__qualname__} {kind}: call it at one peer at a time")
        for peer in self._members(role):
            self._require_served(mark, method, peer.name)
        sharing = Sharing(args, kwargs)
        pool = Pool(
            self._window,
            ordered=ordered,
            again=mark.idempotent,
            on_loss=self._lost or "raise",
            prepares=sharing.is_needed,
        )
        return Mapping(
            group,
            pool,
            items,
            sharing,
            role=role,
            members=lambda: self._members(role),
            call=lambda peer, args, kwargs: self._send(peer.name, mark, method, args, kwargs, waits=False),
            waits=self._to is None,
        )

    # ---- to any of a role

    @overload
    def call_any(
        self,
        method: Callable[Concatenate[Any, P], Later[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...
    @overload
    def call_any(self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def call_any(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `method` at the member of its role that has the fewest of this worker's calls without an answer. If
        that member is lost, the call goes to another one, provided that the method is `idempotent`; otherwise, or if
        none is left, the future raises PeerLostError.
        """
        mark, role = require_remote(method), self._role_of(method)
        if mark.stream:
            raise UsageError(f"{method.__qualname__} is a stream: call it at one peer")
        calls = list[Future[Any]]()  # one after the other
        answer: Future[Any] = Future(lambda: calls[-1].cancel())
        tried, session = set[str](), self._group.session

        def attempt(previous: PeerLostError | None) -> None:
            names = [peer.name for peer in self._members(role) if peer.name not in tried]
            if not names:
                answer.end(None, previous or PeerLostError(f"no {role} is left"))
                return
            name = min(names, key=self._group.connected.in_flight)
            self._require_served(mark, method, name)
            tried.add(name)
            calls.append(self._send(name, mark, method, args, kwargs))
            if answer.cancelled():  # before it referred to this call
                calls[-1].cancel()
            calls[-1].then(ended)

        def retry(error: PeerLostError) -> None:
            try:
                attempt(error)
            except BaseException as problem:  # nobody else learns of it
                answer.end(None, problem)

        def ended(call: concurrent.futures.Future[Any]) -> None:
            if call.cancelled() or answer.cancelled():
                return
            error = call.exception()
            is_lost = isinstance(error, PeerLostError) and not error.is_remote
            if is_lost and mark.idempotent and not (session is not None and session.ended):
                # not in this thread: it may have to wait, and others' calls end here too
                apart.run(retry, error)
            else:
                answer.end(None if error else call.result(), error)

        attempt(None)
        return answer

    def _role_of(self, method: Callable[..., Any]) -> str:
        """The role whose class has `method`. Raises UsageError if none has, or several do and no option says which."""
        job = self._group.job
        names = [role.name for role in job.roles] if job else []
        if self._role or job is None:
            if job is not None and self._role not in names:
                raise UsageError(f"no role {self._role!r} in this job ({', '.join(names)})")
            return self._role
        having = [role.name for role in job.roles if registry.has_method(role, method)]
        if len(having) == 1:
            return having[0]
        name = method.__qualname__
        if not having:
            raise UsageError(f"{name} is a method of no role's class ({', '.join(names)})")
        raise UsageError(f"{name} is a method of several roles ({', '.join(having)}); say options(role=...)")


def _close(answers: Generator[Any, None, None], mapping: Mapping) -> None:
    answers.close()
    mapping.close()
