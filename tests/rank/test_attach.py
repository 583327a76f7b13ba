"""A supervisor's handle on a worker that stays: it loads, joins a generation, leaves it, and joins another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.declare.task import Attachment, Peer, Task
from rolecall.gang.protocol import Join, LostPeer, WorkerState, WorkerStatus
from rolecall.messages import codec
from rolecall.messages import worker as messages
from rolecall.rank import worker_process
from rolecall.rank.worker_process import WorkerProcess

DEADLINE = 60.0  # the fork server imports torch first
LOADS = Task("rl", Settings(job="rl"), "observer", 1)


def part(generation: int, join: int = 0) -> Attachment:
    me = Peer("observer", 1, 1, join)
    return Attachment(generation, me, (Peer("agent", 0, 0), me))


# ---- stand-ins for the worker


class Standin:
    """Obeys as a worker of a role that stays."""

    def __init__(self, task: Task, connection: Any) -> None:
        self.connection, self.attachment = connection, task.attachment

    def send(self, *sent: messages.FromWorker) -> None:
        for message in sent:
            self.connection.send_bytes(codec.encode(message))

    @property
    def part(self) -> tuple[int, int]:
        assert self.attachment
        return self.attachment.generation, self.attachment.me.join

    def attached(self) -> None:
        self.send(messages.Connected(*self.part))

    def updated(self) -> None:
        pass

    def detached(self) -> None:
        self.send(messages.Detached(*self.part))

    def run(self) -> None:
        if self.attachment:
            self.attached()
        else:
            self.send(messages.Loaded())
        while True:
            match codec.decode(messages.ToWorker, self.connection.recv_bytes()):
                case messages.Attach(attachment):
                    self.attachment = attachment
                    self.attached()
                case messages.Update():
                    self.updated()
                case messages.Detach():
                    self.detached()
                case messages.End():
                    return


def obeys(task: Task, connection: Any) -> None:
    Standin(task, connection).run()


class Reporting(Standin):
    def attached(self) -> None:
        if self.part[0] == 1:
            lost = messages.PeerLost(Peer("observer", 2, 2, join=4), replace=True)
            self.send(messages.Report(7), messages.DrainRefused("no space"), lost)
        super().attached()


def reports(task: Task, connection: Any) -> None:
    Reporting(task, connection).run()


class Late(Standin):
    """At its second part, messages of the first are still on their way; it connects at an update."""

    def attached(self) -> None:
        if self.part[0] == 1:
            super().attached()
        else:
            self.send(messages.Connected(1, 0), messages.Detached(2, 0, "an old join"), messages.Report(0, "restoring"))

    def updated(self) -> None:
        super().attached()


def is_late(task: Task, connection: Any) -> None:
    Late(task, connection).run()


class Deaf(Standin):
    def detached(self) -> None:
        pass


def is_deaf(task: Task, connection: Any) -> None:
    Deaf(task, connection).run()


class Exiting(Standin):
    def detached(self) -> None:
        os._exit(0)


def exits(task: Task, connection: Any) -> None:
    Exiting(task, connection).run()


# ---- the tests


class Play:
    """A worker, from its start on."""

    def __init__(self, task: Task = LOADS) -> None:
        self.changes = asyncio.Event()
        self.worker = WorkerProcess(task, self.changes.set)

    async def until(self, state: WorkerState, true: Callable[[], bool] = lambda: True) -> WorkerStatus:
        async with asyncio.timeout(DEADLINE):
            while not (self.worker.state == state and true()):
                await self.changes.wait()
                self.changes.clear()
        return self.worker.status()

    async def running(self, attachment: Attachment) -> WorkerStatus:
        self.worker.attach(attachment)
        return await self.until("running")

    async def end(self) -> WorkerStatus:
        self.worker.kill("stopped")
        return await self.until("ended")


def play(monkeypatch: pytest.MonkeyPatch, run: Any, steps: Callable[[Play], Any], task: Task = LOADS) -> Any:
    monkeypatch.setattr(worker_process, "_run", run)

    async def begin() -> Any:
        play = Play(task)
        await play.worker.start(60)
        try:
            return await steps(play)
        finally:
            await play.end()

    return asyncio.run(begin())


def test_one_process_is_a_part_of_one_generation_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        worker = play.worker
        worker.relabel(1, 2)
        assert worker.status() == WorkerStatus(1, "loading", join=2)
        assert await play.until("ready") == WorkerStatus(1, "ready", join=2)
        pid = worker.pid
        worker.attach(part(1, 2))
        assert worker.status() == WorkerStatus(1, "starting", join=2)
        assert await play.until("running") == WorkerStatus(1, "running", join=2)
        await worker.detach(DEADLINE)
        assert worker.status() == WorkerStatus(1, "ready", "stopped", join=2)
        worker.relabel(1, 2)
        assert worker.status().outcome == "stopped"  # it was that part
        worker.relabel(2, 1)
        assert worker.status() == WorkerStatus(2, "ready", join=1)
        assert await play.running(part(2, 1)) == WorkerStatus(2, "running", join=1)
        assert worker.pid == pid

    play(monkeypatch, obeys, steps)


def test_a_loading_worker_may_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        play.worker.attach(part(1))
        assert (await play.until("running")).generation == 1

    play(monkeypatch, obeys, steps)


def test_a_new_part_begins_without_what_the_last_one_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        first = await play.running(part(1))
        assert (first.step, first.error, first.drains_failed) == (7, "no space", 1)
        assert first.lost_peers == (LostPeer(Join("observer", 2, 4), replace=True),)
        await play.worker.detach(DEADLINE, "rank 0 does not answer")
        left = play.worker.status()
        assert (left.state, left.outcome, left.error) == ("ready", "lost", "rank 0 does not answer")
        assert await play.running(part(2)) == WorkerStatus(2, "running")

    play(monkeypatch, reports, steps)


def test_messages_of_an_earlier_part_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        await play.running(part(1))
        await play.worker.detach(DEADLINE)
        play.worker.attach(part(2, 1))
        status = await play.until("starting", lambda: play.worker.phase == "restoring")
        assert (status.generation, status.join, status.outcome) == (2, 1, "")
        play.worker.update(part(2, 1))
        assert (await play.until("running")).join == 1

    play(monkeypatch, is_late, steps)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_detach_that_is_not_confirmed_kills(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    async def steps(play: Play) -> None:
        await play.running(part(1))
        if frozen:
            os.kill(play.worker.pid, signal.SIGSTOP)
        await asyncio.wait_for(play.worker.detach(0.2), DEADLINE)
        assert play.worker.status() == WorkerStatus(1, "ended", "stopped")

    play(monkeypatch, is_deaf, steps)


def test_a_worker_whose_role_does_not_stay_ends_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        await play.until("running")
        await play.worker.detach(DEADLINE)
        assert (await play.until("ended")).outcome == "stopped"

    play(monkeypatch, exits, steps, Task("rl", LOADS.settings, "observer", 1, attachment=part(1)))


def test_the_end_of_a_ready_worker_has_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        await play.running(part(1))
        await play.worker.detach(DEADLINE, "rank 0 does not answer")
        os.kill(play.worker.pid, signal.SIGALRM)
        status = await play.until("ended")
        assert (status.outcome, status.error) == ("killed", "killed by SIGALRM")

    play(monkeypatch, obeys, steps)


def test_a_worker_that_its_supervisor_finds_faulty_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(play: Play) -> None:
        await play.running(part(1))
        play.worker.fail("uses too much memory")
        status = await play.until("ended")
        assert (status.outcome, status.error) == ("failed", "uses too much memory")

    play(monkeypatch, obeys, steps)


def test_a_second_detach_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directive, while the worker is leaving its generation because rank 0 was silent."""

    async def steps(play: Play) -> None:
        await play.running(part(1))
        await asyncio.gather(play.worker.detach(DEADLINE, "rank 0 does not answer"), play.worker.detach(DEADLINE))
        assert play.worker.status().error == "rank 0 does not answer"

    play(monkeypatch, obeys, steps)
