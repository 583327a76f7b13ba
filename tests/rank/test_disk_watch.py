"""A slow disk, or one that hangs: one warning that names CHECKPOINT_DIR and the file, and the seconds for a metric."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rolecall.checkpoint import shardfile
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.observe import report
from rolecall.rank import disk_watch
from rolecall.rank.disk_watch import DiskWatch
from rolecall.record import files, rundir
from rolecall.record.files import FileWork


class HangingFsync:
    """`os.fsync`, which waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()

        def hang(descriptor: int) -> None:
            self.reached.set()
            assert self.goes_on.wait(60)

        monkeypatch.setattr(files.os, "fsync", hang)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFsync]:
    monkeypatch.setattr(disk_watch, "WARN_SECONDS", 0.01)
    hanging = HangingFsync(monkeypatch)
    yield hanging
    hanging.goes_on.set()


def shard(directory: Path) -> None:
    shardfile.write_piece(directory / "shard.safetensors", 0, torch.zeros(4, dtype=torch.uint8))
    shardfile.sync(directory, ["shard.safetensors"])


WRITES: dict[str, Callable[[Path], Any]] = {
    "checkpoint-000000-0000000007.pt": lambda directory: Checkpoints(directory, "job").write(7, memoryview(b"packed")),
    rundir.GENERATION: lambda directory: rundir.write_generation(directory, rundir.Persisted(3, "", ())),
    rundir.DONE: lambda directory: rundir.write_done(directory, {}),
    rundir.FAILED: lambda directory: rundir.write_failed(directory, rundir.Failed("", 3, "", 0.0)),
    rundir.SUMMARY: lambda directory: report.write(directory, {}),
    "shard.safetensors": shard,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_hangs_is_named_once(tmp_path: Path, disk: HangingFsync, name: str) -> None:
    writer = threading.Thread(target=WRITES[name], args=(tmp_path,))
    writer.start()
    assert disk.reached.wait(60)
    watch = DiskWatch(tmp_path, lambda: None)
    while watch.seconds <= disk_watch.WARN_SECONDS:
        pass
    with capture_logs() as logs:
        for _ in range(3):
            watch.check()
    (line,) = logs
    assert line["log_level"] == "warning"
    assert f"CHECKPOINT_DIR={tmp_path}" in line["event"]
    assert Path(line["file"]) == tmp_path / name
    disk.goes_on.set()
    writer.join(60)
    with capture_logs() as logs:
        watch.check()
        watch.check()
    assert [line["log_level"] for line in logs] == ["info"]
    assert watch.seconds == 0


def test_what_the_worker_is_at_counts_too(tmp_path: Path) -> None:
    work: list[FileWork] = []
    watch = DiskWatch(tmp_path, lambda: work[0] if work else None)
    with capture_logs() as logs:
        watch.check()
        work.append(FileWork("checkpoint.pt", 9.0))
        watch.check()
        assert not logs
        work[0] = FileWork("checkpoint.pt", 40.0)
        watch.check()
    assert watch.seconds == 40
    assert [line["file"] for line in logs] == ["checkpoint.pt"]
