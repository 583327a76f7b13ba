"""The context of a job's function: progress, checkpoints, peers; and how a user's own code and settings are taken."""

from __future__ import annotations

import json
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from structlog.typing import EventDict

from rolecall.checkpoint.checkpoint import CheckpointError, Checkpoints, read
from rolecall.config import Settings
from rolecall.context import training
from rolecall.context.context import Context, choose_device
from rolecall.context.progress import ProgressEvent
from rolecall.context.transport import Transport
from rolecall.declare.task import Attachment
from rolecall.errors import Drained, PeerLostError, UsageError
from rolecall.fields import FromUser
from rolecall.record import rundir
from rolecall.record.history import Point, Row
from rolecall.wire.messages import Deadline, Request
from tests.context.contexts import AGENT, ONE, TWO, Clock, Supervisor, make, value
from tests.wire.wires import Wires, until

# ---- progress


class Forwarding:
    """A transport to the rank 0 of another context."""

    def __init__(self, rank0: Context) -> None:
        self.rank0 = rank0

    def forward(self, event: ProgressEvent) -> None:
        self.rank0.progress.take(event)


def test_progress_of_another_rank_counts_at_rank_0(tmp_path: Path, supervisor: Supervisor) -> None:
    rank0, context = make(tmp_path), make(tmp_path, supervisor, me=ONE)
    with pytest.raises(RuntimeError, match="not connected"):
        context.log(1)
    context.group.use(Forwarding(rank0))
    context.start(0, total=10)
    context.log(3, done=4, loss=0.5, score=0.1, epoch=1, message="x", rpc_connect_seconds=2)
    assert [value(metric) for metric in (rank0.metrics.done, rank0.metrics.score, rank0.metrics.step)] == [4, 0.1, 3]
    assert (value(context.metrics.done), supervisor.records, supervisor.steps[-1]) == (0, [], 3)


def test_a_step_sets_metrics_and_records(context: Context, supervisor: Supervisor) -> None:
    context.start(0, done=0, goal=0.9)
    assert supervisor.records == [("start", 0, 1), ("goal", 0, 0.9)]
    supervisor.records.clear()
    context.log(1, done=8, score=0.25, epoch=3, rpc_connect_seconds=0.5)
    context.log(2, done=20)
    assert supervisor.records == [
        ("rpc_connect_seconds", 1, 0.5),
        ("epoch", 1, 3),
        ("score", 1, 0.25),
        ("done", 1, 8),
        ("done", 2, 20),
    ]
    assert supervisor.steps == [1, 2]
    names = ("step", "done", "score", "epoch", "rpc_connect_seconds")
    assert [value(getattr(context.metrics, name)) for name in names] == [2, 20, 0.25, 3, 0.5]


@pytest.mark.parametrize(
    ("goal", "recorded"),
    [(np.float32(0.5), [0.5]), (torch.tensor(0.5), [0.5]), (1, [1.0]), (math.inf, []), (math.nan, [])],
)
def test_a_goal_is_recorded_as_a_finite_float(
    context: Context, supervisor: Supervisor, goal: Any, recorded: list[float]
) -> None:
    context.start(0, goal=goal)
    goals = [value for name, _, value in supervisor.records if name == "goal"]
    assert goals == recorded
    assert all(type(value) is float for value in goals)


def test_a_log_while_training_begins_has_no_negative_seconds(tmp_path: Path, clock: Clock) -> None:
    """The clock is read before another thread says when training began."""

    class Rows(Supervisor):
        def record(self, row: Row) -> None:
            if isinstance(row, Point):
                seconds.append(row.seconds)

    seconds: list[float] = []
    context = make(tmp_path, Rows())
    context.start(0)
    clock.now -= 1
    context.log(1, score=0.5)
    assert seconds == [0.0]


