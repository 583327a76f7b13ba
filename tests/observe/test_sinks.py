"""Sinks: which are chosen, which points they get and when, and that none of them can harm a run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.typing import EventDict

from rolecall.config import Settings
from rolecall.declare.task import Attachment, Task
from rolecall.errors import UsageError
from rolecall.messages.codec import decode
from rolecall.messages.sinks import End
from rolecall.messages.worker import FromWorker, Report
from rolecall.observe.sinks import build as building
from rolecall.observe.sinks.build import build, choose
from rolecall.observe.sinks.feed import ONCE, Feed, Sinks
from rolecall.observe.sinks.once import OnceSink, State
from rolecall.rank import worker
from rolecall.rank.worker_end import WorkerEnd
from rolecall.record.history import Point, Row, Start
from tests.context.contexts import AGENT
from tests.observe import sink_readers
from tests.record import histories

DEADLINE = 150.0  # a fail-safe


# ---- which


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names = {"tensorboard", "mlflow"}
    monkeypatch.setattr(building, "is_installed", names.__contains__)
    return names


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("none", ()),
        ("auto", ("tensorboard",)),
        ("mlflow", ("mlflow",)),
        (" mlflow, tensorboard,mlflow", ("mlflow", "tensorboard")),
    ],
)
def test_sinks_are_chosen(setting: str, chosen: tuple[str, ...]) -> None:
    assert choose(setting) == chosen


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("mlflow,tensorbord", "SINKS=mlflow,tensorbord: tensorbord is no sink; give auto, none, or some of"),
        (",", "SINKS=,: nothing is no sink"),
        ("wandb,mlflow", r"wandb cannot be imported; at rank 0, `pip install 'rolecall\[wandb\]'`"),
    ],
)
def test_a_sink_that_cannot_be_is_refused(setting: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        choose(setting)


def test_no_secret_reaches_a_sink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And its library's own variables do, with defaults that need no network."""
    monkeypatch.setattr(building, "is_installed", lambda name: True)
    for name in ("JOB_TOKEN", "PASSWORD"):
        monkeypatch.setenv(name, "a-secret-of-more-than-128-bits")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    settings = Settings(sinks="tensorboard,mlflow,wandb", checkpoint_dir=tmp_path)
    for one in build(settings, "rl", {"LR": 0.1}, ["password"]).feeds:
        assert "a-secret" not in json.dumps([dict(one._environment), one._about])
        assert one._environment["MLFLOW_TRACKING_URI"] == "http://tracking.example"
        assert one._environment["WANDB_MODE"] == "offline"


# ---- what is written


def points(*numbers: int, name: str = "loss", value: float = 0.0) -> list[Row]:
    return [Point(name, number, value + number, number) for number in numbers]


def test_points_that_could_not_be_written_come_again_and_none_comes_twice(tmp_path: Path) -> None:
    class Failing(OnceSink):
        def log(self, points: list[Point]) -> None:
            if not (tmp_path / "works").exists():
                raise OSError(28, "No space left on device")
            logged.extend((point.step, point.value) for point in points)

    logged: list[tuple[int, float]] = []
    sink = Failing(tmp_path)
    with pytest.raises(OSError, match="No space"):
        sink.write(points(1, 2, 3))
    assert State.read(tmp_path) == State()
    (tmp_path / "works").touch()
    sink.write([Start(1, 0), *points(1, 2, 3)])
    Failing(tmp_path).write([Start(2, 1), *points(2, 3, 4, value=100)])  # a resumed run makes 2 and 3 again
    assert logged == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0)]
    assert State.read(tmp_path) == State(last={"loss": 4}, rows=4)


# ---- from the worker


def test_a_checkpoint_comes_after_its_records(tmp_path: Path) -> None:
    """A worker that is killed right after it has written one leaves nothing out of the curves."""
    ours, theirs = multiprocessing.Pipe()
    task = Task("rl", Settings(checkpoint_dir=tmp_path), "agent", 0, attachment=Attachment(1, AGENT, (AGENT,)))
    with ours, theirs:
        pipe = WorkerEnd(theirs, task, None)
        checkpoints = worker._checkpoints(worker.Host(task), pipe)
        pipe.record(done := Point("done", 3, 3.0, 1.0))
        checkpoints.write(3, {}, {})
        assert ours.poll()
        message = decode(FromWorker, ours.recv_bytes())
        assert isinstance(message, Report)
        assert message.rows == (done,)


