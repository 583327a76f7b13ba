"""Metrics that outlive their worker, torn files, and the fields of every line of the log."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.parser import text_string_to_metric_families

from rolecall import telemetry
from rolecall.declare import registry
from rolecall.telemetry import Metric, WorkerFiles

ROOT = Path(__file__).resolve().parents[1]
FAILSAFE = 120.0
# a worker's files, and one thing that is in each
KINDS = {
    "counter_worker.db": "steps_total",
    "gauge_mostrecent_worker.db": "step",
    "histogram_worker.db": "seconds_count",
}
RL = registry.get("rl").metrics

# A worker: counts, and then ends as its last argument says.
WORKER = """
import os, signal, sys
from rolecall import telemetry
from rolecall.telemetry import Metric
declared = [
    Metric("counter", "calls_total", "Calls.", ("method",)),
    Metric("counter", "steps_total", "Steps."),
    Metric("gauge", "step", "The step."),
    Metric("gauge", "never_set", "A gauge that nobody sets."),
    Metric("histogram", "seconds", "Times.", buckets=(1, 2)),
]
metrics = telemetry.build_worker(declared, "observer", False)
metrics.calls.labels("act").inc(2)
metrics.calls.labels(sys.argv[1]).inc()
metrics.steps.inc(10)
metrics.step.set(float(sys.argv[2]))
metrics.seconds.observe(1.5)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_worker(directory: Path, method: str, step: int, end: str) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    command = [sys.executable, "-c", WORKER, method, str(step), end]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=FAILSAFE)
    assert run.returncode == (-signal.SIGKILL if end == "killed" else 0), run.stderr


def samples(*collectors: Any) -> dict[tuple[str, str], float]:
    """What a scrape of these shows: (name, label values) -> value."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name.removeprefix(telemetry.PREFIX), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Counted(WorkerFiles):
    """A worker's files, with how many were dropped."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, self.drop)
        self.dropped = 0

    def drop(self) -> None:
        self.dropped += 1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a worker that was killed."""
    directory = tmp_path_factory.mktemp("worker")
    run_worker(directory, "rollout", 7, "killed")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def files(tmp_path: Path, written: dict[str, bytes]) -> Counted:
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    return Counted(tmp_path)


# ---- workers come and go


def test_counting_goes_on_in_the_next_worker(tmp_path: Path) -> None:
    """Killed or ended; and however many there were, the files are those of one."""
    files = Counted(tmp_path)
    for number, (method, end) in enumerate([("rollout", "killed"), ("act", "ended"), ("rollout", "killed")], start=1):
        run_worker(tmp_path, method, 100 - number, end)
        shown = samples(files)
        assert shown["steps_total", ""] == 10 * number
        assert shown["calls_total", "act"] == 2 * number + (number >= 2)
        assert shown["calls_total", "rollout"] == 1 + (number == 3)
        assert shown["step", ""] == 100 - number  # the newest, not the greatest
        assert shown["seconds_count", ""] == number
        assert shown["seconds_bucket", "1.0"] == 0
        assert shown["seconds_bucket", "2.0"] == number
        assert shown["seconds_sum", ""] == 1.5 * number
        assert ("never_set", "") not in shown
        assert {path.name for path in tmp_path.iterdir()} == set(KINDS)
    assert files.dropped == 0


def test_the_supervisors_own_metrics_stand_beside_them(files: Counted) -> None:
    registry = CollectorRegistry()
    built = telemetry.build(telemetry.SUPERVISOR, registry)
    built.worker_starts.inc()
    registry.register(files)
    text = generate_latest(registry).decode()
    assert "rolecall_worker_starts_total 1.0" in text
    assert "rolecall_steps_total 10.0" in text
    assert "rolecall_rank_info{" not in text


# ---- torn files


def used(content: bytes) -> int:
    return int.from_bytes(content[:4], sys.byteorder)


def key_start(content: bytes) -> int:
    return content.index(b'["')


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "two bytes": lambda content: content[:2],
    "only its length": lambda content: content[:8],
    "within a key": lambda content: content[: key_start(content) + 5],
    "within a value": lambda content: content[: used(content) - 9],
    "length beyond the end": lambda content: (1 << 20).to_bytes(4, sys.byteorder) + content[4 : used(content)],
    "key beyond the end": lambda content: content[:8] + (1 << 20).to_bytes(4, sys.byteorder) + content[12:],
    "key of negative length": lambda content: content[:8] + (-8).to_bytes(4, sys.byteorder, signed=True) + content[12:],
    "key of no text": lambda content: content.replace(b'["', b"\xff\xfe", 1),
    "key of no JSON": lambda content: content.replace(b'["', b"xx", 1),
    "key of other JSON": lambda content: content.replace(b'["', b'{"', 1).replace(b"]", b"}", 1),
    "zeros after the length": lambda content: content[:8] + bytes(len(content) - 8),
    "zeros in the middle": lambda content: content[:40] + bytes(used(content) - 40) + content[used(content) :],
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_file_is_dropped_and_counted_and_the_rest_still_shown(files: Counted, name: str, damage: str) -> None:
    whole = samples(files)
    path = files.directory / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    shown = samples(files)
    assert files.dropped == 0
    assert path.exists()  # a worker may just be making it
    assert (KINDS[name], "") not in shown
    for other in KINDS.values():
        assert (other == KINDS[name]) == ((other, "") not in shown)
    assert shown.items() <= whole.items()
    files.free(())
    assert not path.exists()
    assert samples(files) == shown
    files.free(())
    assert files.dropped == 1  # once


def test_a_worker_starts_over_where_its_file_was_dropped(files: Counted) -> None:
    (files.directory / "counter_worker.db").write_bytes(b"torn")
    assert files.free(()) == files.directory
    run_worker(files.directory, "rollout", 9, "ended")
    shown = samples(files)
    assert shown["steps_total", ""] == 10
    assert shown["seconds_count", ""] == 2
    assert files.dropped == 1


def test_workers_at_the_same_time_count_together_and_one_sets_the_gauges(tmp_path: Path) -> None:
    files = Counted(tmp_path)
    run_worker(files.free(()), "act", 5, "ended")
    second = files.free([tmp_path])
    assert files.free([tmp_path, second]) not in (tmp_path, second)
    run_worker(second, "act", 7, "ended")
    shown = samples(files)
    assert (shown["steps_total", ""], shown["calls_total", "act"], shown["seconds_count", ""]) == (20, 6, 2)
    assert shown["step", ""] == 5
    files.use(second)
    shown = samples(files)
    assert (shown["steps_total", ""], shown["step", ""]) == (20, 7)
    (tmp_path / "counter_worker.db").write_bytes(b"torn")
    assert files.free([tmp_path]) == second  # that of a live worker is left alone
    assert files.dropped == 0


def test_scrapes_while_a_worker_writes(tmp_path: Path) -> None:
    """A file that grows under the reader's eyes is no torn one."""
    files = Counted(tmp_path)
    growing = values.MultiProcessValue(lambda: "worker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        growing("counter", "c", "c_total", ("label",), ("first",), "Help.").inc(1)
        done = threading.Event()

        def write() -> None:
            for number in range(2000):  # beyond the file's first size
                growing("counter", "c", "c_total", ("label",), (f"{number:0100d}",), "Help.").inc(1)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        scrapes = 0
        while not done.is_set() or scrapes < 3:
            samples(files)
            scrapes += 1
        writer.join(FAILSAFE)
    assert files.dropped == 0
    assert sum(samples(files).values()) == 2001


# ---- who has which metrics


@pytest.fixture
def multiprocess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)  # `build_worker` sets it; put back after the test
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path


