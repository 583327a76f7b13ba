"""Two processes on one machine: memory, a peer that is killed, one that is frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rolecall.errors import PeerLostError
from rolecall.wire.messages import Deadline, Request
from tests.wire.wires import DEADLINE, until
from tests.wire.workers import Worker

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from tests.wire.workers import Worker
b = Worker("b_0", Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


class Two:
    """A worker of this process, and one of another."""

    def __init__(self, directory: Path) -> None:
        self.here = Worker("a_0", directory)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.here.dialer.addresses["b_0"] = self.here.address._replace(name="b_0", port=1, path=str(directory / "b_0"))

    def ask(self, method: str, *args: Any, seconds: float = 0.0) -> Any:
        return self.here.wire.call("b_0", Request(method, args, {}, seconds), Deadline(seconds, "RPC_TIMEOUT"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_large_tensors_by_memory(two: Two) -> None:
    tensors = [torch.rand(size) for size in (10, 100_000, 5_000_000)]
    back = two.ask("echo", tensors).result(DEADLINE)
    assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))
    assert two.here.wire._links.link_to("b_0")._sockets.pid in (0, two.process.pid)


def test_a_killed_peer(two: Two) -> None:
    waiting = [two.ask("wait") for _ in range(10)]
    two.ask("echo", 1).result(DEADLINE)
    two.process.kill()
    for future in waiting:
        with pytest.raises(PeerLostError, match="b_0 does not answer"):
            future.result(DEADLINE)
    until(lambda: two.here.lost, "the report")
    assert "b_0 does not answer" in two.here.lost[0]


@pytest.mark.parametrize("nbytes", [10, 30_000_000], ids=["small", "large"])
def test_a_frozen_peer(two: Two, nbytes: int) -> None:
    two.ask("echo", 1).result(DEADLINE)
    os.kill(two.process.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(two.process.pid).status() == psutil.STATUS_STOPPED, "the stop")
    with pytest.raises(PeerLostError, match="nor sends its stacks: it is frozen or cut off"):
        two.ask("echo", torch.zeros(nbytes, dtype=torch.uint8), seconds=0.3).result(DEADLINE)
    os.kill(two.process.pid, signal.SIGCONT)