# ---- feeding


SINK = """
import json, os, sys, time
from pathlib import Path
from rolecall.observe.sinks import process
from rolecall.record.history import Point

class Sink:
    def __init__(self, about):
        self.file, self.fails = Path(about["directory"]) / "sink", 1
    def write(self, rows):
        self.add([[row.name, row.step] for row in rows if isinstance(row, Point)])
    def add(self, items):
        if "{how}" == "hangs": time.sleep(1000)
        if "{how}" == "dies": os._exit(7)
        if "{how}" == "prints": print("What a library says")
        if "{how}" == "raises" and self.fails:
            self.fails -= 1
            raise PermissionError("not now\\nnot ever")
        with self.file.open("a") as file:
            file.writelines(json.dumps(item) + "\\n" for item in items)
    def end(self, state, summary):
        self.add([["end", state, summary]])

process.PERIOD_SECONDS = 0.02
if "{how}" == "hangs": process.ORPHAN_SECONDS = 0.5
sys.modules["rolecall.observe.sinks.fake"] = type(sys)("fake")
sys.modules["rolecall.observe.sinks.fake"].begin = Sink
process.main("fake")
"""


def fake(tmp_path: Path, how: str = "") -> Feed:
    one = Feed("mlflow", {"directory": str(tmp_path)}, {})
    one.command = [sys.executable, "-c", SINK.replace("{how}", how)]
    return one


async def log(tmp_path: Path, *rows: Row) -> None:
    """Rank 0 writes them to the run's history."""
    journal = histories.journal(tmp_path)
    journal.record(rows)
    assert await journal.save()


def written(tmp_path: Path) -> list[list[Any]]:
    file = tmp_path / "sink"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def before() -> None:
    """The processes of other tests, which share this one."""
    EARLIER.clear()
    EARLIER.update(psutil.Process().children(recursive=True))


EARLIER = set[psutil.Process]()


def nothing_is_left() -> bool:
    return not {*psutil.Process().children(recursive=True)} - EARLIER


@pytest.mark.parametrize("how", ["", "prints", "raises"])
def test_a_sink_gets_everything_once(tmp_path: Path, how: str, logged: list[EventDict]) -> None:
    """And nothing of what was there before it was started."""

    async def run() -> None:
        await log(tmp_path, Start(1, 0), *points(1))
        one = fake(tmp_path, how)
        one.start((tmp_path / "history.jsonl").stat().st_size)
        await log(tmp_path, Start(2, 1), *points(2))
        await until(lambda: written(tmp_path) or logged)
        await log(tmp_path, *points(3, 4))
        await one.end(End("finished", {"steps": 4}), DEADLINE)

    asyncio.run(run())
    assert written(tmp_path) == [["loss", 2], ["loss", 3], ["loss", 4], ["end", "finished", {"steps": 4}]]
    assert nothing_is_left()
    assert [event["problem"] for event in logged] == ["PermissionError: not now"] * (how == "raises")


@pytest.mark.parametrize("name", building.KINDS)
def test_a_sink_that_was_down_gets_what_it_missed(tmp_path: Path, name: str) -> None:
    """If it leaves out what it has; TensorBoard would get all of it again."""

    async def run() -> None:
        await log(tmp_path, Start(1, 0), *points(1))
        one = fake(tmp_path)
        one.name = name
        Sinks([one]).start((tmp_path / "history.jsonl").stat().st_size)
        await log(tmp_path, *points(2))
        await one.end(End("finished"), DEADLINE)

    asyncio.run(run())
    missed = [["loss", 1]] * (name != "tensorboard")
    assert written(tmp_path) == [*missed, ["loss", 2], ["end", "finished", None]]


