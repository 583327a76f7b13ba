"""Checkpoints and what lies beside them: order, damage, writes that end at every moment, fences and locks."""

from __future__ import annotations

import dataclasses
import errno
import io
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints, Snapshot, read
from rolecall.errors import UsageError
from rolecall.record import rundir
from tests.checkpoint.faults import Faults, attempts, end, fail_with


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.arange(40.0) + step, "step": step, "nested": {"name": "x", "list": [1, 2.5, None]}}


def same(state: dict[str, Any], step: int) -> bool:
    expected = state_of(step)
    weights, others = state.pop("weights"), {name: value for name, value in expected.items() if name != "weights"}
    return torch.equal(weights, expected["weights"]) and state == others


def write(directory: Path, generation: int, step: int, keep: int = 100) -> Path:
    return Checkpoints(directory, "rl", generation, keep).write(step, state_of(step))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def assert_newest(directory: Path, generation: int, step: int) -> None:
    found = Checkpoints(directory, "rl").newest()
    assert found is not None
    assert (found.generation, found.step) == (generation, step)
    assert same(found.state, step)


# ---- order


def test_what_is_known_of_it_lies_beside_the_state(tmp_path: Path) -> None:
    about = {"settings": {"seed": 1}, "seconds": 2.5, "done": 64.0}
    path = Checkpoints(tmp_path, "rl", 3).write(17, {**state_of(17), "settings": "the job's own", "done": 1}, about)
    found = read(path, "rl")
    assert (found.path, found.generation, found.step) == (path, 3, 17)
    assert (found.about, found.state.pop("settings"), found.state.pop("done")) == (about, "the job's own", 1)
    assert same(found.state, 17)
    assert read(write(tmp_path, 3, 18), "rl").about == {}


