"""The context of a job's function: progress, checkpoints, peers; and how a user's own code and settings are taken."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import InvalidStateError
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from structlog.typing import EventDict

from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints, read
from rolecall.config import Settings
from rolecall.context import training
from rolecall.context.context import Context, choose_device
from rolecall.errors import Drained, PeerLostError, UsageError
from rolecall.fields import FromUser
from rolecall.torch_rpc import rpc
from rolecall.torch_rpc.rpc import RankObject
from tests.context.contexts import AGENT, ONE, TWO, Clock, Supervisor, make, value

# ---- progress


def test_the_start_of_training_is_logged_and_recorded(
    context: Context, supervisor: Supervisor, logged: list[EventDict]
) -> None:
    context.start(40, done=100, total=300, goal=0.9, dataset="mine")
    assert logged == [{"event": "training", "log_level": "info", "step": 40, "dataset": "mine"}]
    assert supervisor.records == [("start", 40, 1), ("train", 40, 0), ("goal", 40, 0.9)]
    assert value(context.metrics.goal) == 0.9


def test_a_step_sets_metrics_and_records(context: Context, supervisor: Supervisor) -> None:
    context.start(0)
    supervisor.records.clear()
    context.log(1, done=8, score=0.25, epoch=3, rpc_connect_seconds=0.5)
    context.log(2, done=20)
    assert supervisor.records == [("score", 1, 0.25), ("done", 1, 8), ("done", 2, 20)]
    assert supervisor.steps == [1, 2]
    names = ("step", "done", "score", "epoch", "rpc_connect_seconds")
    assert [value(getattr(context.metrics, name)) for name in names] == [2, 20, 0.25, 3, 0.5]


def test_work_before_a_restart_is_not_counted_again(context: Context) -> None:
    context.start(10, done=100)
    context.log(11, done=108)
    assert value(context.metrics.done) == 8


def test_there_is_a_line_every_log_interval(context: Context, clock: Clock, logged: list[EventDict]) -> None:
    context.start(7)
    logged.clear()
    for step in (9, 10, 15, 31, 39, 40):  # 31 is beyond 20 and 30: one line
        clock.now += 2
        context.log(step, done=100 * step)
    assert [event["event"] for event in logged] == ["step 10", "step 31", "step 40"]
    assert [event["samples_per_s"] for event in logged] == [250, 525, 225]


def test_a_line_has_the_epoch_and_the_mean_loss_of_the_work_since_the_last(
    context: Context, supervisor: Supervisor, logged: list[EventDict]
) -> None:
    context.start(0)
    context.log(1, done=10, loss=1.0, epoch=2)
    assert value(context.metrics.loss) == 0
    context.log(10, done=40, loss=3.0)
    context.log(20, done=50, loss=7.0)
    assert [event["event"] for event in logged[1:]] == [
        "Epoch 2\tstep 10\tloss 2.5000", "Epoch 2\tstep 20\tloss 7.0000"
    ]  # fmt: skip
    assert [record for record in supervisor.records if record[0] == "loss"] == [("loss", 10, 2.5), ("loss", 20, 7.0)]
    assert value(context.metrics.loss) == 7


def test_a_line_is_a_message_where_one_is_given(context: Context, logged: list[EventDict]) -> None:
    context.start(0)
    context.log(10, done=5, message="Iteration 10")
    assert logged[-1]["event"] == "Iteration 10"


def test_the_time_left_follows_from_this_generations_rate(
    context: Context, clock: Clock, logged: list[EventDict]
) -> None:
    context.start(9, done=100, total=300)
    context.log(9, done=100)
    assert value(context.metrics.left_seconds) == 0
    clock.now += 10
    context.log(10, done=150)
    assert value(context.metrics.left_seconds) == 30
    assert logged[-1]["left_s"] == 30


def test_without_a_total_there_is_no_time_left(context: Context, clock: Clock, logged: list[EventDict]) -> None:
    context.start(0)
    clock.now += 10
    context.log(10, done=150)
    assert "left_s" not in logged[-1]
    assert value(context.metrics.left_seconds) == 0


def test_another_ranks_progress_is_rank_zeros(tmp_path: Path, supervisor: Supervisor) -> None:
    context = make(tmp_path, supervisor, me=ONE)
    with pytest.raises(RuntimeError, match="not connected"):
        context.log(1)
    first, forwarded = make(tmp_path), list[str]()

    def forward(origin: Context, method: str, *args: Any, **values: Any) -> None:
        assert origin is context
        forwarded.append(method)
        getattr(first.progress, method)(*args, **values)

    context.transport = SimpleNamespace(forward=forward)
    context.start(0, total=10)
    context.log(3, done=4, loss=0.5, score=0.1, epoch=1, message="x", rpc_connect_seconds=2)
    assert forwarded == ["start", "log"]
    assert [value(metric) for metric in (first.metrics.done, first.metrics.score, first.metrics.step)] == [4, 0.1, 3]
    assert value(context.metrics.done) == 0
    assert supervisor.records == []
    assert supervisor.steps[-1] == 3


def test_an_evaluation_that_fails_is_over_too(context: Context) -> None:
    during = []

    def evaluate() -> None:
        with context.evaluating():
            during.append(value(context.metrics.evaluating))
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        evaluate()
    assert during == [1]
    assert value(context.metrics.evaluating) == 0


@pytest.mark.parametrize("values", [(math.nan,), (math.inf,), (0.5, -math.inf)])
def test_what_is_not_finite_is_counted_and_refused(context: Context, values: tuple[float, ...]) -> None:
    with pytest.raises(FloatingPointError, match="lower LR"):
        context.require_finite(*values, hint="lower LR")
    assert value(context.metrics.nonfinite_losses) == 1


def test_what_is_finite_passes(context: Context) -> None:
    context.require_finite(0.5, -1e30, hint="lower LR")
    assert value(context.metrics.nonfinite_losses) == 0


# ---- checkpoints


def test_a_checkpoint_is_due_after_its_interval_and_for_a_drain(context: Context, clock: Clock) -> None:
    assert not context.due
    clock.now += context.settings.checkpoint_interval
    assert not context.due
    clock.now += 1
    assert context.due
    context.save(1, {})
    assert not context.due
    context.drain()
    assert context.due


def test_a_checkpoint_has_the_pinned_settings_and_the_seconds(context: Context, clock: Clock, tmp_path: Path) -> None:
    context.start(0)
    clock.now += 12
    context.log(5, done=64)
    context.save(5, {"weights": torch.ones(2)})  # no drain was ordered
    (path,) = tmp_path.glob("checkpoint-*")
    saved = read(path, "rl")
    assert saved.about == {"settings": {"seed": 1, "device": "auto"}, "seconds": 12, "done": 64, "layout": 1}
    assert set(saved.state) == {"weights"}
    assert torch.equal(saved.state["weights"], torch.ones(2))
    assert value(context.metrics.checkpoint_timestamp_seconds) > 0
    assert context.metrics.checkpoint_seconds._sum.get() >= 0


def test_a_drain_ends_with_the_checkpoint(context: Context, supervisor: Supervisor) -> None:
    context.drain()
    assert context.draining
    with pytest.raises(Drained) as drained:
        context.save(5, {})
    assert drained.value.step == 5
    assert not isinstance(drained.value, Exception)  # which a job may catch
    assert [read(path, "rl").step for path in context.checkpoints.files()] == [5]
    assert supervisor.refused == []


def test_a_checkpoint_in_the_background_does_not_end_the_job(context: Context, supervisor: Supervisor) -> None:
    context.drain()
    context.save(5, {}, drain=False)
    assert context.draining
    assert supervisor.refused == []


@pytest.fixture
def full(context: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context whose disk is full."""

    def write(*_: object, **__: object) -> Path:
        raise CheckpointError("no space left")

    monkeypatch.setattr(context.checkpoints, "write", write)
    return context


