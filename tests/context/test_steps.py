"""What rank 0's function says of its training: the state that it restores, its steps, its log, and its end."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.typing import EventDict
from torch import nn

from rolecall.checkpoint.checkpoint import CheckpointError, read
from rolecall.context import training
from rolecall.context.context import Context
from rolecall.errors import Drained, UsageError
from tests.context.contexts import ONE, Clock, Supervisor, make, value


class Tally:
    """Gives and takes its state, as torch.distributed.checkpoint's Stateful does."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def saved(directory: Path) -> dict[int, dict[str, Any]]:
    """The checkpoints' states by step."""
    return {one.step: one.state for one in (read(path, "rl") for path in sorted(directory.glob("checkpoint-*")))}


# ---- the state


def test_plain_values_are_replaced_and_objects_loaded_in_place(context: Context, tmp_path: Path) -> None:
    given = {"hits": 0, "tally": Tally(3)}
    assert context.restore(given) == given
    assert given["tally"].count == 3  # there is no checkpoint
    state = context.restore({"hits": 0, "tally": Tally(), "nested": {"list": [1]}, "unused": 1})
    state["hits"] += 7
    state["tally"].count = 5
    state["nested"]["list"].append(2)
    context.save(4)
    tally, nested = Tally(), {"list": list[int]()}
    later = make(tmp_path)
    restored = later.restore({"hits": 0, "tally": tally, "nested": nested})
    assert (restored["hits"], restored["tally"], restored["nested"]) == (7, tally, {"list": [1, 2]})
    assert tally.count == 5
    assert nested == {"list": []}
    assert later.step == 4


def test_modules_and_optimizers_are_state(context: Context, tmp_path: Path) -> None:
    def train() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    first, second = train(), train()
    context.restore(first)
    context.save(1)
    make(tmp_path).restore(second)
    for state in (first, second):
        state["optimizer"].step()
    for one, other in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other)


PLAIN: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 2**70,
    "float": -0.5,
    "complex": 1j,
    "str": "é",
    "bytes": b"\x00",
    "list": [1, [2.5, None]],
    "tuple": (1, ("a",)),
    "set": {1, 2},
    "dict": {"a": 1, 2: {"b": [b""]}, (1, 2): 3},
    "ordered": OrderedDict(a=1),
    "counter": Counter("aab"),
    "size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
}


def test_plain_values_and_tensors_come_back_as_they_were(context: Context, tmp_path: Path) -> None:
    tensors = [torch.arange(4), torch.ones(2, dtype=torch.bfloat16), nn.Parameter(torch.zeros(1)), torch.tensor(3)]
    context.restore({**PLAIN, "tensors": tensors})
    context.save(1)
    restored = make(tmp_path).restore(dict.fromkeys([*PLAIN, "tensors"]))
    for one, other in zip(tensors, restored.pop("tensors"), strict=True):
        torch.testing.assert_close(one, other)  # and their types
    assert restored == PLAIN
    assert {name: type(each) for name, each in restored.items()} == {name: type(each) for name, each in PLAIN.items()}


class Image(torch.Tensor):
    """Is a tensor, and would be code in a checkpoint."""


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (np.float64(0.5), "best is a numpy.float64"),
        ([1, np.int64(2)], r"best\[...\] is a numpy.int64"),
        ({"a": {"b": np.float32(1)}}, r"best\['a'\]\['b'\] is a numpy.float32"),
        ({np.int64(1): 2}, "a key of best is a numpy.int64"),
        (Image(2), "best is a tests.context.test_steps.Image"),
        (defaultdict(int), "best is a collections.defaultdict"),
        (Tally, "best is a builtins.type"),
        (Tally(np.float64(1)), r"best\['count'\] is a numpy.float64"),
    ],
)
def test_values_that_no_checkpoint_can_hold_are_refused_at_restore(context: Context, wrong: Any, named: str) -> None:
    """Not only when it is first written, or worse, when it is read."""
    advice = ", which a checkpoint cannot hold: give it state_dict and load_state_dict, or save numbers, strings, "
    with pytest.raises(UsageError, match=f"^{named}{advice}"):
        context.restore({"hits": 0, "best": wrong})
    state = context.restore({"hits": 0, "best": 0})
    state["best"] = wrong
    with pytest.raises(UsageError, match=named):
        context.save(1)