@pytest.mark.parametrize("name", building.KINDS)
def test_the_kinds_that_leave_out_what_they_have_are_named(name: str) -> None:
    """Rank 0's supervisor does not import them."""
    begin = importlib.import_module(f"rolecall.observe.sinks.{name}").begin
    assert issubclass(begin, OnceSink) == (name in ONCE)


@pytest.mark.parametrize("how", ["shorter", "deleted"])
def test_a_history_that_becomes_shorter_is_read_from_its_start(
    tmp_path: Path, logged: list[EventDict], how: str
) -> None:
    async def run() -> None:
        await log(tmp_path, Start(1, 0), *points(1, 2, 3))
        one, history = fake(tmp_path), tmp_path / "history.jsonl"
        whole = history.read_bytes().splitlines(keepends=True)
        one.start(0)
        await until(lambda: written(tmp_path))
        if how == "shorter":
            history.write_bytes(b"".join(whole[:2]))
        else:
            history.unlink()
        await until(lambda: logged)
        await log(tmp_path, *points(4))
        await one.end(End("finished"), DEADLINE)

    asyncio.run(run())
    again = [["loss", 1]] * (how == "shorter")
    assert written(tmp_path) == [["loss", 1], ["loss", 2], ["loss", 3], *again, ["loss", 4], ["end", "finished", None]]
    assert [event["problem"] for event in logged] == ["history.jsonl has become shorter: it is read from its start"]


@pytest.mark.parametrize(
    ("how", "problem"), [("hangs", "its end takes over 1 s"), ("dies", "its process ended with exit code 7")]
)
def test_a_sink_that_is_broken_harms_nothing(tmp_path: Path, how: str, problem: str, logged: list[EventDict]) -> None:
    async def run() -> None:
        one = fake(tmp_path, how)
        one.start(0)
        await log(tmp_path, Start(1, 0), *points(1))
        await until(lambda: logged or how == "hangs")
        await one.end(End("finished", {}), 1.0)

    asyncio.run(run())
    assert nothing_is_left()
    (event,) = logged
    assert (event["log_level"], event["sink"], event["problem"]) == ("warning", "mlflow", problem)
    assert "MLFLOW_TRACKING_URI" in event["advice"]


@pytest.mark.parametrize("which", ["task", "end"])
def test_a_sink_whose_end_is_cancelled_is_killed(tmp_path: Path, which: str) -> None:
    async def run() -> None:
        one = fake(tmp_path, "hangs")
        one.start(0)
        await until(lambda: one._process)
        assert one._task is not None
        ending = asyncio.create_task(one.end(End("finished"), DEADLINE))
        if which == "task":
            one._task.cancel()
            await ending
        else:
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending

    asyncio.run(run())
    assert nothing_is_left()


async def close_input(one: Feed, last: bytes) -> None:
    """Its supervisor is killed after it has sent `last`; waits for the process's end."""
    assert one._process is not None
    assert one._process.stdin is not None
    one._process.stdin.write(last)
    one._process.stdin.close()
    async with asyncio.timeout(DEADLINE):
        await one._process.wait()
    await one.end(End("stopped"), 5)


@pytest.mark.parametrize("last", [b"", b'{"state": "fini'])
def test_a_supervisor_that_is_killed_takes_its_sinks_along(tmp_path: Path, last: bytes) -> None:
    """The end of the input is a stop, also in the middle of a line: what came before it is there."""

    async def run() -> None:
        one = fake(tmp_path)
        one.start(0)
        await log(tmp_path, Start(1, 0), *points(1))
        await until(lambda: written(tmp_path))
        await close_input(one, last)

    asyncio.run(run())
    assert written(tmp_path) == [["loss", 1], ["end", "stopped", None]]


@pytest.mark.parametrize("last", [b"", b'{"state": "finished"}\n'])
def test_a_sink_that_hangs_in_its_end_ends_soon_after_its_supervisor(
    tmp_path: Path, last: bytes, logged: list[EventDict]
) -> None:
    async def run() -> None:
        one = fake(tmp_path, "hangs")
        one.start(0)
        await until(lambda: one._process)
        await close_input(one, last)

    asyncio.run(run())
    assert [event["problem"] for event in logged] == ["its process ended with exit code 1"]


# ---- the real ones

