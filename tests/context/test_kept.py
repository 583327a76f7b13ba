"""What is kept for later processes: made once for a key, never taken from others or where it is damaged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rolecall.context import kept
from rolecall.context.kept import keep, versions


class Maker:
    """Makes a value, and counts how often."""

    times = 0

    def __call__(self) -> dict[str, Any]:
        self.times += 1
        return {"numbers": torch.arange(3), "words": ["a", "b"], "pair": (1, None)}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"rolecall-kept-{os.getuid()}"


def test_it_is_made_once_for_a_key(directory: Path) -> None:
    make = Maker()
    first, second = keep(("a", 1), make), keep(("a", 1), make)
    assert make.times == 1
    assert torch.equal(second["numbers"], first["numbers"])
    assert (second["words"], second["pair"]) == (["a", "b"], (1, None))
    keep(("a", 2), make)
    assert make.times == 2
    assert len(list(directory.iterdir())) == 2
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_file_is_made_again(directory: Path, damage: bytes | None) -> None:
    make = Maker()
    keep("a", make)
    (file,) = directory.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?" if damage is None else damage)
    assert keep("a", make)["words"] == ["a", "b"]
    assert make.times == 2
    assert file.read_bytes() == content


def test_a_folder_that_others_may_write_is_not_used(directory: Path) -> None:
    make = Maker()
    keep("a", make)
    directory.chmod(0o777)
    keep("a", make)
    assert make.times == 2


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    directory.symlink_to(tmp_path / "theirs")
    make = Maker()
    keep("a", make)
    keep("a", make)
    assert make.times == 2
    assert list((tmp_path / "theirs").iterdir()) == []


def test_without_a_place_or_where_it_is_large_it_is_made_each_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    monkeypatch.setattr(kept, "MOST", 10)
    keep("a", make)
    assert list(directory.iterdir()) == []
    directory.rmdir()
    directory.write_text("a file")
    keep("a", make)
    assert make.times == 2


def test_versions_of_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    os.utime(file, ns=(1, 1))
    before = versions([file])
    assert versions([file]) == before
    os.utime(file, ns=(1, 2))
    assert versions([file]) != before
    file.write_text("other")
    os.utime(file, ns=(1, 1))
    assert versions([file]) != before
    with pytest.raises(FileNotFoundError):
        versions([tmp_path / "none"])