def test_a_drain_without_a_checkpoint_is_refused(
    full: Context, supervisor: Supervisor, logged: list[EventDict]
) -> None:
    full.drain()
    full.save(5, {})
    assert not full.draining
    assert supervisor.refused == ["no space left"]
    assert (logged[-1]["log_level"], logged[-1]["problem"]) == ("error", "no space left")
    assert value(full.metrics.checkpoint_failures) == 1


@pytest.mark.parametrize("draining", [False, True])
def test_a_checkpoint_that_fails_in_the_background_leaves_a_drain_alone(
    full: Context, supervisor: Supervisor, draining: bool
) -> None:
    if draining:
        full.drain()
    full.save(5, {}, drain=False)
    assert full.draining == draining
    assert supervisor.refused == []
    assert value(full.metrics.checkpoint_failures) == 1


def test_a_job_finishes_with_a_checkpoint_and_a_summary(
    context: Context, clock: Clock, logged: list[EventDict], tmp_path: Path
) -> None:
    context.start(0)
    clock.now += 3
    summary = context.finish("Finished: well", step=9, state={"x": 1}, accuracy=0.5)
    assert summary == {"accuracy": 0.5, "seconds": 3, "saved": True} == context.finished
    assert context.step == 9
    assert (logged[-1]["event"], logged[-1]["steps"], logged[-1]["seconds"]) == ("Finished: well", 9, 3)
    assert [read(path, "rl").state["x"] for path in tmp_path.glob("checkpoint-*")] == [1]


