"""Faults in a write: an error or the end of the process before each of its steps on the disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest


class Faults:
    """Strikes before the `at`-th step of a write on the disk; a write of bytes is struck half way."""

    def __init__(self, at: int, strike: Callable[[], object]) -> None:
        self.at, self.strike, self.steps = at, strike, list[str]()

    def step(self, kind: str) -> None:
        self.steps.append(kind)
        if len(self.steps) == self.at:
            self.strike()

    @property
    def struck(self) -> bool:
        return len(self.steps) >= self.at

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real_open = Path.open

        def open_(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
            if "r" in mode:
                return real_open(path, mode, *args, **named)
            self.step("open")
            return FaultyFile(real_open(path, mode, *args, **named), self)

        patch.setattr(Path, "open", open_)
        for name in ("fsync", "replace", "rename"):
            patch.setattr(os, name, self._struck(name, getattr(os, name)))

    def _struck(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.step(kind)
            return real(*args, **named)

        return call


class FaultyFile:
    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> None:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._faults.step("write")
        self._file.write(data[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Ended(BaseException):
    """Stands for the end of the process."""


def fail_with(number: int) -> Callable[[], NoReturn]:
    def strike() -> NoReturn:
        raise OSError(number, os.strerror(number))

    return strike


def end() -> NoReturn:
    raise Ended


def attempts(directory: Path, strike: Callable[[], object]) -> Iterator[tuple[Path, Faults]]:
    """A new folder and faults for each step of a write, until a write ends before the fault."""
    for at in itertools.count(1):
        faults = Faults(at, strike)
        folder = directory / f"at-{at}"
        folder.mkdir()
        yield folder, faults
        if not faults.struck:
            assert {"open", "write", "fsync", "replace"} <= set(faults.steps), "nothing was tried"
            return
