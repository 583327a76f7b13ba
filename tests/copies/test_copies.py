"""Copies of checkpoints at members: what travels, what is held, and what a run goes on from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.copies import keeping
from rolecall.copies.store import CopyError, File, Listing, Store
from rolecall.errors import CallTimeoutError, Drained, PeerLostError, UsageError
from rolecall.record import rundir
from rolecall.weights.manifest import CHUNK_BYTES, digests_of
from tests.context.contexts import value
from tests.copies.members import WIDE, Members


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    yield members
    members.keeper.close()


def lose_disk(members: Members) -> None:
    members.keeper.close()
    shutil.rmtree(members.disk)
    members.begin()


def test_what_changed_travels_and_old_copies_are_deleted(members: Members) -> None:
    members.write(9)
    first, members.sent = members.sent, 0
    names = [members.write(10, changed=5)]  # whose first line is longer
    assert first > WIDE * 4
    assert 0 < members.sent <= 4 * CHUNK_BYTES
    names.append(members.write(11, changed=5))
    assert members.held("a") == names
    assert members.held("b") == []


def test_a_rank_0_without_its_disk_goes_on_from_the_newest_copy(members: Members) -> None:
    files = [members.shard(9, "base", 1.0), members.shard(9, "rest", 2.0)]
    members.write(9, {"table": files})
    for name in ("base",):  # as a later checkpoint shares it
        (members.disk / rundir.SHARDS / members.checkpoints.stem(10)).mkdir()
        source, target = (members.disk / rundir.SHARDS / members.checkpoints.stem(step) / name for step in (9, 10))
        target.hardlink_to(source)
    members.write(10, {"table": [files[0], members.shard(10, "rest", 3.0)]}, changed=5)
    copied = members.stores["a"].directory / rundir.SHARDS
    assert (copied / members.checkpoints.stem(9) / "base").samefile(copied / members.checkpoints.stem(10) / "base")
    lose_disk(members)
    snapshot = members.newest()
    assert snapshot is not None
    assert (snapshot.generation, snapshot.step) == (1, 10)
    assert snapshot.state["numbers"][:6].tolist() == [10.0] * 5 + [5.0]
    assert snapshot.state["table"]["rows"].unique().tolist() == [3.0]
    assert snapshot.path.parent == members.disk


def test_an_older_disk_is_brought_up_to_date(members: Members) -> None:
    members.write(1)
    shutil.copytree(members.disk, old := members.directory / "old")
    members.write(2)
    members.keeper.close()
    shutil.rmtree(members.disk)
    old.rename(members.disk)
    members.begin()
    snapshot = members.newest()
    assert snapshot is not None
    assert snapshot.step == 2


@pytest.mark.parametrize("is_copied", [True, False], ids=["once more", "as it is copied"])
def test_another_checkpoint_of_the_same_step_is_copied(members: Members, is_copied: bool) -> None:
    base = members.shard(1, "base", 1.0)

    def write(number: float) -> None:
        shards = {"table": [base, members.shard(1, f"rest-{number}", number)]}
        members.checkpoints.write(1, {"numbers": torch.full((9,), number)}, shards=shards)

    def answer(name: str, method: str, value: Any) -> Any:
        if method == "copies_begin" and not again_once:
            again_once.append(None)
            write(2.0)
        return value

    again_once = [None] if is_copied else []
    members.answer = answer
    write(1.0)
    members.keeper.wait()
    if is_copied:
        write(2.0)
        members.keeper.wait()
    lose_disk(members)
    snapshot = members.newest()
    assert snapshot is not None
    assert snapshot.state["numbers"].unique().tolist() == [2.0]
    assert snapshot.state["table"]["rows"].unique().tolist() == [2.0]
    assert not value(members.metrics.checkpoint_copy_failures)


def test_a_torn_checkpoint_is_replaced_by_its_copy(members: Members) -> None:
    members.write(1)
    path = members.disk / members.write(2)
    path.write_bytes(path.read_bytes()[:-1000])
    snapshot = members.newest()
    assert snapshot is not None
    assert snapshot.step == 2


@pytest.mark.parametrize("fault", ["lost", "torn", "lies"])
def test_without_the_newest_copy_the_run_does_not_go_on(members: Members, fault: str) -> None:
    members.write(1)
    members.stores["a"], kept = members.store("a"), members.store("a")
    members.write(2)
    path = kept.directory / members.held("a")[-1]
    if fault == "lost":
        del members.stores["a"]
    elif fault == "torn":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        members.answer = lambda name, method, value: (
            [bytes(memoryview(each).nbytes) for each in value] if method == "copies_read" else value
        )
    lose_disk(members)
    with pytest.raises(UsageError, match=r"checkpoint-000001-0000000002 cannot be brought back .*CHECKPOINT_COPIES=0"):
        members.newest()
    assert [*members.disk.glob("checkpoint-*")] == []
    if fault == "lost":
        members.stores["a"] = kept
        snapshot = members.newest()
        assert snapshot is not None
        assert snapshot.step == 2


@pytest.mark.parametrize(
    ("failures", "resumed"),
    [
        ([CallTimeoutError("a has not answered")] * 2, True),
        ([CallTimeoutError("a has not answered"), PeerLostError("a was lost")], False),
        ([CopyError("newest.json: is damaged")], False),
    ],
    ids=["silent for a while", "silent, then lost", "its disk is broken"],
)
def test_a_member_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[Exception], resumed: bool
) -> None:
    monkeypatch.setattr(keeping, "LOOK_SECONDS", 0.01)
    members, left = Members(tmp_path, "a", rejoin_timeout=60.0), [*failures]
    members.write(9)
    lose_disk(members)

    def answer(name: str, method: str, value: Any) -> Any:
        if method == "copies_claim" and left:
            error = left.pop(0)
            if isinstance(error, PeerLostError):
                del members.stores[name]
            raise error
        return value

    members.answer = answer
    snapshot = members.newest()
    assert (snapshot is not None) == resumed
    assert not left
    members.keeper.close()


def test_a_wait_for_a_holder_ends_with_the_generation(tmp_path: Path) -> None:
    """A holder that is back may come with the next one."""
    members = Members(tmp_path, "ab", rejoin_timeout=60.0)
    members.write(7)
    holder = next(name for name in members.stores if members.held(name))
    del members.stores[holder]
    lose_disk(members)
    members.drain_ordered.set()
    with pytest.raises(Drained) as drained:
        members.newest()
    assert drained.value.step == 7
    members.keeper.close()


def test_so_does_a_wait_for_what_a_member_holds(tmp_path: Path) -> None:
    members = Members(tmp_path, "a", rejoin_timeout=60.0)
    members.write(7)
    members.begin()

    def answer(name: str, method: str, value: Any) -> Any:
        members.drain_ordered.set()
        raise CallTimeoutError(f"{name} has not answered {method}")

    members.answer = answer
    with pytest.raises(Drained) as drained:
        members.newest()
    assert drained.value.step == 7
    members.keeper.close()


def test_a_holder_that_is_lost_is_replaced(members: Members) -> None:
    name = members.write(1)
    assert (members.held("a"), members.held("b")) == ([name], [])
    del members.stores["a"]
    members.keeper.changed("a")
    members.keeper.wait()
    assert members.held("b") == [name]


def test_what_cannot_be_copied_is_counted(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(members.stores["a"], "copies_begin", full)
    monkeypatch.setattr(members.settings, "__dict__", {**vars(members.settings), "drain_timeout": 0.2})
    members.write(1)
    assert members.held("a") == []
    assert value(members.metrics.checkpoint_copy_failures) == 1
    monkeypatch.undo()
    name = members.write(2)
    assert name in members.held("a")


def test_another_run_forgets_the_copies(tmp_path: Path) -> None:
    members = Members(tmp_path, resume=False)
    members.write(1)
    lose_disk(members)
    assert members.newest() is None
    assert members.held("a") == []
    assert rundir.newest_copied(members.directory / "a") == 2  # numbers never repeat


def test_an_earlier_generation_writes_nothing(members: Members) -> None:
    members.write(1)
    old = members.stores["a"].copies_listing((1, 1))
    members.begin()
    members.write(2)
    assert rundir.newest_copied(members.directory / "a") == rundir.newest_copied(members.directory / "b") == 2
    with pytest.raises(CopyError, match="generation 2 has begun"):
        members.stores["b"].copies_begin(old)


BODY = b"x" * 10
BAD = [
    File("../up", 10, 0, digests_of(memoryview(BODY))),
    File("..", 10, 0, digests_of(memoryview(BODY))),
    File("a\0b", 10, 0, digests_of(memoryview(BODY))),
    File("a", -10, 0, b""),
    File("a", 10, 0, b""),
    File("a", 2**60, 0, b""),
    File("", 10, 20, digests_of(memoryview(BODY))),
]


@pytest.mark.parametrize("file", BAD)
def test_files_that_are_none_are_refused(tmp_path: Path, file: File) -> None:
    last = File("", 10, 10, digests_of(memoryview(BODY)))
    store = Store(tmp_path / rundir.COPIES, "a")
    with pytest.raises(CopyError):
        store.copies_begin(Listing((1, 1), (file, last) if file.name else (file,)))
    with pytest.raises(CopyError):
        store.copies_begin(Listing((1, -1), (last,)))
    store.copies_begin(Listing((1, 1), (last,)))
    with pytest.raises(CopyError, match="digest"):
        store.copies_put((1, 1), 0, [0], [b"y" * 10])
    store.copies_put((1, 1), 0, [0], [BODY])
    with pytest.raises(CopyError, match="no checkpoint"):
        store.copies_commit((1, 1))
    assert store.held() == ()
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} <= {store.directory}