SUMMARY = {"state": "finished", "curve": {"final": 112.0, "best": None}, "settings": {"LR": 0.1}}


@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize("name", building.KINDS)
def test_killed_run_has_each_step_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[EventDict]
) -> None:
    """Its worker is killed after step 4 and goes on from step 2; rank 0 after step 10, and goes on from step 5."""
    pytest.importorskip(name)
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the test's own client
    curve = sink_readers.CURVES[name]

    def make() -> Feed:
        settings = Settings(sinks=name, checkpoint_dir=tmp_path)
        return build(settings, "rl", {"LR": 0.1, "ENV_ID": "Cart", "SIZES": [1, 2]}, []).feeds[0]

    def is_there() -> bool:
        state = tmp_path / name / "rolecall.json"
        if name != "tensorboard" and not (state.exists() and json.loads(state.read_text())["last"]):
            return False
        with contextlib.suppress(Exception):  # it is being written
            return len(curve(tmp_path, "loss")) == 10
        return False

    async def killed() -> None:
        one = make()
        one.start(0)
        await log(tmp_path, Start(1, 0), *points(1, 2, 3, 4), Start(2, 2), *points(*range(3, 11), value=10))
        await until(is_there)
        assert one._process is not None
        assert one._task is not None
        one._task.cancel()
        one._process.kill()
        await one._process.wait()

    async def resumed() -> None:
        one = make()
        one.start((tmp_path / "history.jsonl").stat().st_size)
        await log(tmp_path, Start(3, 5), *points(*range(6, 13), value=100), *points(12, name="entropy"))
        await one.end(End("finished", SUMMARY), DEADLINE)

    asyncio.run(killed())
    asyncio.run(resumed())
    values = {1: 1.0, 2: 2.0, 3: 13.0, 4: 14.0, 5: 15.0} | {step: 100.0 + step for step in range(6, 13)}
    if name != "tensorboard":  # the first value stays
        values |= {3: 3.0, 4: 4.0} | {step: 10.0 + step for step in range(6, 11)}
    assert curve(tmp_path, "loss") == [*values.items()]
    assert curve(tmp_path, "entropy") == [(12, 12.0)]
    LOOK[name](tmp_path)
    assert_gone()


def assert_gone() -> None:
    """Also what a library has started, such as wandb's service."""
    ends = time.monotonic() + DEADLINE
    while not nothing_is_left() and time.monotonic() < ends:
        time.sleep(0.05)
    assert nothing_is_left()


def look_at_tensorboard(directory: Path) -> None:
    everything = sink_readers.tensorboard(directory)
    texts = {name: everything.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in ("settings", "summary")}
    assert "| LR | 0.1 |" in texts["settings"]
    assert '"final": 112.0' in texts["summary"]
    assert "_hparams_/session_start_info" in {*everything.summary_metadata, *everything.Tags()["tensors"]}


def look_at_mlflow(directory: Path) -> None:
    run, client = sink_readers.mlflow_run(directory)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"LR": "0.1", "ENV_ID": "Cart", "SIZES": "[1, 2]"}
    assert run.data.tags["rolecall.curve.final"] == "112.0"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["summary.json"]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def look_at_wandb(directory: Path) -> None:
    records = list(sink_readers.wandb_records(directory))
    kinds = {record.WhichOneof("record_type") for record in records}
    assert {"run", "history", "metric", "summary", "exit"} <= kinds
    rows = [row["_step"] for row in sink_readers.wandb_rows(directory)]
    assert rows == [*range(12)]  # over both folders: with a step that is there already, the service drops a row
    assert len({record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}) == 1
    config = {
        item.key: item.value_json for record in records for item in (*record.config.update, *record.run.config.update)
    }
    assert config["LR"] == "0.1"
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.metric.glob_name}
    assert axes == {"*": "step"}
    summary = {
        item.key or ".".join(item.nested_key): item.value_json for record in records for item in record.summary.update
    }
    assert float(summary["curve.final"]) == 112


LOOK: dict[str, Callable[[Path], None]] = {
    "tensorboard": look_at_tensorboard,
    "mlflow": look_at_mlflow,
    "wandb": look_at_wandb,
}
