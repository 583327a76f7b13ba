"""Weights that one member publishes and others subscribe to, as a job sees them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rolecall.context.group import Group
from rolecall.errors import UsageError
from rolecall.weights import manifest
from rolecall.weights.copies import Copies, Holdings, Version
from rolecall.weights.exchange import Connection, Exchange, PendingVersion
from rolecall.weights.manifest import Entry, VersionId
from rolecall.weights.registry import Registry


class Weights:
    """A subscription to the weights `name`; `Context.subscribe` makes it. Newer versions arrive in the background, and
    take the place of what is in use only with `load` or `tensors`. It lasts as long as the worker: a member that stays
    keeps what it has, and gets what is published in later generations."""

    def __init__(self, name: str, copies: Copies) -> None:
        self.name = name
        self._copies = copies
        self._loaded: VersionId | None = None  # into a target
        self._taken: VersionId | None = None  # by `load` or `tensors`

    @property
    def version(self) -> int | None:
        """The number of the newest version that is here; None before the first."""
        newest = self._copies.newest
        return newest.manifest.version if newest else None

    @property
    def new(self) -> bool:
        """Whether a version is here that neither `load` nor `tensors` has taken yet."""
        newest = self._copies.newest
        return newest is not None and newest.version_id != self._taken

    def wait(self, timeout: float, *, new: bool = False) -> int:
        """The number of the newest version that is here. Waits for the first one; if `new`, for one that was not taken
        yet. Raises TimeoutError after `timeout` seconds."""
        if not self._copies.wait(lambda: self.new if new else self.version is not None, timeout):
            raise TimeoutError(
                f"weights {self.name!r}: no {'new ' if new else ''}version has come within {timeout:g} s; "
                "has a member published one?"
            )
        return self._newest().manifest.version

    def load(self, target: torch.nn.Module | Mapping[str, torch.Tensor]) -> int:
        """Copies the newest version into `target`, unless it was loaded last; returns its number. A module must have
        the same tensors in its state_dict; a mapping may have fewer. Raises UsageError if they do not fit, or if no
        version has come yet, without a change of `target`.
        """
        newest = self._newest()
        if newest.version_id == self._loaded:
            return newest.manifest.version
        pairs = self._match(newest, target)
        with torch.no_grad():
            for tensor, entry in pairs:
                tensor.copy_(manifest.read(entry, newest.buffer))
        self._loaded = self._taken = newest.version_id
        return newest.manifest.version

    def tensors(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The number of the newest version, and a copy of its tensors. Raises UsageError if none has come yet."""
        newest = self._newest()
        self._taken = newest.version_id
        copied = {entry.name: manifest.read(entry, newest.buffer).clone() for entry in newest.manifest.entries}
        return newest.manifest.version, copied

    def _newest(self) -> Version:
        newest = self._copies.newest
        if newest is None:
            raise UsageError(f"weights {self.name!r}: no version has come yet; call wait(timeout) before")
        return newest

    def _match(self, version: Version, target: Any) -> list[tuple[torch.Tensor, Entry]]:
        is_module = isinstance(target, torch.nn.Module)
        items = target.state_dict() if is_module else target
        wanted = {key: tensor for key, tensor in items.items() if isinstance(tensor, torch.Tensor)}
        entries = {entry.name: entry for entry in version.manifest.entries}
        absent = [key for key in wanted if key not in entries]
        extra = [key for key in entries if key not in wanted] if is_module else []
        if absent or extra:
            names = [*(f"{key!r} (not published)" for key in absent), *(f"{key!r} (not in it)" for key in extra)]
            raise UsageError(f"weights {self.name!r}: the target has other tensors: {', '.join(names)}")
        for key, tensor in wanted.items():
            if tuple(tensor.shape) != entries[key].shape:
                raise UsageError(
                    f"weights {self.name!r}: {key!r} has the shape {entries[key].shape}, "
                    f"and {tuple(tensor.shape)} in the target; make it of the same settings"
                )
        return [(tensor, entries[key]) for key, tensor in wanted.items()]


class Publisher:
    """The weights that this member publishes and subscribes to, by name. Peers call its `holdings`, and at rank 0 its
    `registry`."""

    def __init__(self, group: Group, metrics: Any) -> None:
        self.holdings, self.registry = Holdings(), Registry(self._parts)
        self._group, self._metrics = group, metrics
        self._exchanges: dict[str, Exchange] = {}
        self._published: dict[str, int] = {}  # the last version of each name
        self._lock = threading.Lock()

    def publish(
        self, name: str, tensors: Mapping[str, torch.Tensor], version: int | None, dtype: torch.dtype | None
    ) -> int:
        """See `Context.publish`."""
        entries, nbytes = manifest.layout(name, tensors, dtype)
        buffer = np.zeros(nbytes, np.uint8)  # what is between tensors counts in the digests
        manifest.write(tensors, entries, buffer)
        full = sum(entry.numel * entry.dtype.itemsize for entry in entries)
        exchange = self._exchange(name)
        with self._lock:
            newest = exchange.copies.newest
            last = self._published.get(name, newest.manifest.version if newest else 0)
            version = self._published[name] = last + 1 if version is None else int(version)
            exchange.publish(PendingVersion(version, entries, buffer, full))
        return version

    def subscribe(self, name: str) -> Weights:
        """See `Context.subscribe`."""
        exchange = self._exchange(name)
        exchange.subscribe()
        return Weights(name, exchange.copies)

    def _exchange(self, name: str) -> Exchange:
        with self._lock:
            if name not in self._exchanges:
                self._exchanges[name] = Exchange(self.holdings.copies(name), self.connect, self._metrics)
            return self._exchanges[name]

    def connect(self, seconds: float) -> Connection | None:
        """This member's part in the generation; waits up to `seconds` for one."""
        transport = self._group.wait_open(seconds)
        if transport is None:
            return None
        me, wire = self._group.me, transport.wire
        return Connection(wire.session, (me.name, me.join), self._group.members[0].name, wire.call)

    def _parts(self) -> dict[str, int]:
        lost = self._group.lost
        return {peer.name: peer.join + (peer.name in lost) for peer in self._group.members}
