"""`rolecall debug` at a terminal, with ranks of their own."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import ROOT, until

ROLECALL = [sys.executable, "-m", "rolecall"]
LIMITS = ["--rpc-timeout", "1", "--lease-seconds", "1.5", "--stuck-seconds", "1.5", "--phase-timeout", "1.5"]
LONGER = 3.0  # seconds than all of them
SECONDS = 30.0  # a fail-safe


class Terminal:
    """A terminal in which `rolecall debug` runs."""

    def __init__(self, run: Path, member: str) -> None:
        self._side, other = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        command = [*ROLECALL, "debug", str(run), member]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self._shown = ""

    def reads(self, text: str) -> str:
        """What is shown until `text` is, without it."""
        end = time.monotonic() + SECONDS
        while text not in self._shown:
            if not select.select([self._side], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} is not shown: {self._shown}")
            try:
                self._shown += os.read(self._side, 2**16).decode()
            except OSError:  # the command has ended
                raise AssertionError(f"{text!r} is not shown: {self._shown}") from None
        before, _, self._shown = self._shown.partition(text)
        return before

    def types(self, text: str) -> None:
        os.write(self._side, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._side)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    log = (tmp_path / "log").open("w")
    command = [*ROLECALL, "run", str(ROOT / "tests" / "integration" / "debugged.py"), "--plain", *LIMITS]
    with (
        log,
        subprocess.Popen([*command, "--checkpoint-dir", str(tmp_path / "run")], stdout=log, stderr=log) as process,
    ):
        yield process
        process.terminate()
        process.wait(SECONDS)


def test_a_drain_waits_for_no_breakpoint(run: subprocess.Popen[str], tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    until(lambda: f"rolecall debug {folder} worker_0" in log.read_text(), "the breakpoint")
    run.send_signal(signal.SIGINT)
    assert run.wait(SECONDS) == 130
    assert [*folder.glob("checkpoint-*")], log.read_text()  # it was no kill


def test_a_member_is_debugged_for_longer_than_all_limits(run: subprocess.Popen[str], tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    until(lambda: f"rolecall debug {folder} worker_0" in log.read_text(), "the breakpoint")
    worker = Terminal(folder, "worker_0")
    try:
        assert "debugged.py" in worker.reads("(worker_0) ")
        worker.types("p number, doubled\n")
        assert "(3, 6)" in worker.reads("(worker_0) ")
        time.sleep(LONGER)
        worker.types("q\n")
        worker.reads("worker_0 goes on")
        assert worker.process.wait(SECONDS) == 0
    finally:
        worker.close()
    lead = Terminal(folder, "lead_0")  # which is at no breakpoint
    try:
        assert "-> " in lead.reads("(lead_0) ")
        before = (folder / "step").read_text()
        lead.types("c\n")
        until(lambda: (folder / "step").read_text() != before, "another step")
        lead.process.send_signal(signal.SIGINT)
        lead.reads("stops at its next line")
        lead.reads("(lead_0) ")
        lead.types('state["is_over"] = True\n')
        lead.reads("(lead_0) ")
        lead.types("\x04")
        assert lead.process.wait(SECONDS) == 0
    finally:
        lead.close()
    assert run.wait(SECONDS) == 0, log.read_text()
    assert log.read_text().count("gang generation") == 1
    result = json.loads((folder / "summary.json").read_text())["result"]
    assert (result["doubled"], result["is_over"]) == (8, True)
