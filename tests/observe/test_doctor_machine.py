"""`rolecall doctor`, as far as directories, limits and GPUs are concerned: each check, and what breaks exactly that."""

from __future__ import annotations

import os
import resource
from collections import namedtuple
from pathlib import Path

import pytest

from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.observe.cgroup import Cgroup
from rolecall.observe.doctor import files, machine
from rolecall.observe.doctor.subject import Subject
from rolecall.record import rundir
from tests.observe.doctors import look, subject
from tests.tunnel.tunnel_process import JOB

Usage = namedtuple("Usage", "total used free")


def lead(directory: Path, **values: object) -> Subject:
    """Rank 0, which does not run."""
    return subject(directory, role="lead", **values)


def saved(directory: Path, size: int = 0) -> Path:
    return Checkpoints(directory, JOB, 1).write(5, {"weights": [bytes(size)]})


# ---- CHECKPOINT_DIR


def test_a_directory_that_is_as_it_should_be(tmp_path: Path) -> None:
    saved(tmp_path)
    one = lead(tmp_path)
    before = sorted(tmp_path.iterdir())
    names = ("checkpoint directory", "free space")
    assert {name: look(name, one).state for name in names} == dict.fromkeys(names, "ok")
    assert sorted(tmp_path.iterdir()) == before  # nothing is left behind


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    unwritable = Path("/sys/kernel")
    if os.geteuid():
        unwritable = tmp_path
        unwritable.chmod(0o500)
    finding = look("checkpoint directory", lead(unwritable))
    assert finding.state == "problem"
    assert f"CHECKPOINT_DIR={unwritable} cannot be written" in finding.text
    assert look("checkpoint directory", subject(unwritable)).state == "not checked"  # of another rank


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert look("checkpoint directory", lead(tmp_path / "a" / "b")).state == "ok"
    assert look("checkpoint directory", subject(tmp_path / "a")).state == "not checked"
    (tmp_path / "file").touch()
    assert look("checkpoint directory", lead(tmp_path / "file" / "a")).state == "problem"
    assert look("free space", lead(tmp_path / "a")).state == "not checked"


def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lead(tmp_path)
    one.timeout = 0.05
    monkeypatch.setattr("rolecall.observe.doctor.checks.SLACK_SECONDS", 0.0)
    reading, writing = os.pipe()
    monkeypatch.setattr(files.os, "fsync", lambda _: os.read(reading, 1))
    finding = look("checkpoint directory", one)
    os.write(writing, b"x")
    assert (finding.state, finding.text) == ("problem", "no answer within 0.05 s")


@pytest.mark.parametrize(("free", "state"), [(0.5, "problem"), (1.5, "warning"), (3.0, "ok")])
def test_free_space(free: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = saved(tmp_path, 10_000)
    shards = tmp_path / rundir.SHARDS / newest.stem
    shards.mkdir(parents=True)
    (shards / "a").write_bytes(bytes(50_000))
    size = newest.stat().st_size + 50_000
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: Usage(10**9, 0, int(free * size)))
    assert look("free space", lead(tmp_path)).state == state


# ---- TMPDIR


def test_tmpdir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, deep = subject(tmp_path), tmp_path / ("x" * 100)
    deep.mkdir()
    for path, state, text in (
        (tmp_path, "ok", f"{tmp_path} can be written"),
        (tmp_path / "none", "problem", "cannot be written"),
        (deep, "problem", "too long for a socket's path"),
    ):
        monkeypatch.setenv("TMPDIR", str(path))
        finding = look("TMPDIR", one)
        assert (finding.state, text in finding.text) == (state, True)


# ---- limits of this process


def test_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    finding = look("open files", subject(tmp_path))
    assert (finding.state, finding.text.startswith("200 open files; it needs about")) == ("problem", True)


# ---- the cgroup


def container(directory: Path, one: Subject, **numbers: str) -> None:
    """The patient's cgroup has files with these contents; memory_max is that of memory.max."""
    one.cgroup, one.proc = directory / "cgroup", directory / "proc"
    one.cgroup.mkdir(exist_ok=True)
    (one.proc / "self").mkdir(parents=True, exist_ok=True)
    (one.proc / "self" / "cgroup").write_text("0::/\n")
    for name, content in numbers.items():
        (one.cgroup / name.replace("_", ".", 1)).write_text(content + "\n")


