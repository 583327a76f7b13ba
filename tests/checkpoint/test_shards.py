"""Sharded values: written by those who hold shares, valid by rank 0's manifest, read back by any number of members."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock

import pytest
import safetensors
import torch
from prometheus_client import CollectorRegistry
from structlog.typing import EventDict
from torch import Tensor

from rolecall import Context, Job, Peer, Role, Rows, Settings, Sharded, Share, UsageError, telemetry
from rolecall.checkpoint import capture, checkpoint, shards
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.shardfile import ShardError
from rolecall.checkpoint.shards import Order, Problem, Shares, Written
from rolecall.declare.remote import find, remote
from rolecall.declare.task import Attachment
from rolecall.errors import Drained, PeerLostError, RemoteError
from rolecall.record import rundir
from rolecall.record.rundir import Persisted
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

TOTAL = 40
JOB = Job([Role("lead", print), Role("ps", print, count=2)])


class Calls:
    """In place of the wire: calls are made here, of the shares of the member that is called."""

    def __init__(self) -> None:
        self.of: dict[str, Shares] = {}
        self.lost = ""
        self.raises = ""  # a method

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[Any]:
        if to == self.lost:
            raise PeerLostError(f"{to} was lost")
        method = find(self.of[to], request.method)
        assert method is not None
        assert request.internal
        answer: Future[Any] = Future()
        try:
            if request.method == self.raises:
                raise OverflowError("too many rows")
            answer.set_result(method(*request.args))
        except Exception as error:
            answer.set_exception(RemoteError(f"{to} raised {type(error).__name__}: {error}"))
        return answer


class Gang:
    """A lead and members, each with some rows of `weight` and a value of its own for each."""

    def __init__(
        self,
        directory: Path,
        servers: int,
        spread: bool = False,
        generation: int = 1,
        folders: bool = False,
    ) -> None:
        """With `folders`, members have directories of their own, and do not see that of rank 0."""
        members = (Peer("lead", 0, 0), *(Peer("ps", n, n + 1) for n in range(servers)))
        self.calls, self.weights, self.shares = Calls(), [], []
        self.state: dict[str, Any] = {}
        self.at: Callable[[int, Callable[[], None]], object] = lambda step, begin: begin()
        for me in members:
            folder = directory / me.name if folders and me.rank else directory
            context = Context(
                Settings(checkpoint_dir=folder),
                Attachment(generation, me, members),
                telemetry.build(telemetry.WORKER, CollectorRegistry()),
                JOB,
                checkpoints=None
                if me.rank
                else Checkpoints(folder, "pi", generation, fence=lambda: rundir.read_generation(directory).number),
            )
            context.group.use(self.calls)
            self.calls.of[me.name] = context.shares
            if me.rank == 0:
                self.context, self.model = context, Sharded(context, "model", "ps")
                continue
            first, step, count = me.ordinal * TOTAL // servers, 1, 0
            count = (me.ordinal + 1) * TOTAL // servers - first
            if spread:
                first, step, count = me.ordinal, servers, len(range(me.ordinal, TOTAL, servers))
            weight = torch.zeros(count, 3)
            self.weights.append((weight, first, step))
            rows = {"weight": Rows((weight[:5], weight[5:]), TOTAL, first, step)}
            self.shares.append(
                Share(context, "model", lambda rows=rows: rows, at=lambda step, begin: self.at(step, begin))
            )

    @property
    def whole(self) -> Tensor:
        whole = torch.full((TOTAL, 3), -1.0)
        for weight, first, step in self.weights:
            whole[first : first + step * len(weight) : step] = weight
        return whole

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for (weight, _, _), share in zip(self.weights, self.shares, strict=True):
            share.before(0, len(weight))
            weight.copy_(torch.randn(weight.shape, generator=generator))

    def restore(self) -> dict[str, Any]:
        self.state = self.context.restore({"model": self.model, "step": 0})
        return self.state

    def save(self, step: int, wait: bool = True) -> None:
        self.context.save(step, {**self.state, "model": self.model, "step": step})
        if wait:
            self.context.require_saver().wait(60)


def failures(gang: Gang) -> float:
    return float(gang.context.metrics.checkpoint_failures.collect()[0].samples[0].value)


def files(directory: Path) -> list[Path]:
    return sorted((directory / rundir.SHARDS).glob("*/[!.]*"))


@pytest.mark.parametrize("folders", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize("spread", [False, True])
def test_read_back_by_any_number_of_members(
    tmp_path: Path, folders: bool, before: int, after: int, spread: bool
) -> None:
    gang = Gang(tmp_path, before, spread, folders=folders)
    assert gang.restore()["step"] == 0
    gang.fill(1)
    saved = gang.whole
    gang.save(7)
    assert len(files(tmp_path)) == before
    assert not (tmp_path / "ps_0").exists()
    resumed = Gang(tmp_path, after, spread, generation=2, folders=folders)
    assert resumed.restore()["step"] == 7
    assert resumed.model.restored
    assert torch.equal(resumed.whole, saved)
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], saved)


def test_a_folder_that_an_earlier_rank_0_left_is_not_rank_0s(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1, folders=True)
    (tmp_path / "ps_0" / rundir.SHARDS / "checkpoint-000001-0000000007").mkdir(parents=True)
    gang.fill(1)
    gang.save(7)
    assert [file.name for file in files(tmp_path)] == ["model-ps_0.safetensors"]
    assert files(tmp_path / "ps_0") == []
    assert not list((tmp_path / rundir.SHARDS).glob("*/.*")), "the mark is gone"


def test_a_checkpoint_whose_files_rank_0_lacks_is_none(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    gang.model.begin(7)
    while not isinstance(gang.shares[0].written("checkpoint-000001-0000000007"), Written):
        pass
    for file in files(tmp_path):
        file.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"0007: model-ps_0.safetensors is missing or torn$"):
        gang.model.collect(7)


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.restore()
    gang.fill(1)
    saved = gang.whole
    gang.save(7, wait=False)
    gang.fill(2)
    assert gang.context.require_saver().wait(60)
    gang.context.save(8, {"model": gang.model, "step": 8}, drain=False)
    gang.context.finish(step=9)
    steps = [checkpoint.read(path, "pi").step for path in checkpoint.newest_first(tmp_path)]
    assert steps == [9, 8, 7]
    first = checkpoint.read(checkpoint.newest_first(tmp_path)[-1], "pi").whole()
    assert torch.equal(first.state["model"]["weight"], saved)


def test_none_is_due_while_one_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang, go, original = Gang(tmp_path, 1), threading.Event(), Shares.written

    @remote
    def written(*args: Any) -> Any:
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr(Shares, "written", written)
    saver = gang.context.require_saver()
    gang.save(7, wait=False)
    assert not saver.due(0.0)
    go.set()
    assert saver.wait(60)
    assert saver.due(0.0)


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.restore()
    gang.save(7)
    written = [path.stat().st_mtime_ns for path in files(tmp_path)]
    gang.context.finish(step=7)
    assert [path.stat().st_mtime_ns for path in files(tmp_path)] == written
    gang.fill(1)
    gang.save(7)
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], gang.whole)


def test_what_changes_while_it_is_captured_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang, write = Gang(tmp_path, 1), Share.captured

    def change(share: Share, order: Order) -> capture.Capture:
        monkeypatch.setattr(Share, "captured", write)
        captured = write(share, order)
        gang.fill(1)  # as another thread would
        return captured

    monkeypatch.setattr(Share, "captured", change)
    gang.save(7)
    gang.context.finish(step=7, state={"model": gang.model})
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], gang.whole)


class Writers:
    """A thread for each server, which changes its rows one after the other, beside the steps of rank 0."""

    def __init__(self, gang: Gang) -> None:
        self._lock, self._stopped, self.changed = threading.Lock(), threading.Event(), 0
        self._gang = gang
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(len(gang.shares))]
        gang.at = lambda step, begin: self.between(begin)
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        share, (weight, _, _) = self._gang.shares[number], self._gang.weights[number]
        while not self._stopped.is_set():
            self.between(functools.partial(self._change, share, weight))

    def _change(self, share: Share, weight: Tensor) -> None:
        self.changed += 1
        row = self.changed % len(weight)
        share.before_rows(torch.tensor([row]))
        weight[row] = self.changed

    def between(self, do: Callable[[], object]) -> None:
        """Excludes changes and captures from each other."""
        with self._lock:
            do()

    def stop(self) -> bool:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)
        return True


def test_what_was_changed_before_a_drain_settles_is_in_its_checkpoint(tmp_path: Path, logged: list[EventDict]) -> None:
    gang = Gang(tmp_path, 2)
    gang.restore()
    writers = Writers(gang)

    def lead() -> None:
        for step in gang.context.steps(settled=writers.stop):
            if step == 2:
                gang.context.save()  # beside the changes
            if step > 3 and writers.changed > 1000:
                gang.context.drain()

    try:
        with pytest.raises(Drained):
            lead()
    finally:
        writers.stop()
    saved, warned = gang.whole, [event for event in logged if event["log_level"] == "warning"]
    assert warned == []
    resumed = Gang(tmp_path, 1, generation=2)
    resumed.restore()
    assert torch.equal(resumed.whole, saved)


def test_what_changes_after_the_checkpoint_of_a_drain_is_warned_of(tmp_path: Path, logged: list[EventDict]) -> None:
    gang = Gang(tmp_path, 2)
    gang.restore()
    gang.fill(1)
    saved = gang.whole
    gang.save(7)
    gang.fill(2)
    gang.context.drain()
    with pytest.raises(Drained):
        gang.save(8, wait=False)
    assert [event for event in logged if event["log_level"] == "warning"] == []
    saved = gang.whole
    for _ in range(2):
        gang.fill(3)
    warned = [event["share"] for event in logged if event["log_level"] == "warning"]
    assert warned == ["model-ps_0", "model-ps_1"], "each once"
    resumed = Gang(tmp_path, 2, generation=2)
    resumed.restore()
    assert torch.equal(resumed.whole, saved)


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.fill(1)
    gang.save(7)
    file = files(tmp_path)[1]
    assert file.relative_to(tmp_path) == Path("shards/checkpoint-000001-0000000007/model-ps_1.safetensors")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + length])
    begin, end = described["weight"]["data_offsets"]
    assert described["weight"]["dtype"] == "F32"
    assert described["weight"]["shape"] == [20, 3]
    assert data[8 + length + begin : 8 + length + end] == gang.weights[1][0].numpy().tobytes()
    assert len(data) == 8 + length + end
    with safetensors.safe_open(file, "pt") as read:
        assert list(read.keys()) == ["weight"]
        assert torch.equal(read.get_tensor("weight"), gang.weights[1][0])
        assert json.loads(read.metadata()["rows"]) == {"weight": [TOTAL, 20, 1]}


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


HARMS: dict[str, Callable[[Path], object]] = {
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "flipped": lambda file: flip(file, -5),
    "flipped header": lambda file: flip(file, 20),
    "another's": lambda file: file.write_bytes(file.with_name("model-ps_1.safetensors").read_bytes()),
    "deleted": Path.unlink,
    "all deleted": lambda file: shutil.rmtree(file.parent),
}


@pytest.mark.parametrize("hurt", HARMS.values(), ids=HARMS)
def test_a_hurt_shard_has_the_checkpoint_before_used(tmp_path: Path, hurt: Callable[[Path], object]) -> None:
    gang = Gang(tmp_path, 2)
    gang.fill(1)
    saved = gang.whole
    gang.save(7)
    gang.fill(2)
    gang.save(8)
    newest = checkpoint.newest_first(tmp_path)[0].stem
    hurt(tmp_path / rundir.SHARDS / newest / "model-ps_0.safetensors")
    resumed = Gang(tmp_path, 3, generation=2)
    assert resumed.restore()["step"] == 7
    assert torch.equal(resumed.whole, saved)
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], saved)
    shutil.rmtree(tmp_path / rundir.SHARDS)
    with pytest.raises(UsageError, match=r"^no usable checkpoint in CHECKPOINT_DIR=.*model-ps_0.safetensors"):
        Gang(tmp_path, 3, generation=3).restore()


def test_a_writer_that_was_killed_leaves_no_checkpoint_and_no_files(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.save(7)
    gang.model.begin(8)  # and no manifest
    for share in gang.shares:
        while not isinstance(share.written("checkpoint-000001-0000000008"), Written):
            pass
    assert len(files(tmp_path)) == 4
    resumed = Gang(tmp_path, 2, generation=2)
    assert resumed.restore()["step"] == 7
    resumed.save(9)
    assert {path.parent.name for path in files(tmp_path)} == {
        "checkpoint-000001-0000000007",
        "checkpoint-000002-0000000009",
    }


def test_a_writer_of_an_ended_generation_deletes_nothing_of_the_next_one(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    gang.save(7)
    rundir.write_generation(tmp_path, Persisted(2, "pi", ()))
    unfinished = tmp_path / rundir.SHARDS / "checkpoint-000002-0000000008"
    unfinished.mkdir()
    with pytest.raises(checkpoint.CheckpointError, match=r"^generation 1 is over \(now 2\): nothing written$"):
        gang.model.begin(9)
    assert {path.name for path in unfinished.parent.iterdir()} == {"checkpoint-000001-0000000007", unfinished.name}


def test_shards_of_checkpoints_that_were_moved_away_stay(tmp_path: Path) -> None:
    gang, backup = Gang(tmp_path, 1), tmp_path / "backup"
    gang.save(7)
    gang.save(8)
    saved = files(tmp_path)
    backup.mkdir()
    for path in checkpoint.newest_first(tmp_path):
        path.rename(backup / path.name)
    anew = Gang(tmp_path, 1, generation=2)
    anew.restore()
    for step in range(1, 5):
        anew.save(step)
    assert set(saved) < set(files(tmp_path))
    assert len(files(tmp_path)) == 2 + 3


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    for step in range(1, 7):
        gang.save(step)
    kept = {path.stem for path in checkpoint.newest_first(tmp_path)}
    assert len(kept) == 3
    assert {path.parent.name for path in files(tmp_path)} == kept


def test_a_member_that_is_lost_fails_the_checkpoint_only(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.save(7)
    gang.model.begin(8)
    gang.calls.lost = "ps_1"
    with pytest.raises(checkpoint.CheckpointError, match="ps_1 was lost"):
        gang.model.collect(8)
    assert [path.stem for path in checkpoint.newest_first(tmp_path)] == ["checkpoint-000001-0000000007"]


@pytest.mark.parametrize("method", ["changed", "begin", "written", "write_piece", "sync"])
def test_a_share_that_raises_fails_the_checkpoint_only(tmp_path: Path, logged: list[EventDict], method: str) -> None:
    gang = Gang(tmp_path, 2, folders=True)
    gang.restore()
    gang.save(7)
    gang.calls.raises = method
    step = 7 if method == "changed" else 8
    gang.save(step)
    assert failures(gang) == 1
    assert all("too many rows" in line["problem"] for line in logged if line["log_level"] == "error")
    gang.calls.raises = ""
    gang.save(9)
    assert [path.stem[-1] for path in checkpoint.newest_first(tmp_path)] == ["9", "7"]


def test_a_member_whose_disk_hangs_fails_the_checkpoint_after_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gang = Gang(tmp_path, 2)
    monkeypatch.setattr(shards, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(Share, "_run", lambda *_: None)
    gang.model.settings = gang.model.settings.model_copy(update={"phase_timeout": 0.1})
    gang.model.begin(8)
    collecting = ThreadPoolExecutor(1).submit(gang.model.collect, 8)
    with pytest.raises(checkpoint.CheckpointError, match=r"ps_0 has written nothing for PHASE_TIMEOUT=0\.1 s"):
        collecting.result(30)


def test_an_attempt_that_writes_late_leaves_the_next_ones_files_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gang, write = Gang(tmp_path, 1), shards.shardfile.write_piece
    begun, goes_on, late = threading.Event(), threading.Event(), threading.Event()

    def slow(path: Path, place: int, data: Tensor) -> None:
        begun.set()
        monkeypatch.setattr(shards.shardfile, "write_piece", write)
        assert goes_on.wait(60)
        write(path, place, data)
        late.set()

    monkeypatch.setattr(shards.shardfile, "write_piece", slow)
    gang.model.begin(8)
    assert begun.wait(60)
    gang.calls.lost = "ps_0"
    with pytest.raises(checkpoint.CheckpointError):
        gang.model.collect(8)
    gang.calls.lost = ""
    gang.fill(1)
    gang.save(8)
    goes_on.set()
    assert late.wait(60)
    whole = Checkpoints(tmp_path, "pi").newest()
    assert whole is not None
    assert torch.equal(whole.state["model"]["weight"], gang.whole)


def test_an_attempt_has_the_room_of_the_one_before(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    for _ in range(3):
        gang.model.begin(8)
        gang.model.collect(8)  # and no manifest
        gang.fill(1)
    assert [file.name for file in files(tmp_path)] == ["model-ps_0.2.safetensors"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    (tmp_path / rundir.SHARDS).write_text("in the way")
    gang.save(7)
    assert failures(gang) == 1
    (tmp_path / rundir.SHARDS).unlink()
    gang.save(8)
    assert [path.stem for path in checkpoint.newest_first(tmp_path)] == ["checkpoint-000001-0000000008"]


def test_peers_read_and_write_no_other_files(tmp_path: Path) -> None:
    shares, stem = Shares(tmp_path / rundir.SHARDS), "checkpoint-000001-0000000001"
    (tmp_path / rundir.GENERATION).write_text("mine")
    for wrong in ("..", ".", "../..", ""):
        with pytest.raises(ShardError, match="no checkpoint's name"):
            shares.write_piece(wrong, rundir.GENERATION, 0, torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(ShardError, match="no checkpoint's name"):
            shares.read_piece(wrong, rundir.GENERATION, 0, 4)
    shares.write_piece(stem, f"../../{rundir.GENERATION}", 0, torch.zeros(4, dtype=torch.uint8))
    assert (tmp_path / rundir.GENERATION).read_text() == "mine"
    assert files(tmp_path) == [tmp_path / rundir.SHARDS / stem / rundir.GENERATION]


def test_a_program_that_another_shape_has_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.save(7)
    monkeypatch.setattr("tests.checkpoint.test_shards.TOTAL", 44)
    with pytest.raises(UsageError, match=r"^checkpoint-000001-0000000007: .* tensors .*40, 3.* CHECKPOINT_DIR"):
        Gang(tmp_path, 2, generation=2).restore()


# ---- members that stay


def next_generation(share: Share, number: int = 2) -> None:
    context: Any = share.context
    context.group.begin(Attachment(number, context.me, context.members))


def test_a_read_that_is_under_way_when_its_generation_ends_stops_before_the_next_one_sets_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = Gang(tmp_path, 1)
    first.restore()
    first.fill(1)
    first.save(1)
    snapshot, (share,) = checkpoint.read(checkpoint.newest_first(tmp_path)[0], "pi"), Gang(tmp_path, 1).shares
    files, reads, goes_on = snapshot.shards["model"], threading.Event(), threading.Event()
    read_piece = shards.shardfile.read_piece

    def slow(path: Path, place: int, length: int) -> Tensor:
        reads.set()
        assert goes_on.wait(60)
        return read_piece(path, place, length)

    monkeypatch.setattr(shards.shardfile, "read_piece", slow)
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(share.load, snapshot.path.stem, files)
        assert reads.wait(60)
        next_generation(share)

        def reset() -> float:
            with share.reset():
                return float(next(iter(share._rows().values())).tensors[0].abs().sum())

        resets = pool.submit(reset)
        assert not wait([old, resets], 0.1).done
        goes_on.set()
        problem = old.result(60)
        assert problem is not None
        assert problem.text.endswith("the generation has ended")
        assert resets.result(60) == 0, "nothing was set"
    assert share.load(snapshot.path.stem, files) is None


def test_a_checkpoint_that_an_ended_generation_began_is_given_up(tmp_path: Path) -> None:
    gang, begun = Gang(tmp_path, 1), list[Callable[[], None]]()
    gang.at = lambda step, begin: begun.append(begin)
    gang.restore()
    gang.model.begin(1)
    (share,) = gang.shares
    next_generation(share)
    with share.reset():
        begun.pop()()  # its step is made late
    assert share.changed, "nothing was captured"
    gang.model.begin(2)
    begun.pop()()
    assert not share.changed


def test_a_share_that_is_not_reset_is_named(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 1)
    gang.restore()
    (share,) = gang.shares
    assert share.load("checkpoint-000001-0000000001", []) == Problem(ANY, usage=True)
    next_generation(share)
    context: Any = share.context
    share.settings = context.settings.model_copy(update={"phase_timeout": 0.01})
    with pytest.raises(TimeoutError, match=r"model-ps_0 was not reset within PHASE_TIMEOUT=0.01 s .*`attached`"):
        share.load("checkpoint-000001-0000000001", [])


def test_starting_anew_moves_the_shards_too(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2)
    gang.fill(1)
    gang.save(7)
    saved = gang.whole
    aside = rundir.set_aside(tmp_path, 1, 1.0)
    assert aside is not None
    assert not (tmp_path / rundir.SHARDS).exists()
    moved = Checkpoints(aside, "pi").newest()
    assert moved is not None
    assert torch.equal(moved.state["model"]["weight"], saved)


def test_only_rank_0_has_sharded_values() -> None:
    context = Context(Settings(), Attachment(1, Peer("ps", 0, 1), ()), MagicMock())
    with pytest.raises(UsageError, match="only rank 0"):
        Sharded(context, "model", "ps")
