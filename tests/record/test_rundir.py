"""The files beside a run's checkpoints: generation.json, DONE and the locks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from filelock import FileLock

from rolecall.errors import UsageError
from rolecall.record import rundir
from rolecall.record.rundir import Persisted
from tests.checkpoint.faults import Ended, attempts, end, fail_with

ROOT = Path(__file__).resolve().parents[2]
FAILSAFE = 120.0


# ---- names


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "-a", "8000", "a b", "a\n", "x" * 64])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"^--name '[^\n]*$"):
        rundir.named(name, False)


def test_a_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rundir.named("a-1.b", False) == Path("runs/a-1.b")
    with pytest.raises(UsageError, match="leave CHECKPOINT_DIR out"):
        rundir.named("a", True)
    monkeypatch.setenv("CHECKPOINT_DIR", "kept")
    with pytest.raises(UsageError, match="leave CHECKPOINT_DIR out"):
        rundir.named("a", False)


def test_a_run_is_named_by_its_folder_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a", "runs/b", "b", "runs/c", "c/logs"):
        Path(folder).mkdir(parents=True)
    for run, folder in {"a": "runs/a", "b": "runs/b", "c": "c", "none": "none", "./b": "b", "runs/a": "runs/a"}.items():
        assert rundir.find(run) == Path(folder), run
    for run in ("", ".", "..", "x" * 300, str(tmp_path)):
        assert rundir.find(run) == Path(run), run


# ---- generation.json


def test_a_generation_is_read_as_written(tmp_path: Path) -> None:
    assert rundir.read_generation(tmp_path) == Persisted(0, "", ())
    assert rundir.read_generation(tmp_path / "none") == Persisted(0, "", ())
    for number in (1, 2, 300):
        written = Persisted(number, "rl", (("agent", 0), ("observer", 12)))
        rundir.write_generation(tmp_path, written)
        assert rundir.read_generation(tmp_path) == written


def test_a_number_is_never_below_one_that_a_checkpoint_has(tmp_path: Path) -> None:
    """generation.json is lost, or older than the checkpoints: a number that repeats would sort behind them."""
    (tmp_path / "checkpoint-000041-0000000005.pt").touch()
    (tmp_path / f"checkpoint-{'9' * 30}-1.pt").touch()  # no name of a checkpoint
    assert rundir.read_generation(tmp_path) == Persisted(41, "", ())
    rundir.write_generation(tmp_path, Persisted(7, "rl", (("agent", 0),)))
    assert rundir.read_generation(tmp_path) == Persisted(41, "rl", (("agent", 0),))
    rundir.write_generation(tmp_path, Persisted(42, "rl", ()))
    assert rundir.read_generation(tmp_path).number == 42


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        bytes(40),
        b'{"number": 3, "job": "rl"}',
        b'{"number": "x", "job": "rl", "members": []}',
        b'{"number": 1.5, "job": "rl", "members": []}',
        b'{"number": 1000000000000000000000000000000, "job": "rl", "members": []}',
        b'{"number": -3, "job": "rl", "members": []}',
        b'{"number": true, "job": "rl", "members": []}',
        b'{"number": 3, "job": "rl", "members": [5]}',
        b'{"number": 3, "job": "rl", "members": [["agent", "x"]]}',
        b'{"number": 3, "job": "rl", "members": [["agent", 1e999]]}',
    ],
)
def test_a_damaged_generation_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / rundir.GENERATION
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged; write") as refusal:
        rundir.read_generation(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("strike", [fail_with(errno.ENOSPC), end], ids=["fails", "is cut off"])
def test_a_write_of_the_generation_is_whole_or_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: Callable[[], NoReturn]
) -> None:
    old, new = Persisted(1, "rl", (("agent", 0),)), Persisted(2, "rl", (("agent", 0), ("observer", 3)))
    for directory, faults in attempts(tmp_path, strike):
        rundir.write_generation(directory, old)
        with monkeypatch.context() as patch:
            faults.install(patch)
            with contextlib.suppress(OSError, Ended):
                rundir.write_generation(directory, new)
        found = rundir.read_generation(directory)
        assert found in (old, new)
        assert faults.struck or found == new


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=os.strerror)
def test_a_full_disk_still_takes_the_next_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rundir.write_generation(tmp_path, Persisted(1, "rl", tuple(("observer", n) for n in range(9))))
    before = (tmp_path / rundir.GENERATION).stat()

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rundir, "write_atomically", full)
    rundir.write_generation(tmp_path, Persisted(2, "rl", (("agent", 0),)))
    assert rundir.read_generation(tmp_path) == Persisted(2, "rl", (("agent", 0),))
    assert (tmp_path / rundir.GENERATION).stat().st_ino == before.st_ino


# ---- DONE


def test_done_is_read_as_written(tmp_path: Path) -> None:
    assert rundir.read_done(tmp_path) is None
    assert rundir.read_done(tmp_path / "none") is None
    summary: dict[str, Any] = {"solved": True, "iterations": 77, "nested": {"a": [1, 2.5, None]}}
    rundir.write_done(tmp_path, summary)
    assert rundir.read_done(tmp_path) == summary
    assert json.loads((tmp_path / rundir.DONE).read_text()) == summary


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"solved": tru'])
def test_a_damaged_done_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / rundir.DONE
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged; delete it") as refusal:
        rundir.read_done(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == content


# ---- locks


class Holder:
    """Another process that takes a lock and holds it until it is killed."""

    CODE = (
        "import sys; from pathlib import Path; from rolecall.record import rundir; "
        "lock = rundir.lock(Path(sys.argv[1]), sys.argv[2], 0); print('held', flush=True); sys.stdin.read()"
    )

    def __init__(self, directory: Path, name: str) -> None:
        command = [sys.executable, "-c", self.CODE, str(directory), name]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout
        assert self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=FAILSAFE)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    held = Holder(tmp_path, rundir.WRITER_LOCK)
    yield held
    held.kill()


def test_a_lock_is_another_processs_until_that_dies(tmp_path: Path, holder: Holder) -> None:
    with pytest.raises(UsageError, match="in use by another running job") as refusal:
        rundir.lock(tmp_path, rundir.WRITER_LOCK, 0)
    assert f"CHECKPOINT_DIR={tmp_path}" in str(refusal.value)
    rundir.lock(tmp_path, rundir.COORDINATOR_LOCK, 0).release()  # the other lock is another
    holder.kill()
    rundir.lock(tmp_path, rundir.WRITER_LOCK, 0).release()


def test_a_lock_is_waited_for(tmp_path: Path, holder: Holder) -> None:
    taken: list[FileLock] = []
    waiting = threading.Thread(target=lambda: taken.append(rundir.lock(tmp_path, rundir.WRITER_LOCK, FAILSAFE)))
    waiting.start()
    holder.kill()
    waiting.join(FAILSAFE)
    assert len(taken) == 1
    with pytest.raises(UsageError, match="in use"):
        rundir.lock(tmp_path, rundir.WRITER_LOCK, 0)
    taken[0].release()


def test_a_lock_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"CHECKPOINT_DIR={tmp_path / 'file' / 'run'}: cannot be written"):
        rundir.lock(tmp_path / "file" / "run", "lock", 0)
    with pytest.raises(UsageError, match="cannot be written"):
        rundir.lock(tmp_path / "file", "lock", 0)