GIB = 2**30


@pytest.mark.parametrize(
    ("numbers", "state", "text"),
    [
        ({"memory_max": "max"}, "ok", "are free"),
        ({"memory_max": str(GIB)}, "ok", "the limit is 1.1 GB"),
        ({"memory_max": str(GIB // 4)}, "warning", "a rank that has imported torch takes"),
        ({"memory_events": "oom 3\noom_kill 2"}, "warning", "the kernel has killed 2 processes"),
    ],
)
def test_memory(numbers: dict[str, str], state: str, text: str, tmp_path: Path) -> None:
    one = subject(tmp_path)
    container(tmp_path, one, **numbers)
    finding = look("memory", one)
    assert (finding.state, text in finding.text) == (state, True), finding


def test_a_limit_above_counts_too_and_so_does_version_1(tmp_path: Path) -> None:
    one = subject(tmp_path)
    container(tmp_path, one, memory_max=str(GIB))
    (one.proc / "self" / "cgroup").write_text("0::/pod/container\n")
    (one.cgroup / "pod" / "container").mkdir(parents=True)
    (one.cgroup / "pod" / "container" / "memory.max").write_text("max\n")
    (one.cgroup / "pod" / "memory.max").write_text(f"{GIB // 2}\n")
    assert Cgroup(one.cgroup, one.proc / "self" / "cgroup").least("memory", "memory.max") == GIB // 2
    old = subject(tmp_path)
    container(tmp_path / "proc", old)
    (old.cgroup / "memory").mkdir()
    (old.cgroup / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert Cgroup(old.cgroup, old.proc / "self" / "cgroup").least("memory", "memory.limit_in_bytes") == GIB


@pytest.mark.parametrize(
    ("most", "state"), [("max", "ok"), ("512", "ok"), ("100", "problem")], ids=["unlimited", "many", "few"]
)
def test_processes(most: str, state: str, tmp_path: Path) -> None:
    one = subject(tmp_path)
    container(tmp_path, one, pids_max=most, pids_current="12")
    assert look("processes", one).state == state


# ---- GPUs

H200 = "echo 'NVIDIA H200, 550.54.15'"


@pytest.mark.parametrize(
    ("device", "cuda", "smi", "visible", "state", "text"),
    [
        ("cpu", "12.8", "", None, "ok", "DEVICE=cpu"),
        ("auto", "", "", None, "ok", "it computes on the CPU"),
        ("auto", "12.8", "", None, "warning", "nvidia-smi cannot be run"),
        ("cuda", "12.8", "", None, "problem", "DEVICE=cuda, but nvidia-smi cannot be run"),
        ("auto", "", H200, None, "warning", "torch is built without CUDA"),
        ("cuda", "", H200, None, "problem", "torch is built without CUDA"),
        ("cuda", "12.8", H200, None, "ok", "1 x NVIDIA H200, 550.54.15; torch is built for CUDA 12.8"),
        ("cuda", "12.8", "echo 'Driver/library version mismatch'; exit 18", None, "problem", "version mismatch"),
        ("cuda", "12.8", H200, "", "problem", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ("auto", "12.8", H200, "-1", "warning", "hides every GPU"),
    ],
)
def test_driver_and_torchs_build_must_fit(
    device: str,
    cuda: str,
    smi: str,
    visible: str | None,
    state: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    if smi:
        program.write_text(f"#!/bin/sh\n{smi}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "cuda_of_torch", lambda: cuda)
    finding = look("GPU", subject(tmp_path, device=device))
    assert (finding.state, text in finding.text) == (state, True), finding


def test_the_cuda_that_torch_is_built_for(tmp_path: Path) -> None:
    import torch

    assert machine.cuda_of_torch() == (torch.version.cuda or "")
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    assert machine.cuda_of_torch(tmp_path) == "12.8"
    (tmp_path / "version.py").write_text("cuda = None\n")
    assert machine.cuda_of_torch(tmp_path) == ""
    assert machine.cuda_of_torch(tmp_path / "none") == ""
