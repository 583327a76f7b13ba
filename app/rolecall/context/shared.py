"""Arguments that all calls of a map share: each member gets them once, and keeps them until the map is over."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolecall.context.transport import Transport
from rolecall.declare.remote import remote
from rolecall.errors import PeerLostError
from rolecall.wire.codec import Encoded, Lasting, decode, encode
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

SHARE_BYTES = 64 * 2**10  # pickled; smaller ones go with each call
Key = tuple[str, str]  # the member that has them, and a name that they are sent with once

_values: dict[Key, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}  # that this process has


class JoinedAgainError(PeerLostError):
    """A member has joined again since it got the arguments: it is lost as what it was, though it answers."""


@dataclass(frozen=True)
class Reference:
    """Stands for an argument that its receiver has: it is pickled as this, and read as the argument."""

    key: Key
    place: int | str

    def __reduce__(self) -> tuple[Callable[[Key, int | str], Any], tuple[Key, int | str]]:
        return _look_up, (self.key, self.place)


def _look_up(key: Key, place: int | str) -> Any:
    values = _values.get(key)
    if values is None:
        raise JoinedAgainError(f"{key[0]} has joined again")
    return values[0][place] if isinstance(place, int) else values[1][place]


@dataclass(frozen=True)
class Packed:
    """An encoded value: it is pickled without another copy, and read as the value."""

    content: Encoded

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        body, buffers = self.content
        return decode, (pickle.PickleBuffer(body), [pickle.PickleBuffer(buffer) for buffer in buffers])


class SharedArguments:
    """What a worker keeps for its peers' maps. They call it in one event loop."""

    def __init__(self) -> None:
        self._there: dict[Key, asyncio.Event] = {}

    @remote
    async def share(self, key: Key, values: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Keeps arguments until the call is cancelled, or its caller is lost."""
        _values[key] = values
        self._there.setdefault(key, asyncio.Event()).set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            del _values[key]
            self._there.pop(key, None)

    @remote
    async def shared(self, key: Key) -> None:
        """Returns once the arguments are there."""
        try:
            await self._there.setdefault(key, asyncio.Event()).wait()
        finally:
            self._there.pop(key, None)


@dataclass
class Sharing:
    """The arguments `args` and `kwargs` of a map, as its caller sees them. They are shared if they are large."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_needed: bool = field(init=False)
    _content: Encoded = field(init=False)
    _keys: dict[str, Key] = field(default_factory=dict, init=False)  # the newest of each member
    _calls: dict[str, list[Future[Any]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        try:
            content = encode((self.args, self.kwargs))
            self.is_needed = content.nbytes >= SHARE_BYTES
            if self.is_needed:
                self._content = content
        except Exception:  # whatever pickling them raises: the first call says which it is
            self.is_needed = False

    def send(
        self, to: str, transport: Transport, deadline: Deadline, ended: Callable[[BaseException | None], object]
    ) -> None:
        """Sends them to a member. Calls `ended(None)` once it has them, or with an error; perhaps twice."""
        key = self._keys[to] = to, uuid.uuid4().hex
        request = Request("share", (key, Packed(self._content)), {}, 0.0, internal=True)
        # urgent: it lasts as long as the map, and is not to count as in flight
        held = transport.wire.call(
            to,
            request,
            Deadline(0.0),
            content=Lasting(*encode(tuple(request))),  # no copy for each member
            urgent=True,
            waits=False,
        )
        shared = Request("shared", (key,), {}, deadline.total, internal=True)
        there = transport.call(to, shared, deadline, waits=False)
        self._calls[to] = [held, there]

        def tell(call: concurrent.futures.Future[Any]) -> None:
            if not call.cancelled():
                ended(call.exception())

        held.then(tell)
        there.then(tell)

    def of(self, to: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of a member."""
        if not self.is_needed:
            return self.args, self.kwargs
        key = self._keys[to]
        args = tuple(Reference(key, place) for place in range(len(self.args)))
        return args, {name: Reference(key, name) for name in self.kwargs}

    def close(self) -> None:
        """Members forget them."""
        for calls in self._calls.values():
            for call in calls:
                call.cancel()

    def drop(self) -> None:
        """As `close`, soon; see `Future.drop`."""
        for calls in [*self._calls.values()]:
            for call in calls:
                call.drop()