def test_the_newest_generation_comes_before_the_newest_step(tmp_path: Path) -> None:
    """By number, not by letter; and a file's age does not matter."""
    order = [(1_000_000, 1), (999_999, 10_000_000_000), (999_999, 5), (10, 7), (9, 12), (9, 9), (2, 900)]
    for generation, step in (*order[3:], *order[:3]):
        write(tmp_path, generation, step)
    for name in ("checkpoint-x-1.pt", "checkpoint-000001-1.pt.tmp", ".checkpoint-9999999-1.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [(read(path, "rl").generation, read(path, "rl").step) for path in checkpoint.newest_first(tmp_path)] == order
    for generation, step in order:
        assert_newest(tmp_path, generation, step)
        checkpoint.newest_first(tmp_path)[0].unlink()
    assert Checkpoints(tmp_path, "rl").newest() is None
    assert Checkpoints(tmp_path / "none", "rl").newest() is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    paths = [write(tmp_path, 1 + step // 4, step, keep) for step in range(8)]
    assert checkpoint.newest_first(tmp_path) == paths[: -keep - 1 : -1]
    assert_newest(tmp_path, 2, 7)


# ---- damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda whole: whole[:-1],
    "empty": lambda whole: b"",
    "flipped": lambda whole: whole[:-50] + bytes([whole[-50] ^ 16]) + whole[-49:],
    "longer": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
    "brackets": lambda whole: b"[" * 5000,
}
damaged = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@damaged
def test_a_damaged_newest_is_reported_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write(tmp_path, 1, 10)
    good, bad = write(tmp_path, 2, 20), write(tmp_path, 3, 30)
    bad.write_bytes(damage(bad.read_bytes()))
    before, complaints = contents(tmp_path), list[str]()
    found = Checkpoints(tmp_path, "rl", complain=complaints.append).newest()
    assert found is not None
    assert (found.path, found.step) == (good, 20)
    assert len(complaints) == 1
    assert bad.name in complaints[0]
    assert contents(tmp_path) == before


@damaged
def test_only_damaged_ones_are_no_new_start(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    paths = [write(tmp_path, 1, step) for step in (10, 20)]
    for path in paths:
        path.write_bytes(damage(path.read_bytes()))
    before, complaints = contents(tmp_path), list[str]()
    with pytest.raises(UsageError, match="no usable checkpoint in CHECKPOINT_DIR") as refusal:
        Checkpoints(tmp_path, "rl", complain=complaints.append).newest()
    assert str(tmp_path) in str(refusal.value)
    assert [path.name in complaint for path, complaint in zip(paths[::-1], complaints, strict=True)] == [True, True]
    assert contents(tmp_path) == before


def test_a_directory_under_a_checkpoints_name(tmp_path: Path) -> None:
    write(tmp_path, 1, 10)
    (tmp_path / "checkpoint-000002-0000000001.pt").mkdir()
    assert_newest(tmp_path, 1, 10)


def test_another_jobs_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, 1, 10)
    Checkpoints(tmp_path, "ps", 2).write(20, state_of(20))
    assert_newest(tmp_path, 1, 10)
    with pytest.raises(CheckpointError, match="of job ps, not of rl"):
        read(checkpoint.newest_first(tmp_path)[0], "rl")


@pytest.mark.parametrize(("form", "age"), [(checkpoint.FORMAT + 1, "newer"), (checkpoint.FORMAT - 1, "older")])
def test_one_of_another_format_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int, age: str
) -> None:
    write(tmp_path, 1, 10)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", form)
        other = write(tmp_path, 2, 20)
        assert_newest(tmp_path, 2, 20)
    assert_newest(tmp_path, 1, 10)
    with pytest.raises(CheckpointError, match=f"{age} than this program"):
        read(other, "rl")


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_are_no_spares(tmp_path: Path, keep: int) -> None:
    """The writer who found them damaged keeps `keep` good ones all the same."""
    good = [write(tmp_path, 1, step) for step in (10, 20)]
    for step in (30, 40):
        path = write(tmp_path, 1, step)
        path.write_bytes(path.read_bytes()[:-1])
    kept = Checkpoints(tmp_path, "rl", 2, keep)
    assert kept.newest() is not None
    new = [kept.write(50, state_of(50))]
    usable = [path for path in checkpoint.newest_first(tmp_path) if path in (*good, *new)]
    assert usable == [*new, *good[::-1]][:keep]
    new.append(kept.write(60, state_of(60)))
    assert [path for path in checkpoint.newest_first(tmp_path) if path in (*good, *new)] == [*new[::-1], good[1]][:keep]
    assert_newest(tmp_path, 2, 60)


def test_writing_a_step_again_replaces_it_even_if_it_is_damaged(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, "rl", 1, keep=1)
    path = kept.write(5, state_of(4))
    assert kept.write(5, state_of(5)) == path
    assert_newest(tmp_path, 1, 5)
    path.write_bytes(b"")
    with pytest.raises(UsageError):
        kept.newest()
    assert kept.write(5, state_of(5)) == path
    assert_newest(tmp_path, 1, 5)


@dataclasses.dataclass
class File:
    """A checkpoint to be damaged: where, its bytes, and the bytes of its first line."""

    path: Path
    whole: bytes
    head: int

    def read(self, damaged: bytes) -> Snapshot | None:
        """What is read from it with these bytes; None where the damage is found."""
        self.path.write_bytes(damaged)
        try:
            return read(self.path, "rl")
        except CheckpointError:
            return None

    def flip(self, position: int, bits: int) -> Snapshot | None:
        changed = bytearray(self.whole)
        changed[position] ^= bits
        return self.read(bytes(changed))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> File:
    path = write(tmp_path_factory.mktemp("damage"), 120, 3450)
    whole = path.read_bytes()
    file = File(path, whole, whole.index(b"\n") + 1)
    assert file.read(whole) is not None
    return file


def assert_found_or_harmless(found: Snapshot | None) -> None:
    if found is not None:
        assert (found.generation, found.step) == (120, 3450)
        assert same(found.state, 3450)


@given(st.data(), st.integers(1, 255))
@settings(deadline=None, max_examples=150)
def test_any_changed_byte_is_found_or_harmless(file: File, data: st.DataObject, bits: int) -> None:
    position = data.draw(st.integers(0, len(file.whole) - 1))
    found = file.flip(position, bits)
    assert_found_or_harmless(found)
    if position >= file.head:
        assert found is None


def test_any_change_of_the_first_line_is_found_or_harmless(file: File) -> None:
    """A bit of each byte, and every character with a meaning in JSON: a length becomes negative, a number longer."""
    for position in range(file.head):
        changes = {1 << position % 8} | {file.whole[position] ^ byte for byte in b'-.e0 \n",}'}
        for bits in changes - {0}:
            assert_found_or_harmless(file.flip(position, bits))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_shorter_or_longer_file_is_found(file: File, data: st.DataObject) -> None:
    assert file.read(file.whole[: data.draw(st.integers(0, len(file.whole) - 1))]) is None
    assert file.read(file.whole + data.draw(st.binary(min_size=1, max_size=10))) is None


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_any_bytes_are_read_or_refused(file: File, content: bytes) -> None:
    assert file.read(content) is None
    assert file.read(file.whole[: file.head] + content) is None


# ---- what a file may hold


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    directory, marker = tmp_path / "checkpoints", tmp_path / "ran"
    directory.mkdir()
    path = Checkpoints(directory, "rl", 1).write(1, {"weights": Malicious(marker)})
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        read(path, "rl")
    with pytest.raises(UsageError):
        Checkpoints(directory, "rl").newest()
    assert not marker.exists()
    _, _, body = path.read_bytes().partition(b"\n")
    torch.load(io.BytesIO(body), weights_only=False)  # it would, had anyone trusted it
    assert marker.is_dir()


# ---- a write that ends at any moment


def prepare(directory: Path) -> dict[str, bytes]:
    """Two checkpoints, of which neither is to be harmed; the next write is (2, 30)."""
    directory.mkdir(exist_ok=True)
    write(directory, 1, 10)
    write(directory, 1, 20)
    return contents(directory)


def write_next(directory: Path) -> None:
    Checkpoints(directory, "rl", 2, keep=3).write(30, state_of(30))


def assert_unharmed(directory: Path, before: dict[str, bytes]) -> None:
    """What was there is there, and what has a checkpoint's name is one."""
    now = contents(directory)
    assert {name: now.get(name) for name in before} == before
    found = [read(path, "rl") for path in checkpoint.newest_first(directory)]
    assert [snapshot.step for snapshot in found] in ([20, 10], [30, 20, 10])
    assert all(same(snapshot.state, snapshot.step) for snapshot in found)


def hidden(directory: Path) -> list[str]:
    return [name for name in contents(directory) if not rundir.NAME.fullmatch(name)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS], ids=os.strerror)
