"""Worker processes, as their supervisors see them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall import config
from rolecall.config import Settings
from rolecall.context.context import mixed_seed
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.messages import codec
from rolecall.messages import worker as messages
from rolecall.messages.worker import Attach, Connected, Detach, Detached, End, Loaded, Report, Result, Update
from rolecall.rank import worker
from tests.ports import free_ports

DEADLINE = 60.0
TARGET = str(Path(__file__).with_name("staying.py"))
LEAD, PLAYER = Peer("lead", 0, 0), Peer("player", 0, 1)
MEMBERS = (LEAD, PLAYER)


class Process:
    """A worker's process, and the other end of its pipe."""

    def __init__(self, task: Task) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=worker.main, args=(task, theirs))
        self.process.start()
        theirs.close()

    def send(self, message: messages.ToWorker) -> None:
        self.pipe.send_bytes(codec.encode(message))

    def next(self) -> messages.FromWorker:
        """The next message that is no report."""
        while True:
            assert self.pipe.poll(DEADLINE), "no message"
            message = codec.decode(messages.FromWorker, self.pipe.recv_bytes())
            if not isinstance(message, Report):
                return message


class Place:
    """Where the workers of a test run."""

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        self.directory, self.processes = directory, list[Process]()
        self.settings = config.load(
            Settings,
            job=TARGET,
            tls="off",
            master_addr="127.0.0.1",
            bind_addr="127.0.0.1",
            master_port=port,
            device="cpu",
            checkpoint_dir=directory / "run",
            lease_seconds=5,
        )
        self.settings.checkpoint_dir.mkdir()

    def start(self, role: str, attachment: Attachment | None, **changes: Any) -> Process:
        directory = self.directory / f"{role}-{len(self.processes)}"
        directory.mkdir()
        is_rank0 = attachment is not None and attachment.me.rank == 0
        task = Task(TARGET, self.settings, role, 0, is_rank0, attachment, directory=directory, **changes)
        self.processes.append(Process(task))
        return self.processes[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for each in made.processes:
        each.process.kill()
        each.process.join()


def test_a_player_outlives_the_generation(place: Place) -> None:
    player = place.start("player", None)
    assert player.next() == Loaded()
    lead = place.start("lead", Attachment(1, LEAD, MEMBERS))
    player.send(Attach(Attachment(1, PLAYER, MEMBERS)))
    assert (lead.next(), player.next()) == (Connected(1, 0), Connected(1, 0))
    lead.process.kill()
    lead.process.join()
    player.send(Detach())
    assert player.next() == Detached(1, 0)
    members = (LEAD, Peer("player", 0, 1, join=1))
    player.send(Attach(Attachment(2, members[1], members)))
    player.send(Update(Attachment(2, members[1], members)))
    lead = place.start("lead", Attachment(2, LEAD, members))
    assert (lead.next(), player.next()) == (Connected(2, 0), Connected(2, 1))
    result = lead.next()
    assert isinstance(result, Result)
    assert (result.outcome, result.error) == ("finished", "")
    assert result.summary == {
        "pid": player.process.pid,
        "generations": [1, 2],
        "rank": 1,
        "seed": mixed_seed(place.settings.seed, 1, 0, worker.WITHOUT_GENERATION),
        "seconds": result.summary["seconds"],
    }
    player.send(End())
    player.process.join(DEADLINE)
    assert player.process.exitcode == 0


def test_a_worker_that_does_not_stay_ends(place: Place) -> None:
    lead = place.start("lead", Attachment(1, LEAD, (LEAD,)))
    assert lead.next() == Connected(1, 0)
    lead.send(Detach())
    with pytest.raises(EOFError):  # without a result
        lead.next()
    lead.process.join(DEADLINE)
    assert lead.process.exitcode == 0
