"""The disk cache of the jobs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from rolecall.jobs.support import cached

CALLS = list[int]()


def numbers(key: int, unimportant: str) -> torch.Tensor:
    CALLS.append(key)
    return torch.arange(key)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, once there is one."""
    CALLS.clear()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    cached(numbers, ignore=("unimportant",))(1, "")
    (directory,) = tmp_path.iterdir()
    return directory


def call(key: int, unimportant: str = "") -> int:
    """How often `numbers` is called for a call of the cached function."""
    before = len(CALLS)
    assert cached(numbers, ignore=("unimportant",))(key, unimportant).tolist() == [*range(key)]
    return len(CALLS) - before


@pytest.mark.usefixtures("directory")
def test_a_value_is_computed_once_for_a_key() -> None:
    assert [call(1, "other"), call(2), call(2)] == [0, 1, 0]


def test_a_torn_file_is_computed_again(directory: Path) -> None:
    (file,) = directory.rglob("output.pkl")
    file.write_bytes(file.read_bytes()[:20])
    assert call(1) == 1


def test_a_directory_that_others_can_write_is_not_used(directory: Path) -> None:
    directory.chmod(0o777)
    assert [call(1), call(1)] == [1, 1]


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.rename(tmp_path / "theirs")
    directory.symlink_to(tmp_path / "theirs")
    assert [call(1), call(1)] == [1, 1]