def test_a_job_finishes_without_its_checkpoint_too(full: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LAST_PAUSE", 0.0)
    full.drain()
    assert full.finish(step=9, state={}) == {"seconds": 0, "saved": False}
    assert full.step == 9


def test_without_checkpoints_training_begins(context: Context, logged: list[EventDict]) -> None:
    assert context.snapshot() is None
    assert logged == []


def test_a_restored_job_goes_on(context: Context, clock: Clock, logged: list[EventDict], tmp_path: Path) -> None:
    context.start(0)
    clock.now += 20
    context.save(5, {"digest": "abc"})
    logged.clear()
    later = make(tmp_path, log_interval=3)  # which is not pinned
    snapshot = later.snapshot()
    assert snapshot is not None
    assert snapshot.step == 5
    snapshot.require_digest("abc", "DATASET=mine")
    with pytest.raises(UsageError, match=f"DATASET=mine: the data are not those that {snapshot.path.name}"):
        snapshot.require_digest("abd", "DATASET=mine")
    assert [(event["event"], event["step"]) for event in logged] == [("resumed", 5)]
    later.start(5)
    clock.now += 1
    assert later.progress.total_seconds == 21


def test_a_checkpoint_of_other_pinned_settings_is_refused(context: Context, tmp_path: Path) -> None:
    context.save(5, {})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="SEED=2: the newest checkpoint in CHECKPOINT_DIR was made with 1"):
        make(tmp_path, seed=2).snapshot()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_setting_that_is_none_any_more_is_not_compared(context: Context, tmp_path: Path) -> None:
    Checkpoints(tmp_path, "rl", 1).write(5, {}, {"settings": {"seed": 1, "of_an_earlier_version": 7}})
    assert context.snapshot() is not None


# ---- peers


def test_a_lost_peer_is_none_of_its_generation(context: Context, supervisor: Supervisor) -> None:
    received: list[str] = []
    context.on_lost(received.append)
    context.lose("observer_0")
    context.lose("observer_0")
    context.give_up("observer_0")  # which is lost already
    assert context.peers("observer") == [TWO]
    assert (received, supervisor.lost) == (["observer_0"], [])
    context.give_up("observer_1")
    assert (received, supervisor.lost) == (["observer_0", "observer_1"], [("observer", 1)])
    assert context.peers("agent") == [AGENT]


def test_peers_that_are_needed_are_there_or_the_job_drains(tmp_path: Path) -> None:
    context = make(tmp_path, lease_seconds=1)
    context.require_peers("observer")
    for peer in context.peers("observer"):
        context.lose(peer.name)
    with pytest.raises(PeerLostError, match="no observer is left"):
        context.require_peers("observer")
    threading.Timer(0.1, context.drain).start()
    context.require_peers("observer")


def test_a_context_without_a_transport_has_nobody_to_call(context: Context) -> None:
    with pytest.raises(RuntimeError, match="not connected to any peer"):
        context.call("observer_1", print)


