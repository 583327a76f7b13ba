"""Does anything work at all? In a few seconds: settings, a gang, a checkpoint, and one call."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from rolecall import config, telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.declare import registry
from rolecall.declare.remote import remote
from rolecall.declare.task import Attachment, Peer
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import Answer, Batch, Beat, Directive, Heartbeat, RoleSpec, Rules, WorkerStatus
from tests.ports import free_ports


def test_every_job_has_settings_and_roles() -> None:
    for name in registry.JOBS:
        job, settings = registry.load(name)
        assert registry.roles(job, settings)[0].name == job.roles[0].name


def test_a_gang_starts_a_generation_and_finishes() -> None:
    gang = Gang((RoleSpec("agent", 1, 1, 1, False),), Rules(), "first", 0.0)

    def beat(sequence: int, epoch: int = 0, worker: WorkerStatus | None = None) -> Batch:
        """What the gang says to a heartbeat."""
        heartbeat = Heartbeat("agent", 0, "first", sequence, epoch=epoch, worker=worker or WorkerStatus())
        gang.receive(sequence, Beat("first", sequence, heartbeat=heartbeat), 0.1 * sequence)
        return gang.tick(0.1 * sequence)

    def order(batch: Batch) -> Directive:
        (reply,) = batch.replies
        assert isinstance(reply.answer, Answer)
        assert reply.answer.directive is not None
        return reply.answer.directive

    batch = beat(2, order(beat(1)).epoch)  # it has no worker
    assert batch.effect is not None
    gang.written(True, 0.2)
    directive = order(beat(3))
    assert (directive.kind, directive.generation, directive.listed) == ("run", 1, 1)
    effect = beat(4, directive.epoch, WorkerStatus(generation=1, state="ended", outcome="finished")).effect
    assert effect is not None
    assert effect.kind == "done"


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    Checkpoints(tmp_path, "rl", generation=1).write(7, {"weights": [1.0, 2.0]})
    snapshot = Checkpoints(tmp_path, "rl").newest()
    assert snapshot is not None
    assert (snapshot.step, snapshot.state["weights"]) == (7, [1.0, 2.0])


class _Adder:
    @remote
    def add(self, left: int, right: int) -> int:
        return left + right


def _call_itself(directory: str) -> int:
    from rolecall.context.context import Context
    from rolecall.torch_rpc.distributed import connect  # torch, in a process of its own: a process connects once

    (port,) = free_ports(1)
    me = Peer("agent", 0, 0)
    settings = config.load(config.Settings, bind_addr="127.0.0.1", master_port=port, device="cpu")
    telemetry.use_directory(Path(directory))
    context = Context(
        settings, Attachment(1, me, (me,)), telemetry.build_worker(telemetry.WORKER, "agent", is_rank0=True)
    )
    connect(context, Path(directory))
    context.serve(_Adder())
    return context.call(me.name, _Adder.add, 40, 2).result()


def test_a_call(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_call_itself, (str(tmp_path),)).get(timeout=60) == 42
