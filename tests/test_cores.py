"""The cores and the memory that a rank may use, no more than its container's limits."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from rolecall import config
from rolecall.config import Settings
from rolecall.machine import cores, free_memory

V2, QUOTA, PERIOD = "cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


def cgroup(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def v1(quota: str, period: str) -> dict[str, str]:
    return {QUOTA: quota + "\n", PERIOD: period + "\n"}


TORN: list[dict[str, str | bytes]] = [
    {V2: ""},
    {V2: "100000 "},
    {V2: "100000 100000 100000"},
    {V2: "100000 1x"},
    {V2: b"\xff\xfe 100000"},
    {QUOTA: "100000"},
    {PERIOD: "100000"},
    {QUOTA: "100000", PERIOD: ""},
    {f"{V2}/file": "in its place"},
]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({V2: "200000 100000\n"}, 2),
        ({V2: "100001 100000\n"}, 2),
        ({V2: "100000 100000\n"}, 1),
        ({V2: "1000 1000000\n"}, 1),
        ({V2: "75000 25000\n"}, 3),
        (v1("250000", "100000"), 3),
        (v1("10000", "100000"), 1),
        ({V2: "max 100000", **v1("200000", "100000")}, 2),
        # no limit, one of more than there are, or one that cannot be read
        *((files, 8) for files in ({}, {V2: "max 100000\n"}, v1("-1", "100000"), {V2: "1600000 100000\n"}, *TORN)),
    ],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str | bytes], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert cores(cgroup(tmp_path, files)) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    assert cores(tmp_path) == 1


MAX, CURRENT, STAT = "memory.max", "memory.current", "memory.stat"
V1_MEMORY = {
    "memory/memory.limit_in_bytes": "3000000\n",
    "memory/memory.usage_in_bytes": "1000000\n",
    "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 20\n",
}
USED = {CURRENT: "600000\n", STAT: "anon 500000\ninactive_file 70000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({MAX: "1000000\n", **USED}, 470_000),
        ({MAX: "500000\n", **USED}, 0),  # the limit was lowered
        (V1_MEMORY, 2_000_020),
        ({MAX: "max\n", **USED, **V1_MEMORY}, 2_000_020),
        *((files, None) for files in (
            {}, {MAX: "max\n", **USED}, {MAX: str(2**62), **USED}, {MAX: "1000000\n"}, {MAX: "", **USED},
            {MAX: "1000000", **USED, STAT: "torn"}, {MAX: "1000000", **USED, STAT: "anon 5"},
        )),
    ],
)  # fmt: skip
def test_a_containers_memory_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str | bytes], expected: int | None
) -> None:
    """None: as much as the machine has."""
    available = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    assert free_memory(cgroup(tmp_path, files)) == (10**9 if expected is None else expected)


def test_threads_are_the_cores_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cores", lambda: 7)
    assert Settings(threads=0).cpu_threads == 7
    assert Settings(threads=3).cpu_threads == 3