@pytest.mark.parametrize("name", ["score_low", "score_high"])
def test_a_value_with_the_name_of_a_bound_is_refused(context: Context, supervisor: Supervisor, name: str) -> None:
    with pytest.raises(UsageError, match=rf"^log\({name}=...\): give spread=\(low, high\)$"):
        context.log(1, score=0.5, **{name: 0.1})
    assert supervisor.records == []


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
        "Epoch 2\tstep 10\tloss 2.5000",
        "Epoch 2\tstep 20\tloss 7.0000",
    ]
    assert [record for record in supervisor.records if record[0] == "loss"] == [("loss", 10, 2.5), ("loss", 20, 7.0)]
    assert value(context.metrics.loss) == 7
    context.log(30, done=55, message="Iteration 30")
    assert logged[-1]["event"] == "Iteration 30"


def test_evaluation_that_fails_is_over(context: Context) -> None:
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
def test_nonfinite_losses_are_counted_and_refused(context: Context, values: tuple[float, ...]) -> None:
    context.require_finite(0.5, -1e30, hint="lower LR")
    with pytest.raises(FloatingPointError, match="lower LR"):
        context.require_finite(*values, hint="lower LR")
    assert value(context.metrics.nonfinite_losses) == 1


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


@pytest.fixture
def full(context: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context whose disk is full."""

    def write(*_: object, **__: object) -> Path:
        raise CheckpointError("no space left")

    monkeypatch.setattr(context.require_saver().checkpoints, "write", write)
    return context


def test_a_drain_without_a_checkpoint_is_refused(
    full: Context, supervisor: Supervisor, logged: list[EventDict]
) -> None:
    full.drain()
    full.save(5, {})
    assert not full.draining
    assert supervisor.refused == 1
    assert (logged[-1]["log_level"], logged[-1]["problem"]) == ("error", "no space left")
    assert value(full.metrics.checkpoint_failures) == 1


def test_checkpoint_beside_a_drain_neither_ends_nor_refuses_it(
    context: Context, supervisor: Supervisor, request: pytest.FixtureRequest
) -> None:
    context.drain()
    context.save(5, {}, drain=False)
    request.getfixturevalue("full").save(5, {}, drain=False)
    assert context.draining
    assert supervisor.refused == 0
    assert value(context.metrics.checkpoint_failures) == 1


def test_a_job_finishes_with_a_checkpoint_and_a_summary(
    context: Context, clock: Clock, logged: list[EventDict], tmp_path: Path
) -> None:
    context.start(0)
    clock.now += 3
    summary = context.finish("Finished: well", step=9, state={"x": 1}, accuracy=0.5)
    assert summary == {"accuracy": 0.5, "seconds": 3, "saved": True} == context._finished
    assert context.step == 9
    assert (logged[-1]["event"], logged[-1]["steps"], logged[-1]["seconds"]) == ("Finished: well", 9, 3)
    assert [read(path, "rl").state["x"] for path in tmp_path.glob("checkpoint-*")] == [1]


def test_a_job_without_steps_is_in_the_history_and_has_its_result(context: Context, supervisor: Supervisor) -> None:
    context.log(score=1.0)
    result = training.summary_of(context, {"seconds": np.float32(0.5), "saved": "here", "all": [torch.tensor(2)]})
    assert json.dumps(result) == '{"seconds": 0.5, "saved": "here", "all": [2]}'
    assert [(kind, step) for kind, step, _ in supervisor.records] == [("start", 0), ("score", 0)]


@pytest.mark.parametrize(
    "value", [torch.zeros(2), b"text", {1: {2, 3}}, "x" * 40_000], ids=["tensor", "b", "set", "long"]
)
def test_a_result_that_no_summary_holds_is_refused_with_the_checkpoint_kept(
    context: Context, tmp_path: Path, value: Any
) -> None:
    context.restore({"x": 1})
    with pytest.raises(UsageError, match=r"the result.*; return a few numbers and strings by name$"):
        training.summary_of(context, {"score": 1.0, "model": value})
    assert [read(path, "rl").state["x"] for path in tmp_path.glob("checkpoint-*")] == [1]


def test_a_checkpoint_that_is_lost_at_the_end_is_told_apart_from_the_jobs_own_result(
    full: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LAST_CHECKPOINT_PAUSE_SECONDS", 0.0)
    full.restore({"x": 1})
    result = training.summary_of(full, {"saved": 3})
    assert (result["saved"], result[rundir.CHECKPOINT_LOST]) == (3, True)


@pytest.mark.parametrize("restores", [False, True])
def test_a_function_that_returns_because_of_a_drain_has_not_finished(
    context: Context, tmp_path: Path, restores: bool
) -> None:
    state = context.restore({"x": 1}) if restores else {}
    assert not context.draining
    context.drain()
    assert context.draining
    state["x"] = 2
    with pytest.raises(Drained):
        training.summary_of(context, None)
    assert [read(path, "rl").state["x"] for path in tmp_path.glob("checkpoint-*")] == [2] * restores
    assert context._finished is None


def test_a_function_that_is_ready_before_a_drain_or_finishes_in_it_has_finished(
    context: Context, tmp_path: Path
) -> None:
    context.restore({})
    for _ in context.steps(1):
        context.drain()
        assert context.draining
    assert "seconds" in training.summary_of(context, None)
    other = make(tmp_path)
    other.drain()
    other.await_drain()
    assert training.summary_of(other, other.finish(score=1.0))["score"] == 1.0


def test_a_checkpoint_of_other_pinned_settings_is_refused(context: Context, tmp_path: Path) -> None:
    context.save(5, {})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="SEED=2: the newest checkpoint in CHECKPOINT_DIR was made with 1"):
        make(tmp_path, seed=2).snapshot()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_removed_pinned_setting_is_not_compared(context: Context, tmp_path: Path) -> None:
    Checkpoints(tmp_path, "rl", 1).write(5, {}, {"settings": {"seed": 1, "of_an_earlier_version": 7}})
    assert context.snapshot() is not None


# ---- peers


def test_lost_peers_leave_the_generation(context: Context, supervisor: Supervisor) -> None:
    received: list[str] = []
    context.on_lost(received.append)
    context.group.lose(ONE)
    context.group.lose(ONE)
    context.give_up("observer_0")  # which is lost already
    assert context.peers("observer") == [TWO]
    assert supervisor.lost == []
    context.give_up("observer_1")
    assert supervisor.lost == [TWO]
    until(lambda: received == ["observer_0", "observer_1"], "what is told, in order")
    assert context.peers("agent") == [AGENT]


def test_who_joins_again_is_there_once_the_program_has_dealt_with_the_loss(context: Context) -> None:
    go, heard = threading.Event(), list[str]()

    def lost(name: str) -> None:
        go.wait(10)
        heard.append(f"lost {name}: {len(context.peers('observer'))} are there")

    context.on_lost(lost)
    context.on_joined(lambda name: heard.append(f"joined {name}"))
    back = replace(ONE, join=1)
    context.group.update(Attachment(1, AGENT, (AGENT, back, TWO)))
    assert context.peers("observer") == [TWO]
    context.group.update(Attachment(1, AGENT, (AGENT, back, TWO), lost=("observer_1",)))  # which does not wait
    assert context.peers("observer") == []
    go.set()
    until(lambda: context.peers("observer") == [back] and not context.group.listeners.busy, "its return")
    assert heard == ["lost observer_0: 0 are there", "lost observer_1: 1 are there", "joined observer_0"]


def test_who_has_joined_and_is_lost_is_not_there(context: Context) -> None:
    """An update names the parts of those that joined and are there, and no part of those that are lost."""
    go = threading.Event()
    context.on_lost(lambda _: go.wait(10))
    back, gone = replace(ONE, join=1), Attachment(1, AGENT, (AGENT, ONE, TWO), lost=("observer_0",))
    context.group.update(Attachment(1, AGENT, (AGENT, back, TWO)))
    context.group.update(gone)  # before it is there
    go.set()
    until(lambda: not context.group.listeners.busy, "both")
    assert context.peers("observer") == [TWO]
    context.group.update(Attachment(1, AGENT, (AGENT, replace(ONE, join=2), TWO)))
    until(lambda: len(context.peers("observer")) == 2, "its return")
    context.group.update(gone)
    assert context.peers("observer") == [TWO]


def test_required_peers_are_there_or_the_job_drains(tmp_path: Path) -> None:
    context = make(tmp_path, lease_seconds=1)
    context.require_peers("observer")
    for peer in context.peers("observer"):
        context.group.lose(peer)
    with pytest.raises(PeerLostError, match="no observer is left"):
        context.require_peers("observer")
    threading.Timer(0.1, context.drain).start()
    context.require_peers("observer")


def test_a_rank_is_loading_until_its_object_is_made(tmp_path: Path) -> None:
    for me, after in ((ONE, ""), (AGENT, "loading")):  # rank 0, until it begins to train
        context = make(tmp_path, me=me)
        assert context.watchdog.doing == "loading"
        context.serve(object())
        assert context.watchdog.doing == after


# ---- where it computes


def test_missing_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {choose_device(wanted, "DEVICE").type for wanted in ("auto", "cpu")} == {"cpu"}
    with pytest.raises(UsageError, match="LEARNER_DEVICE=cuda: torch finds no CUDA device"):
        choose_device("cuda", "LEARNER_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [choose_device(wanted, "DEVICE").type for wanted in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


# ---- a user's own code


def double(number: int) -> int:
    return 2 * number


class Custom(Settings):
    """Names a callable, once with the declaration that it does."""

    policy: Annotated[str, FromUser()] = ""
    undeclared: str = f"{__name__}:double"


def test_declared_setting_names_a_callable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Custom(policy=f"{__name__}:double").build("policy", 21) == 42
    (tmp_path / "module_of_a_user.py").write_text("def build():\n    return 'built'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert Custom(policy="module_of_a_user:build").build("policy") == "built"
    monkeypatch.delitem(sys.modules, "module_of_a_user")
    with pytest.raises(UsageError, match=r"^Custom\.undeclared: names code; declare it as Annotated\[str, FromUser"):
        Custom().build("undeclared", 21)


@pytest.mark.parametrize("target", ["not_there:x", f"{__name__}:absent", "no_colon", "", f"{__name__}:AGENT"])
def test_callable_that_cannot_be_used_is_one_line(target: str) -> None:
    with pytest.raises(UsageError, match=f"^POLICY={target}: [^\n]+$"):
        Custom(policy=target).build("policy")


def test_wrapped_errors_become_one_line() -> None:
    with pytest.raises(UsageError) as refusal, UsageError.wrap("X=1: is bad", ValueError, advice="set X=2"):
        raise ValueError("  first\nsecond")
    assert str(refusal.value) == "X=1: is bad (ValueError: first); set X=2"
    with pytest.raises(TypeError), UsageError.wrap("X=1: is bad", ValueError):
        raise TypeError
    with pytest.raises(UsageError, match=r"^Y=2$"), UsageError.wrap("X=1: is bad"):
        raise UsageError("Y=2")


# ---- calls


def test_calls_are_documented_methods() -> None:
    for name in ("call", "call_each", "call_all", "call_any", "options", "restore", "steps", "log", "finish"):
        assert getattr(Context, name).__doc__


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [((1, threading.Lock()), {}, "argument 2"), ((), {"a": threading.Lock()}, "argument a")],
)
def test_an_argument_that_cannot_be_pickled_is_named(
    tmp_path: Path, args: tuple[object, ...], kwargs: dict[str, object], named: str
) -> None:
    context = make(tmp_path)
    wires = Wires("agent_0", "observer_0")
    wire = wires.wires["agent_0"]
    transport = Transport(wire, context.metrics, context.watchdog, rank0="agent_0", rpc_timeout=9)
    with pytest.raises(UsageError, match=f"{named} of observer_0.echo is a lock, which cannot be pickled"):
        transport.call("observer_0", Request("echo", args, kwargs, 0.0), Deadline(0.0))
    wires.close()