def names_of(role: str, first: bool, declared: tuple[Metric, ...]) -> set[str]:
    return set(vars(telemetry.build_worker(declared, role, first)))


def test_a_worker_has_its_roles_metrics(multiprocess: Path) -> None:
    declared = (*telemetry.WORKER, *RL)
    agent, observer = names_of("agent", True, declared), names_of("observer", False, declared)
    for metric in declared:
        assert (metric.attribute in agent) == (not metric.roles or bool({"agent", "rank 0"} & set(metric.roles)))
        assert (metric.attribute in observer) == (not metric.roles or "observer" in metric.roles)
    assert "rpc_calls" in agent & observer
    assert {"step", "checkpoint_seconds", "score", "rl_return_last"} <= agent - observer
    assert {"rl_env_steps", "rl_episodes"} <= observer - agent


def test_a_role_of_another_job_that_is_first(multiprocess: Path) -> None:
    declared = (Metric("counter", "a_total", "A.", roles=("rank 0",)), Metric("counter", "b_total", "B.", roles=("x",)))
    assert names_of("master", True, declared) == {"a"}
    assert names_of("x", False, declared) == {"b"}
    assert names_of("x", True, declared) == {"a", "b"}


def test_a_workers_metrics_are_in_files_named_by_its_slot(multiprocess: Path) -> None:
    built = telemetry.build_worker((*telemetry.WORKER, *RL), "observer", False)
    built.rl_env_steps.inc(5)
    assert {path.name for path in multiprocess.iterdir()} == set(KINDS)
    assert samples(Counted(multiprocess))["rl_env_steps_total", ""] == 5