def test_value_missing_in_the_checkpoint_keeps_its_default(
    context: Context, tmp_path: Path, logged: list[EventDict]
) -> None:
    context.restore({"hits": 5})
    context.save(1)
    tally = Tally(9)
    assert make(tmp_path).restore({"hits": 0, "points": 1, "tally": tally}) == {"hits": 5, "points": 1, "tally": tally}
    assert tally.count == 9
    warned = [event["value"] for event in logged if event["log_level"] == "warning"]
    assert warned == ["points", "tally"]


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 2)), Tally()])
def test_state_that_does_not_fit_is_refused(context: Context, tmp_path: Path, other: Any) -> None:
    context.restore({"model": nn.Linear(3, 2)})
    context.save(7)
    refusal = r"^checkpoint-000001-0000000007\.pt: model does not fit this program \(\w+: .*\); restore what the job"
    with pytest.raises(UsageError, match=refusal) as refused:
        make(tmp_path).restore({"model": other})
    assert "\n" not in str(refused.value)
    assert set(saved(tmp_path)) == {7}


def test_other_ranks_have_no_checkpoints(tmp_path: Path) -> None:
    observer = make(tmp_path, me=ONE)
    for what in (lambda: observer.restore({}), observer.snapshot, lambda: observer.save(1, {})):
        with pytest.raises(UsageError, match="only rank 0 reads and writes checkpoints"):
            what()


# ---- steps


def test_what_a_loss_or_a_join_costs_the_step_is_counted(
    context: Context, clock: Clock, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "time", clock)
    context.restore({})
    for step in context.steps(4):
        if step == 2:
            context.group.lose(ONE)
            clock.now += 3
        if step == 3:
            members = tuple(replace(peer, join=1) if peer == ONE else peer for peer in context.members)
            context.group.update(replace(context.group.attachment, members=members))
            clock.now += 2
        if step == 4:
            clock.now += 5
    stalls = [(kind, seconds) for kind, _, seconds in supervisor.records if kind in ("joined", "lost")]
    assert [kind for kind, _ in stalls] == ["lost", "joined"]
    assert [seconds for _, seconds in stalls] == pytest.approx([3, 2], abs=0.5)
    assert value(context.metrics.stalled_seconds.labels("lost")) == pytest.approx(3, abs=0.5)


def test_steps_go_on_after_the_checkpoint(context: Context, clock: Clock, tmp_path: Path) -> None:
    state = context.restore({"sum": 0})
    for step in context.steps(3):
        clock.now += 1
        state["sum"] += step
    summary = context.finish()
    assert summary == {"seconds": 3, "saved": True}
    assert saved(tmp_path)[3] == {"sum": 6}
    later = make(tmp_path, generation=2)
    state = later.restore({"sum": 0})
    assert [step for step in later.steps(5) if state.update(sum=state["sum"] + step) is None] == [4, 5]
    assert later.finish(pi=3) == {"pi": 3, "seconds": 3, "saved": True}
    assert saved(tmp_path)[5] == {"sum": 15}
    last = make(tmp_path, generation=3)
    last.restore({})
    assert list(last.steps(0)) == []


def test_steps_need_a_restore_or_snapshot(context: Context, tmp_path: Path) -> None:
    """Otherwise they would begin at step 1 after each restart, also if the state to save is given."""
    for state in (None, {"sum": 0}):
        with pytest.raises(UsageError, match=r"write `state = context\.restore\(\{\.\.\.\}\)` before the loop"):
            next(context.steps(3, state))
    assert context.snapshot() is None
    assert list(context.steps(2, {"sum": 3})) == [1, 2]
    context.save()
    later = make(tmp_path, generation=2)
    assert later.snapshot().state == {"sum": 3}  # type: ignore[union-attr]
    assert list(later.steps(3, {"sum": 3})) == [3]


def test_steps_end_at_the_total_or_the_condition(context: Context) -> None:
    context.restore({})
    seen: list[int] = []
    seen.extend(context.steps(until=lambda: len(seen) == 4))
    assert seen == [1, 2, 3, 4]
    assert list(context.steps(6)) == [5, 6]
    assert list(context.steps(6)) == []