def test_a_write_that_fails_harms_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for directory, faults in attempts(tmp_path, fail_with(number)):
        before, refusal = prepare(directory), ""
        with monkeypatch.context() as patch:
            faults.install(patch)
            try:
                write_next(directory)
            except CheckpointError as error:
                refusal = str(error)
        said = os.strerror(number) in refusal and str(directory) in refusal
        assert said == faults.struck
        assert_unharmed(directory, before)
        assert hidden(directory) == []
        write_next(directory)
        assert_newest(directory, 2, 30)


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path / "run")
    faults = Faults(0, end)
    with monkeypatch.context() as patch:
        faults.install(patch)
        write_next(tmp_path / "run")
    steps = faults.steps
    renamed = steps.index("replace")
    assert "fsync" in steps[:renamed]
    assert "write" not in steps[steps.index("fsync") :]
    assert "fsync" in steps[renamed:]  # the directory's, which holds the name


def test_a_writer_that_is_killed_harms_nothing(tmp_path: Path) -> None:
    """A child of its own is killed before each step of the write."""
    left, codes = 0, list[int]()
    for directory, faults in attempts(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        before = prepare(directory)
        child = multiprocessing.get_context("fork").Process(target=write_with, args=(directory, faults))
        child.start()
        child.join()
        codes.append(child.exitcode or 0)
        if not codes[-1]:
            break
        faults.steps = ["happened in the child"] * faults.at
        left += len(hidden(directory))
        assert_unharmed(directory, before)
        Checkpoints(directory, "rl", 3, keep=3).write(40, state_of(40))
        assert hidden(directory) == []  # what the one before had begun is cleared away
        assert_newest(directory, 3, 40)
    assert codes[:-1] == [-signal.SIGKILL] * (len(codes) - 1)
    assert len(codes) > 5
    assert left  # some were killed within the write itself
    assert_newest(directory, 2, 30)  # the one that was not killed


def write_with(directory: Path, faults: Faults) -> None:
    faults.install(pytest.MonkeyPatch())
    write_next(directory)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "none", 1, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "file", 1, 1)


def test_an_old_one_that_cannot_be_deleted_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000001-0000000001.pt").mkdir()
    complaints: list[str] = []
    kept = Checkpoints(tmp_path, "rl", 2, keep=1, complain=complaints.append)
    kept.write(30, state_of(30))
    assert "checkpoint-000001-0000000001.pt cannot be deleted" in complaints[0]
    assert_newest(tmp_path, 2, 30)


# ---- the fence


@pytest.mark.parametrize(("owner", "writes"), [(6, True), (7, True), (8, False), (100, False)])
def test_a_writer_of_an_older_generation_writes_nothing(tmp_path: Path, owner: int, writes: bool) -> None:
    before = prepare(tmp_path / "run")
    kept = Checkpoints(tmp_path / "run", "rl", 7, keep=1, fence=lambda: owner)
    if writes:
        kept.write(30, state_of(30))
        assert_newest(tmp_path / "run", 7, 30)
        return
    with pytest.raises(CheckpointError, match=f"generation 7 is over .now {owner}."):
        kept.write(30, state_of(30))
    assert contents(tmp_path / "run") == before


def test_a_number_that_cannot_be_read_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    def unreadable() -> int:
        raise UsageError("generation.json: cannot be read (Input/output error)")

    kept = Checkpoints(tmp_path, "rl", 4, fence=unreadable)
    with pytest.raises(CheckpointError, match=r"Input/output error.*nothing written"):
        kept.write(1, {})