def test_declarations_are_sound() -> None:
    declared = (*telemetry.SUPERVISOR, *telemetry.COORDINATOR, *telemetry.WORKER, *RL)
    assert len({metric.name for metric in declared}) == len(declared)
    assert len({metric.attribute for metric in declared}) == len(declared)
    roles = {role.name for role in registry.get("rl").roles} | {"rank 0"}
    for metric in declared:
        assert metric.full_name.startswith("rolecall_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {"rank", "ordinal", "pid"} & set(metric.labels) or metric.name == "rank_info"
        assert set(metric.roles) <= roles, metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
    assert len(telemetry.catalogue(RL)) == len(declared)


def test_one_hot() -> None:
    gauge = Metric("gauge", "state", "State.", ("state",))
    registry = CollectorRegistry()
    built = telemetry.build([gauge], registry)
    for state in ("running", "ended", "none"):
        telemetry.one_hot(built.state, telemetry.WORKER_STATES, state)
        shown = {name: registry.get_sample_value("rolecall_state", {"state": name}) for name in telemetry.WORKER_STATES}
        assert shown == {name: float(name == state) for name in telemetry.WORKER_STATES}


# ---- the log


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def logged(format: str, write: Callable[[Any], None], level: str = "info", **bound: Any) -> str:
    stream = io.StringIO()
    telemetry.setup_logging(format, level, stream=stream, **bound)
    write(telemetry.log())
    return stream.getvalue()


def log_started(log: Any) -> None:
    log.info("training", env_id="CartPole-v1")


def log_in_a_thread(log: Any) -> None:
    """As an RPC thread, which starts with no context of its own."""
    thread = threading.Thread(target=log_started, args=(log,))
    thread.start()
    thread.join(FAILSAFE)


@pytest.mark.parametrize("write", [log_started, log_in_a_thread])
def test_a_line_says_who_and_nothing_that_is_not_known(write: Callable[[Any], None]) -> None:
    text = logged("text", write, role="observer", ordinal=3, generation=None)
    assert text.count("\n") == 1
    for part in ("training", "env_id=CartPole-v1", "role=observer", "ordinal=3", "info"):
        assert part in text
    assert "\x1b" not in text
    assert "generation" not in text
    text = logged("json", write, role="observer", ordinal=3, generation=None)
    assert text.count("\n") == 1
    event = json.loads(text)
    assert event.pop("timestamp").endswith("Z")
    who = {"role": "observer", "ordinal": 3}
    assert event == {"event": "training", "level": "info", "env_id": "CartPole-v1", **who}


def test_an_event_is_one_write() -> None:
    """A rank's processes share their output: a line end that came by itself would come after another's event."""
    writes: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    telemetry.setup_logging("text", "info", stream=Output())
    log_started(telemetry.log())
    assert [text.count("\n") for text in writes] == [1]
    assert writes[0].endswith("\n")


def test_an_event_of_another_generation_says_so_itself() -> None:
    text = logged("json", lambda log: log.info("worker ended", generation=11), role="agent", ordinal=0, generation=12)
    assert json.loads(text)["generation"] == 11


def test_an_exception_is_one_line_of_json() -> None:
    def write(log: Any) -> None:
        try:
            raise KeyError("lost")
        except KeyError:
            log.exception("it broke")

    text = logged("json", write, role="agent", ordinal=0)
    assert text.count("\n") == 1
    assert "KeyError: 'lost'" in json.loads(text)["exception"]
    assert "KeyError: 'lost'" in logged("text", write, role="agent", ordinal=0)


def test_lesser_levels_are_left_out() -> None:
    def write(log: Any) -> None:
        for level in ("debug", "info", "warning", "error"):
            getattr(log, level)(f"as {level}")

    for level, expected in {"debug": 4, "info": 3, "warning": 2, "error": 1}.items():
        assert logged("json", write, level).count("\n") == expected


LOGS = """
import logging, sys
from rolecall import telemetry
if sys.argv[1:]:
    logging.basicConfig(format="mine: %(message)s", level="INFO")
telemetry.setup_logging("json", "info", role="observer", ordinal=1)
telemetry.take_logging("info", "ours")
logging.info("by %s", "root")
logging.getLogger("model").info("by a module")
logging.getLogger("model").debug("too much")
logging.getLogger("model").log(35, "in between")
def library(name, level):
    code = compile(f"logging.getLogger({name!r}).{level}({name!r})", telemetry.LIBRARIES[0] + "/x.py", "exec")
    exec(code)
library("httpx", "info")
library("httpx", "warning")
library("ours.model", "info")
try:
    raise ValueError("bad")
except ValueError:
    logging.exception("failed")
"""


def test_the_log_has_what_the_users_code_logs() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=FAILSAFE)
    assert done.stderr == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["event"], line["level"], line.get("logger")) for line in lines] == [
        ("by root", "info", None),
        ("by a module", "info", "model"),
        ("in between", "warning", "model"),
        ("httpx", "warning", "httpx"),
        ("ours.model", "info", "ours.model"),
        ("failed", "error", None),
    ]
    assert all((line["role"], line["ordinal"]) == ("observer", 1) for line in lines)
    assert "ValueError: bad" in lines[-1]["exception"]


def test_what_the_user_has_set_up_for_logging_stays() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS, "mine"], capture_output=True, text=True, timeout=FAILSAFE)
    assert done.stdout == ""
    assert done.stderr.startswith("mine: by root\nmine: by a module\n")