@pytest.mark.parametrize(
    ("leave", "made"), [("break", [1, 2, 3]), ("return", [1, 2, 3]), ("raise", [1, 2]), ("redo", [1, 2])]
)
def test_left_step_counts_unless_it_raises_or_is_redone(
    context: Context, supervisor: Supervisor, leave: str, made: list[int]
) -> None:
    """Otherwise failures in one and the same step would never be too many."""
    context.restore({})

    def train() -> None:
        for step in context.steps(10):
            if step < 3:
                continue
            if leave == "return":
                return
            if leave == "raise":
                raise RuntimeError("a bug")
            if leave == "redo":
                context.redo()
            break

    with pytest.raises(RuntimeError) if leave == "raise" else contextlib.nullcontext():
        train()
    gc.collect()
    if leave != "raise":
        assert context.step == len(made)
        context.finish()
    assert supervisor.steps == made


def test_redone_step_has_the_same_number(
    context: Context, supervisor: Supervisor, clock: Clock, tmp_path: Path
) -> None:
    context.restore({})
    seen = []
    for step in context.steps(3, {"x": 1}):
        seen.append(step)
        clock.now += 100  # a checkpoint is due
        if seen.count(step) < step:
            context.redo()
    assert seen == [1, 2, 2, 3, 3, 3]
    assert (context.step, supervisor.steps) == (3, [1, 2, 3])
    assert set(saved(tmp_path)) <= {0, 1, 2}


def test_checkpoints_are_written_between_steps_when_they_are_due(
    context: Context, clock: Clock, tmp_path: Path
) -> None:
    state = context.restore({"sum": 0})
    for step in context.steps(4):
        clock.now += context.settings.checkpoint_interval / 2 + 1
        state["sum"] += step
    assert saved(tmp_path) == {2: {"sum": 3}}
    for _ in context.steps(5):
        state["sum"] = 50
        context.save()  # within a step, it is the checkpoint after it
    assert saved(tmp_path)[5] == {"sum": 50}
    state["sum"] = 60
    for _ in context.steps(9):
        state["sum"] += 1
        assert context.finish("Solved")["saved"]  # a job may finish within a step
        break
    assert (context.step, saved(tmp_path)[6]) == (6, {"sum": 61})


def test_a_drain_ends_the_steps_with_a_checkpoint(context: Context, supervisor: Supervisor, tmp_path: Path) -> None:
    state, cleaned = context.restore({"sum": 0}), []

    def train() -> None:
        try:
            for step in context.steps(10):
                state["sum"] += step
                if step == 3:
                    context.drain()
        except Exception:
            cleaned.append("wrongly")
        finally:
            cleaned.append("up")

    with pytest.raises(Drained) as drained:
        train()
    assert drained.value.step == 3
    assert cleaned == ["up"]
    assert saved(tmp_path) == {3: {"sum": 6}}
    assert supervisor.refused == 0


def test_drain_waits_until_settled(context: Context, tmp_path: Path) -> None:
    state, asked = context.restore({"sum": 0}), []

    def settled() -> bool:
        asked.append(context.step)
        return context.step == 5

    def train() -> None:
        for step in context.steps(10, settled=settled):
            state["sum"] += step
            if step == 3:
                context.drain()

    with pytest.raises(Drained) as drained:
        train()
    assert drained.value.step == 5
    assert asked == [3, 4, 5], "not before there is a drain"
    assert saved(tmp_path) == {5: {"sum": 15}}


