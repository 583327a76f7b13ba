"""What rank 0's function says of its training: the state that it restores, its steps, its log, and its end."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
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


def test_without_a_checkpoint_the_state_is_the_one_that_is_given(context: Context, tmp_path: Path) -> None:
    tally, rows = Tally(3), [1, 2]
    given = {"hits": 0, "tally": tally, "rows": rows}
    state = context.restore(given)
    assert state == given
    assert state is not given  # which stays as it was
    assert state["tally"] is tally
    assert tally.count == 3


def test_plain_values_are_replaced_and_objects_loaded_in_place(context: Context, tmp_path: Path) -> None:
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
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        scheduler.step()

    first, second = build(), build()
    names = ("model", "optimizer", "scheduler")
    context.restore(dict(zip(names, first, strict=True)))
    train(*first)
    context.save(1)
    make(tmp_path).restore(dict(zip(names, second, strict=True)))
    for each in (first, second):
        train(*each)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert second[2].last_epoch == 2
    assert second[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"]


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


def test_what_is_plain_comes_back_as_it_was(context: Context, tmp_path: Path) -> None:
    context.restore(PLAIN)
    context.save(1)
    restored = make(tmp_path).restore(dict.fromkeys(PLAIN))
    assert restored == PLAIN
    assert {name: type(each) for name, each in restored.items()} == {name: type(each) for name, each in PLAIN.items()}


def test_tensors_come_back_as_they_were(context: Context, tmp_path: Path) -> None:
    tensors = [torch.arange(4), torch.ones(2, dtype=torch.bfloat16), nn.Parameter(torch.zeros(1)), torch.tensor(3)]
    context.restore({"tensors": tensors})
    context.save(1)
    restored = make(tmp_path).restore({"tensors": []})["tensors"]
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(tensors, restored, strict=True)
    )


class Image(torch.Tensor):
    """Is a tensor, and would be code in a checkpoint."""


class Number(int):
    """Is an int, and would be code in a checkpoint."""


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (np.float64(0.5), "best is a numpy.float64"),
        (np.zeros(2), "best is a numpy.ndarray"),
        ([1, np.int64(2)], r"best\[...\] is a numpy.int64"),
        ({"a": {"b": np.float32(1)}}, r"best\['a'\]\['b'\] is a numpy.float32"),
        ({np.int64(1): 2}, "a key of best is a numpy.int64"),
        ((object(),), r"best\[...\] is a builtins.object"),
        (Path("x"), r"best is a pathlib.\w+"),
        (Image(2), "best is a tests.context.test_steps.Image"),
        (Number(3), "best is a tests.context.test_steps.Number"),
        (defaultdict(int), "best is a collections.defaultdict"),
        (frozenset({1}), "best is a builtins.frozenset"),
        (lambda: 0, "best is a builtins.function"),
        (Tally, "best is a builtins.type"),
        (Tally(np.float64(1)), r"best\['count'\] is a numpy.float64"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_at_once(context: Context, wrong: Any, named: str) -> None:
    """Not only when it is first written, or worse, when it is read."""
    advice = ", which a checkpoint cannot hold: give it state_dict and load_state_dict, or save numbers, strings, "
    with pytest.raises(UsageError, match=f"^{named}{advice}"):
        context.restore({"hits": 0, "best": wrong})


def test_what_torch_is_told_to_trust_is_held(context: Context, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([frozenset]):
        context.restore({"best": frozenset({1})})
        context.save(1)
        assert make(tmp_path).restore({"best": None}) == {"best": frozenset({1})}
    with pytest.raises(UsageError, match=r"no usable checkpoint .*cannot be loaded: .*frozenset was not an allowed"):
        make(tmp_path).restore({"best": None})


def test_what_becomes_of_the_state_is_looked_at_before_it_is_written(context: Context, tmp_path: Path) -> None:
    state = context.restore({"best": 0.0})
    state["best"] = np.float64(0.5)
    with pytest.raises(UsageError, match=r"best is a numpy\.float64"):
        context.save(1)
    assert saved(tmp_path) == {}


def test_a_value_that_the_checkpoint_lacks_begins_anew(
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


def test_steps_are_numbered_and_reported(context: Context, supervisor: Supervisor, logged: list[EventDict]) -> None:
    context.restore({})
    seen = []
    for step in context.steps(3, goal=0.5, work=30, dataset="mine"):
        seen.append((step, context.step))
    assert seen == [(1, 0), (2, 1), (3, 2)]
    assert context.step == 3
    assert supervisor.steps == [1, 2, 3]
    assert value(context.metrics.step) == 3
    assert value(context.metrics.goal) == 0.5
    (started,) = [event for event in logged if event["event"] == "training"]
    assert started == {"event": "training", "log_level": "info", "step": 0, "steps": 3, "dataset": "mine"}


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


@pytest.mark.parametrize("state", [None, {"sum": 0}])
def test_steps_that_would_begin_anew_after_each_restart_are_refused(context: Context, state: Any) -> None:
    """Without `restore`, also where the state to save is given."""
    context.start(0)
    with pytest.raises(UsageError, match=r"write `state = context\.restore\(\{\.\.\.\}\)` before the loop"):
        next(context.steps(3, state))


def test_a_job_that_looks_at_its_checkpoint_itself_makes_steps(context: Context, tmp_path: Path) -> None:
    assert context.snapshot() is None
    assert list(context.steps(2, {"sum": 3})) == [1, 2]
    context.save()
    later = make(tmp_path, generation=2)
    assert later.snapshot().state == {"sum": 3}  # type: ignore[union-attr]
    assert list(later.steps(3, {"sum": 3})) == [3]


def test_a_job_without_state_goes_on_after_the_step_of_its_checkpoint(context: Context, tmp_path: Path) -> None:
    context.restore({})
    assert list(context.steps(2)) == [1, 2]
    context.save()
    later = make(tmp_path, generation=2)
    assert later.restore({}) == {}
    assert list(later.steps(4)) == [3, 4]


def test_a_job_without_state_saves_nothing_of_its_own(context: Context, tmp_path: Path) -> None:
    context.restore({})
    assert list(context.steps(2)) == [1, 2]
    assert context.finish()["saved"] is True
    assert saved(tmp_path) == {2: {}}


def test_without_steps_and_state_nothing_is_saved(context: Context, tmp_path: Path) -> None:
    assert context.finish(answer=42) == {"answer": 42, "seconds": 0}
    assert saved(tmp_path) == {}


def test_steps_end_when_it_is_time(context: Context) -> None:
    context.restore({})
    seen: list[int] = []
    seen.extend(context.steps(until=lambda: len(seen) == 4))
    assert seen == [1, 2, 3, 4]
    assert list(context.steps(100, until=lambda: context.step >= 6)) == [5, 6]  # and go on where they are
    assert list(context.steps(6)) == []
    assert list(context.steps(8)) == [7, 8]


@pytest.mark.parametrize("leave", ["break", "return"])
def test_the_step_that_ends_a_loop_early_is_made(context: Context, leave: str, tmp_path: Path) -> None:
    state = context.restore({"sum": 0})

    def train() -> None:
        for step in context.steps(10):
            state["sum"] += step
            if step == 3 and leave == "return":
                return
            if step == 3:
                break

    train()
    assert context.step == 3
    context.finish()
    assert value(context.metrics.step) == 3
    assert saved(tmp_path) == {3: {"sum": 6}}


def test_a_step_that_raises_is_no_progress(context: Context, supervisor: Supervisor) -> None:
    """Otherwise failures in one and the same step would never be too many."""

    context.restore({})

    def train() -> None:
        for step in context.steps(10):
            if step == 3:
                raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train()
    assert supervisor.steps == [1, 2]


def test_a_step_is_made_again(context: Context, supervisor: Supervisor, clock: Clock, tmp_path: Path) -> None:
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


def test_a_break_from_a_step_to_be_made_again_does_not_count_it(context: Context) -> None:
    context.restore({})
    for step in context.steps(3):
        if step == 2:
            context.redo()
            break
    assert context.step == 1


def test_checkpoints_are_written_between_steps_when_they_are_due(
    context: Context, clock: Clock, tmp_path: Path
) -> None:
    state = context.restore({"sum": 0})
    for step in context.steps(4):
        clock.now += context.settings.checkpoint_interval / 2 + 1
        state["sum"] += step
    assert saved(tmp_path) == {2: {"sum": 3}}


def test_the_state_may_be_given_with_the_steps(context: Context, clock: Clock, tmp_path: Path) -> None:
    context.restore({})
    tally = Tally()
    for step in context.steps(3, {"tally": tally}):
        clock.now += 100
        tally.count += step
    context.finish()
    assert saved(tmp_path) == {1: {"tally": {"count": 1}}, 2: {"tally": {"count": 3}}, 3: {"tally": {"count": 6}}}


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
    assert supervisor.refused == []


def test_a_drain_waits_until_what_is_under_way_is_settled(context: Context, tmp_path: Path) -> None:
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


def test_a_drain_whose_checkpoint_cannot_be_written_is_given_up(
    context: Context, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.restore({})

    def full(*_: object, **__: object) -> Path:
        raise CheckpointError("no space left")

    monkeypatch.setattr(context.checkpoints, "write", full)
    monkeypatch.setattr(training, "LAST_PAUSE", 0.0)
    for step in context.steps(4):
        if step == 2:
            context.drain()
    assert context.step == 4
    assert supervisor.refused == ["no space left"]
    assert context.finish()["saved"] is False


def test_the_last_checkpoint_is_written_again_once_there_is_space(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = context.require_checkpoints().write, list[int]()

    def full_at_first(step: int, *rest: Any, **named: Any) -> Path:
        tries.append(step)
        if len(tries) < 3:
            raise CheckpointError("no space left")
        return write(step, *rest, **named)

    monkeypatch.setattr(context.checkpoints, "write", full_at_first)
    monkeypatch.setattr(training, "LAST_PAUSE", 0.0)
    context.restore({"x": 1})
    assert context.finish(step=4)["saved"] is True
    assert tries == [4, 4, 4]


def test_the_time_left_follows_from_the_steps(context: Context, clock: Clock) -> None:
    context.restore({})
    for step in context.steps(10):
        clock.now += 2
        context.log(score=0.1)
        if step == 5:  # four are over
            break
    assert value(context.metrics.left_seconds) == 12


def test_the_time_left_follows_from_the_work_where_it_is_known(context: Context, clock: Clock) -> None:
    context.restore({})
    for step in context.steps(10, work=100):
        clock.now += 2
        context.log(done=20 * step)
        if step == 4:
            break
    assert value(context.metrics.left_seconds) == 2


# ---- the log


def test_a_log_is_of_the_step_under_way(context: Context, supervisor: Supervisor) -> None:
    context.restore({})
    for step in context.steps(2):
        context.log(score=step / 10)
    assert supervisor.records == [
        ("train", 0, 0), ("score", 1, 0.1), ("done", 1, 1), ("score", 2, 0.2), ("done", 2, 2),
    ]  # fmt: skip
    assert value(context.metrics.done) == 2
    context.log(score=0.3)  # after them it is of the last
    assert supervisor.records[-1] == ("score", 2, 0.3)


def test_work_that_the_job_counts_is_never_mistaken_for_steps(
    context: Context, supervisor: Supervisor, tmp_path: Path
) -> None:
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
        ("done", 1, 1000), ("done", 2, 2000), ("done", 3, 3000),
    ]  # fmt: skip
    sink = Supervisor()
    later = make(tmp_path, sink, generation=2)
    later.restore({})
    train(later, 5)
    assert [record for record in sink.records if record[0] == "done"] == [("done", 4, 4000), ("done", 5, 5000)]
    assert value(later.metrics.done) == 2000


def test_a_log_has_numbers_whatever_they_come_as(context: Context, supervisor: Supervisor, tmp_path: Path) -> None:
    """A loss with its graph would keep all of it in memory."""
    context.restore({})
    weight = torch.ones(1, requires_grad=True)
    for _ in context.steps(10, {}):
        context.log(done=torch.tensor(5), loss=weight.sum(), score=np.float32(0.5), temperature=torch.tensor(21.5))
    context.finish()
    assert {type(number) for _, _, number in supervisor.records} <= {int, float}
    assert not isinstance(context.progress._loss, torch.Tensor)
    assert value(context.metrics.temperature) == 21.5
    assert read(next(tmp_path.glob("checkpoint-*")), "rl").about["done"] == 5


@pytest.mark.parametrize("name", ["entropy", "value", "rpc_calls", "cups", "cups_total"])
def test_a_value_without_a_gauge_is_one_of_rolecall_value(context: Context, logged: list[EventDict], name: str) -> None:
    context.start(0)
    context.log(10, done=10, **{name: torch.tensor(0.25)})
    assert value(context.metrics.value.labels(name)) == 0.25
    assert logged[-1][name] == 0.25
    assert type(logged[-1][name]) is float


def test_a_value_with_a_gauge_of_the_jobs_is_that_gauge(context: Context, logged: list[EventDict]) -> None:
    context.start(0)
    context.log(10, done=10, temperature=21.5)
    assert value(context.metrics.temperature) == 21.5
    assert "temperature" not in logged[-1]
    assert not context.metrics.value._metrics


def test_the_score_is_in_the_line_under_its_label(context: Context, logged: list[EventDict]) -> None:
    context.start(0)
    context.log(10, done=10, score=0.123456789)
    context.log(20, done=20)
    assert [event["event"] for event in logged[1:]] == ["step 10\taccuracy 0.123457", "step 20"]


# ---- and else


def test_the_jobs_own_files_have_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    context = make(tmp_path, me=ONE, checkpoint_dir=Path("run"))
    assert context.files == tmp_path / "run" / "files"
    (context.files / "tokens.json").write_text("[]")
    assert (tmp_path / "run" / "files" / "tokens.json").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"^CHECKPOINT_DIR={tmp_path}/file/x: cannot be written \\(NotADirectory"):
        _ = make(tmp_path, checkpoint_dir=tmp_path / "file" / "x").files


def test_seeds_differ_by_rank_generation_and_purpose(tmp_path: Path) -> None:
    def seeds(of: Context) -> list[int]:
        return [of.seed(), of.seed(0), of.seed(1), of.seed(1, 2), of.seed(2, 1)]

    contexts: list[Callable[[], Context]] = [
        lambda: make(tmp_path),
        lambda: make(tmp_path, me=ONE),
        lambda: make(tmp_path, generation=2),
        lambda: make(tmp_path, seed=2),
    ]
    numbers = [number for build in contexts for number in seeds(build())]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**32 for number in numbers)
    assert seeds(make(tmp_path)) == numbers[:5]  # and are the same another time


def test_a_context_says_who_it_is(tmp_path: Path) -> None:
    context = make(tmp_path, me=ONE)
    assert (context.rank, context.world_size, context.me.name) == (1, 3, "observer_0")
    context.lose("observer_1")
    assert context.world_size == 3  # torch's, which the generation keeps


def test_what_is_saved_within_a_step_is_the_state_after_it(context: Context, tmp_path: Path) -> None:
    state = context.restore({"hits": 0})
    for _ in context.steps(3):
        state["hits"] += 1
        if state["hits"] == 2:
            context.save()
    assert saved(tmp_path) == {2: {"hits": 2}}


def test_a_job_may_finish_within_a_step(context: Context, tmp_path: Path) -> None:
    state = context.restore({"hits": 0})

    def lead() -> dict[str, Any]:
        for _ in context.steps(9):
            state["hits"] += 1
            if state["hits"] == 2:
                return context.finish("Solved")
        raise AssertionError

    assert lead()["saved"]
    gc.collect()
    assert context.step == 2
    assert saved(tmp_path) == {2: {"hits": 2}}


def test_another_rank_than_0_makes_no_steps(tmp_path: Path) -> None:
    other = make(tmp_path, me=ONE)
    other.checkpoints = None
    with pytest.raises(UsageError, match="only rank 0"):
        list(other.steps(2))


# ---- what it is doing


def test_rank_0_says_what_it_is_doing(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watched(Tally):
        def state_dict(self) -> dict[str, Any]:
            seen.append(context.pace.doing)
            return super().state_dict()

    assert context.pace.doing == "loading"
    context.restore({"tally": Watched()})
    assert context.pace.doing == "loading"
    for step in context.steps(3):
        assert context.pace.doing == ""
        if step == 1:
            context.save()
        with context.phase("compiling"):
            assert context.pace.doing == "compiling"
    assert context.pace._step is None
    context.finish()
    assert seen == ["restoring", "saving", "saving"]


@pytest.mark.parametrize("leave", ["break", "return"])
def test_after_a_loop_that_was_left_no_step_is_under_way(context: Context, leave: str) -> None:
    context.restore({})

    def train() -> None:
        for step in context.steps(9):
            assert context.pace._step == step
            if leave == "return":
                return
            break

    train()
    gc.collect()
    assert context.pace._step is None


def test_another_rank_is_loading_until_it_is_ready(tmp_path: Path) -> None:
    other = make(tmp_path, me=ONE)
    assert other.pace.doing == "loading"
    other.report_step(1)
    assert other.pace.doing == ""
