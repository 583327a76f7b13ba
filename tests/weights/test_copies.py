"""What a process holds of a name: chunks by their digests, and what it answers to peers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from rolecall.weights import copies as module
from rolecall.weights.copies import KEPT_SECONDS, KEPT_VERSIONS, Absent, Copies, Version
from rolecall.weights.manifest import CHUNK_BYTES, Manifest, VersionId, digests_of
from tests.context.contexts import Clock
from tests.wire.wires import DEADLINE


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def version(number: int, data: bytes) -> Version:
    digests = digests_of(memoryview(data))
    manifest = Manifest(VersionId(1, number, "lead_0"), number, (), len(data), len(data), digests)
    return Version(manifest, np.frombuffer(data, np.uint8).copy(), complete=True)


def data(*chunks: int, tail: int = 100) -> bytes:
    """Chunks that are full of these numbers, and a shorter one."""
    return b"".join(bytes([number]) * CHUNK_BYTES for number in chunks) + b"x" * tail


def missing(coming: Version) -> list[int]:
    return [number for number, has in enumerate(coming.has) if not has]


def send(source: Copies, target: Copies, coming: Version, *numbers: int) -> int:
    """Chunks from one to the other. Returns how many were wrong."""
    contents = source.get(coming.version_id, numbers, 0.0)
    assert not isinstance(contents, Absent)
    return target.put(coming, numbers, contents)


def test_chunks_that_are_wrong_are_not_kept() -> None:
    here, there = Copies("policy"), Copies("policy")
    right = version(1, data(1, 2))
    there.add(Version(right.manifest, version(1, data(1, 9)).buffer, complete=True))
    coming = here.begin(right.manifest)
    assert send(there, here, coming, 0, 1, 2) == 1
    assert missing(coming) == [1]


def test_old_versions_are_kept_while_they_are_asked_for(clock: Clock) -> None:
    copies = Copies("policy")
    versions = [version(number, data(number)) for number in range(KEPT_VERSIONS + 2)]
    for each in versions:
        clock.now += 1
        copies.add(each)
        assert isinstance(copies.get(versions[0].version_id, [0], 0.0), list)
    assert copies.get(versions[1].version_id, [0], 0.0) is Absent.GONE  # there are too many
    clock.now += KEPT_SECONDS - 2
    copies.get(versions[0].version_id, [0], 0.0)
    assert copies.drop_old() == pytest.approx(1)
    clock.now += 1
    assert copies.drop_old() == pytest.approx(KEPT_SECONDS - 1)
    assert isinstance(copies.get(versions[0].version_id, [0], 0.0), list)
    clock.now += KEPT_SECONDS
    assert copies.drop_old() is None
    assert copies.manifest(versions[0].version_id) is Absent.GONE
    assert copies.newest is versions[-1]


def test_a_peer_waits_for_what_comes_from_a_holder_only(clock: Clock) -> None:
    here, there = Copies("policy"), Copies("policy")
    new = version(1, data(1, 2, 3))
    there.add(new)
    assert here.get(new.version_id, [0], 0.0) is Absent.NOT_AVAILABLE  # it does not know of it yet
    answers = dict[int, Any]()

    def ask(number: int) -> None:
        answers[number] = here.get(new.version_id, [number], DEADLINE)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    coming = here.begin(new.manifest)
    coming.direct[0] = coming.direct[1] = 1
    here.notify()
    assert here.get(new.version_id, [0, 2], DEADLINE) is Absent.NOT_AVAILABLE  # one comes from another reader
    send(there, here, coming, 0, 1)
    for thread in threads:
        thread.join(DEADLINE)
    assert [bytes(answers[number][0])[:1] for number in (0, 1)] == [b"\1", b"\2"]
    older = VersionId(0, 9, "lead_0")
    assert here.get(older, [0], DEADLINE) is Absent.GONE
    assert here.manifest(older) is Absent.GONE