def test_a_call_finds_the_ranks_object_once_it_is_set() -> None:
    slot, answers = RankObject[str](), list[str]()
    called = threading.Thread(target=lambda: answers.append(slot.get()))
    called.start()
    assert slot.set("object") == "object"
    called.join(60)
    assert answers == ["object"]
    with pytest.raises(InvalidStateError):
        slot.set("another")


def test_a_rank_is_loading_until_its_object_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for me, after in ((ONE, ""), (AGENT, "loading")):  # rank 0, until it begins to train
        context, current = make(tmp_path, me=me), RankObject[Any]()
        monkeypatch.setattr(rpc, "_context", current)
        current.set(context)
        assert context.pace.doing == "loading"
        RankObject[str]().set("object")
        assert context.pace.doing == after


def test_a_call_does_not_wait_for_a_ranks_object_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankObject, "deadline", 0.05)
    with pytest.raises(PeerLostError, match=r"not ready within PHASE_TIMEOUT=0\.05 s"):
        RankObject[str]().get()


# ---- where it computes


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {choose_device(wanted, "DEVICE").type for wanted in ("auto", "cpu")} == {"cpu"}
    with pytest.raises(UsageError, match="LEARNER_DEVICE=cuda: torch finds no CUDA device"):
        choose_device("cuda", "LEARNER_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(wanted, "DEVICE").type for wanted in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_threads_are_those_that_are_asked_for(tmp_path: Path) -> None:
    assert make(tmp_path, threads=3).threads == 3
    assert make(tmp_path).threads >= 1


# ---- a user's own code


class Custom(Settings):
    """Names a callable."""

    policy: Annotated[str, FromUser()] = ""


def double(number: int) -> int:
    return 2 * number


def broken() -> None:
    raise KeyError("first line\nsecond line")


def refusing() -> None:
    raise UsageError("POLICY: not this one")


NUMBER = 5


def test_a_users_callable_is_imported_and_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Custom(policy=f"{__name__}:double").build("policy", 21) == 42
    (tmp_path / "module_of_a_user.py").write_text("def build():\n    return 'built'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert Custom(policy="module_of_a_user:build").build("policy") == "built"
    monkeypatch.delitem(sys.modules, "module_of_a_user")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("not_there:x", r"cannot be imported \(ModuleNotFoundError: .*'not_there'\); write package.module:name"),
        (f"{__name__}:absent", r"cannot be imported \(AttributeError: .*absent.*\); write package.module:name"),
        ("no_colon", r"cannot be imported \(ModuleNotFoundError: .*\); write package.module:name"),
        ("", r"cannot be imported \(ValueError: .*\); write package.module:name"),
        (f"{__name__}:NUMBER", "is not callable"),
        (f"{__name__}:broken", r"raised an error \(KeyError: 'first line\\nsecond line'\)"),
        (f"{__name__}:double", r"raised an error \(TypeError: .*double.*\)"),
    ],
)
def test_a_users_callable_that_cannot_be_used_is_one_line(target: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^POLICY={target}: {message}$"):
        Custom(policy=target).build("policy")


class Undeclared(Settings):
    """Names a callable, and does not say so."""

    policy: str = f"{__name__}:double"


def test_a_setting_that_is_not_said_to_name_code_is_not_called() -> None:
    with pytest.raises(UsageError, match=r"^Undeclared\.policy: names code; declare it as Annotated\[str, FromUser"):
        Undeclared().build("policy", 21)


def test_a_users_own_refusal_is_passed_on() -> None:
    with pytest.raises(UsageError, match=r"^POLICY: not this one$"):
        Custom(policy=f"{__name__}:refusing").build("policy")


def test_errors_of_the_named_kinds_become_one_line() -> None:
    with pytest.raises(UsageError) as refusal, UsageError.wrap("X=1: is bad", ValueError, advice="set X=2"):
        raise ValueError("  first\nsecond")
    assert str(refusal.value) == "X=1: is bad (ValueError: first); set X=2"
    assert isinstance(refusal.value.__cause__, ValueError)
    with pytest.raises(UsageError, match=r"^X=1: is bad \(KeyError: \)$"), UsageError.wrap("X=1: is bad"):
        raise KeyError
    with pytest.raises(TypeError), UsageError.wrap("X=1: is bad", ValueError):
        raise TypeError
    with UsageError.wrap("X=1: is bad"):
        pass
