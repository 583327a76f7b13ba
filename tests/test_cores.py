"""How many cores a rank may use: its affinity, and no more than its container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rolecall import config
from rolecall.config import Settings
from rolecall.machine import cores

V2, QUOTA, PERIOD = "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def cgroup(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def v1(quota: str, period: str) -> dict[str, str]:
    return {QUOTA: quota + "\n", PERIOD: period + "\n"}


LIMITS = [
    ({V2: "200000 100000\n"}, 2),
    ({V2: "150000 100000\n"}, 2),
    ({V2: "100001 100000\n"}, 2),
    ({V2: "100000 100000\n"}, 1),
    ({V2: "50000 100000\n"}, 1),
    ({V2: "1000 1000000\n"}, 1),
    ({V2: "75000 25000\n"}, 3),
    (v1("200000", "100000"), 2),
    (v1("250000", "100000"), 3),
    (v1("10000", "100000"), 1),
]
NO_LIMITS = [
    {},
    {V2: "max 100000\n"},
    v1("-1", "100000"),
    {V2: "1600000 100000\n"},  # of more than there are
    v1("1600000", "100000"),
]
TORN: list[dict[str, str | bytes]] = [
    {V2: ""},
    {V2: "100000"},
    {V2: "100000 "},
    {V2: "100000 100000 100000"},
    {V2: "100000 1x"},
    {V2: b"\xff\xfe 100000"},
    {QUOTA: "100000"},
    {PERIOD: "100000"},
    {QUOTA: "", PERIOD: ""},
    {QUOTA: "100000", PERIOD: ""},
    {f"{V2}/file": "in its place"},
]


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(("files", "expected"), LIMITS)
def test_a_limit_counts(tmp_path: Path, files: dict[str, str | bytes], expected: int) -> None:
    assert cores(cgroup(tmp_path, files)) == expected


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize("files", NO_LIMITS)
def test_no_limit(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    assert cores(cgroup(tmp_path, files)) == 8


@pytest.mark.usefixtures("affinity")
def test_the_least_of_two_limits_counts(tmp_path: Path) -> None:
    assert cores(cgroup(tmp_path, {V2: "max 100000", **v1("200000", "100000")})) == 2
    assert cores(cgroup(tmp_path, {V2: "300000 100000"})) == 2
    assert cores(cgroup(tmp_path, {V2: "100000 100000"})) == 1


@pytest.mark.parametrize("files", [{V2: "400000 100000"}, v1("400000", "100000"), {}])
def test_never_more_than_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str | bytes]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    assert cores(cgroup(tmp_path, files)) == 1


def test_threads_are_the_cores_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cores", lambda: 7)
    assert Settings(threads=0).cpu_threads == 7
    assert Settings(threads=3).cpu_threads == 3