def test_the_last_checkpoint_is_written_again_once_there_is_space(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = context.require_saver().checkpoints.write, list[int]()

    def full_at_first(step: int, *rest: Any, **named: Any) -> Path:
        tries.append(step)
        if len(tries) < 3:
            raise CheckpointError("no space left")
        return write(step, *rest, **named)

    monkeypatch.setattr(context.require_saver().checkpoints, "write", full_at_first)
    monkeypatch.setattr(training, "LAST_CHECKPOINT_PAUSE_SECONDS", 0.0)
    context.restore({"x": 1})
    assert context.finish(step=4)["saved"] is True
    assert tries == [4, 4, 4]


@pytest.mark.parametrize(("work", "left"), [(None, 12), (200, 10)])
def test_time_left_follows_from_the_work_or_else_the_steps(
    context: Context, clock: Clock, work: float | None, left: float
) -> None:
    context.restore({})
    for step in context.steps(10, work=work):
        clock.now += 2
        context.log(**({"score": 0.1} if work is None else {"done": 20 * step}))
        if step == 5:  # four are over
            break
    assert value(context.metrics.left_seconds) == left


# ---- the log


def test_log_is_of_the_step_under_way(context: Context, supervisor: Supervisor) -> None:
    context.restore({})
    for step in context.steps(2):
        context.log(score=step / 10)
    context.log(score=0.3)  # after the steps it is of the last
    scores = [record for record in supervisor.records if record[0] != "done"]
    assert scores == [("score", 1, 0.1), ("score", 2, 0.2), ("score", 2, 0.3)]
    assert [record for record in supervisor.records if record[0] == "done"] == [("done", 1, 1), ("done", 2, 2)]


def test_values_are_gauges_of_the_job_or_of_rolecall_value(context: Context, logged: list[EventDict]) -> None:
    context.start(0)
    names = ("entropy", "value", "rpc_calls", "cups", "cups_total")  # some are other metrics, no gauges
    context.log(10, done=10, score=0.123456789, temperature=21.5, **dict.fromkeys(names, torch.tensor(0.25)))
    context.log(20, done=20)
    assert [value(context.metrics.value.labels(name)) for name in names] == [0.25] * len(names)
    assert value(context.metrics.temperature) == 21.5
    assert {name: logged[-2][name] for name in names} == dict.fromkeys(names, 0.25)
    assert "temperature" not in logged[-2]
    assert [event["event"] for event in logged[1:]] == ["step 10\taccuracy 0.123457", "step 20"]


def test_work_is_not_mistaken_for_steps(context: Context, supervisor: Supervisor, tmp_path: Path) -> None:
    """In a step, one call may give the work, and another a score."""

    context.restore({})

    def train(of: Context, total: int) -> None:
        for step in of.steps(total, {}):
            if step % 2:
                of.log(score=step / 10)
            of.log(done=1000 * step, loss=1.0)
            of.log(score=step / 10)

    train(context, 3)
    context.finish()
    assert [record for record in supervisor.records if record[0] == "done"] == [
        ("done", 1, 1000),
        ("done", 2, 2000),
        ("done", 3, 3000),
    ]
    sink = Supervisor()
    later = make(tmp_path, sink, generation=2)
    later.restore({})
    train(later, 5)
    assert [record for record in sink.records if record[0] == "done"] == [("done", 4, 4000), ("done", 5, 5000)]
    assert value(later.metrics.done) == 2000


def test_logged_values_become_floats(context: Context, supervisor: Supervisor, tmp_path: Path) -> None:
    """A loss with its graph would keep all of it in memory."""
    context.restore({})
    weight = torch.ones(1, requires_grad=True)
    for _ in context.steps(10, {}):
        context.log(done=torch.tensor(5), loss=weight.sum(), score=np.float32(0.5), temperature=torch.tensor(21.5))
    context.finish()
    assert {type(number) for _, _, number in supervisor.records} <= {int, float}
    assert value(context.metrics.temperature) == 21.5
    assert read(next(tmp_path.glob("checkpoint-*")), "rl").about["done"] == 5


# ---- and else


def test_seeds_differ_by_rank_generation_and_purpose(tmp_path: Path) -> None:
    contexts = [make(tmp_path), make(tmp_path, me=ONE), make(tmp_path, generation=2), make(tmp_path, seed=2)]
    numbers = [each.seed(*extra) for each in contexts for extra in ((), (0,), (1,), (1, 2), (2, 1))]
    assert len(set(numbers)) == len(numbers)
    assert make(tmp_path).seed(1) == contexts[0].seed(1)


def test_files_of_the_job_have_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = make(tmp_path, me=ONE, checkpoint_dir=Path("run")).files
    assert files == tmp_path / "run" / "files"
    (files / "tokens.json").write_text("[]")
    with pytest.raises(UsageError, match=r"tokens\.json: cannot be written \(NotADirectory"):
        _ = make(tmp_path, checkpoint_dir=files / "tokens.json").files


# ---- phases


def test_ranks_report_their_phase(context: Context, tmp_path: Path) -> None:
    seen, other = [], make(tmp_path, me=ONE)
    assert other.watchdog.doing == "loading"
    other.report_step(1)
    assert other.watchdog.doing == ""

    class Watched(Tally):
        def state_dict(self) -> dict[str, Any]:
            seen.append(context.watchdog.doing)
            return super().state_dict()

    assert context.watchdog.doing == "loading"
    context.restore({"tally": Watched()})
    assert context.watchdog.doing == "loading"
    for step in context.steps(3):
        assert context.watchdog.doing == ""
        if step == 1:
            context.save()
        with context.phase("compiling"):
            assert context.watchdog.doing == "compiling"
    context.finish()
    assert seen == ["restoring", "saving", "saving"]
