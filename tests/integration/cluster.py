"""A job's ranks as real processes, for tests: started, watched, hurt, and gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from rolecall import config
from rolecall.declare import registry
from rolecall.rank.zygote import Zygote
from rolecall.record import history, rundir
from rolecall.record.history import History
from tests.integration import warm
from tests.ports import free_ports
from tests.roles import counter

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-more-than-128-bits"
DEADLINE = 120.0  # of every wait; a fail-safe, no measurement
QUICK = {"SINKS": "none", "LEASE_SECONDS": "3", "REJOIN_INTERVAL": "0.5", "JOIN_GRACE": "3", "THREADS": "1"}
ENDLESS = {
    "rl": {
        "NUM_ENVS": "4",
        "ROLLOUT_STEPS": "4",
        "EPOCHS": "1",
        "MINIBATCHES": "1",
        "MAX_ITERATIONS": "1000000",
        "ENV_ID": "tests.integration.environments:Endless-v0",
    },
    "ps": {
        "EPOCHS": "1000000",
        "BATCH_SIZE": "4",
        "MODEL": "tests.integration.learning:Counter",
        "DATASET": "tests.integration.learning:numbers",
        "LR": "1",
        "LR_SCHEDULE": "constant",
        "MOMENTUM": "0",
    },
    "rnn": {
        "EPOCHS": "1000000",
        "CORPUS": "LICENSE",
        "VOCABULARY": "100",
        "EMBEDDING_SIZE": "8",
        "HIDDEN_SIZE": "6",
        "BATCH_SIZE": "4",
        "SEQUENCE": "8",
        "DROPOUT": "0",
        "LR": "0.01",
    },
    "hybrid": {
        "EPOCHS": "1000000",
        "DATASET": "tests.integration.learning:bags",
        "NUM_EMBEDDINGS": "60",
        "EMBEDDING_DIM": "4",
        "HIDDEN_SIZE": "5",
        "BATCH_SIZE": "8",
        "LR": "0.1",
    },
    "script": {},
}


def until(condition: Callable[[], Any], what: str, timeout: float = DEADLINE) -> Any:
    """Wait until `condition()` is true and return it; AssertionError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)  # the period of looking, not a race: each look costs the rank some milliseconds
    raise AssertionError(f"not within {timeout:g} s: {what}")


@dataclass
class Rank:
    """One rank's process (group), its log file and its metrics port."""

    role: str
    ordinal: int
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | warm.Process | None = None
    prefix: list[str] = field(default_factory=list)  # of the command
    arguments: list[str] = field(default_factory=list)
    server: Zygote | None = None  # to be forked from; a cold start otherwise

    @property
    def name(self) -> str:
        return f"{self.role}-{self.ordinal}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> Rank:
        if self.server:
            self.process = warm.Process(self.server, self.environment, self.log)
            return self
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "rolecall", *self.arguments],
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP GET on the metrics port; status 0 where nobody answers."""
        url = f"http://127.0.0.1:{self.environment['METRICS_PORT']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self, prefix: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples whose names begin so."""
        lines = self.get("/metrics")[1].splitlines(keepends=True)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families("".join(line for line in lines if line.startswith(prefix)))
            for sample in family.samples
        }

    def metric(self, name: str, /, **labels: str) -> float:
        """A sample by its name without the prefix; 0 where there is none (yet)."""
        name = "rolecall_" + name
        return self.metrics(name).get((name, tuple(sorted(labels.items()))), 0.0)

    def worker(self) -> psutil.Process | None:
        """The worker's process: forked by the fork server, which the supervisor started."""
        try:
            for server in psutil.Process(self.pid).children():
                for worker in server.children():
                    return worker
        except psutil.NoSuchProcess:
            pass
        return None

    def appears(self, text: str) -> Callable[[], bool]:
        """Whether `text` comes up in the log from now on."""
        seen = self.text().count(text)
        return lambda: self.text().count(text) > seen

    def kill_worker(self, number: int = signal.SIGKILL) -> int:
        worker = until(self.worker, f"a worker of {self.name}")
        worker.send_signal(number)
        return int(worker.pid)

    def processes(self, part: str = "rank") -> list[psutil.Process]:
        """The processes of a part of the rank: `worker`, `fork server` with its worker, `supervisor`, or the whole
        `rank`."""
        if part in ("worker", "fork server"):
            worker = until(self.worker, f"a worker of {self.name}")
            return [worker] if part == "worker" else [worker.parent(), worker]
        supervisor = psutil.Process(self.pid)
        return [supervisor] if part == "supervisor" else [supervisor, *supervisor.children(recursive=True)]

    @contextlib.contextmanager
    def frozen(self, part: str) -> Iterator[list[psutil.Process]]:
        """SIGSTOP to a part of the rank, and SIGCONT afterwards to what is left of it."""
        stopped = self.processes(part)
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            yield stopped
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(DEADLINE)

    def kill(self) -> None:
        """SIGKILL to the supervisor, the fork server and the worker at once."""
        if self.process and self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(DEADLINE)

    def terminate(self) -> None:
        assert self.process is not None
        self.process.terminate()

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE)


class Cluster:
    """The ranks of JOB (rl) on ports of their own, forked from `server` but for those named in `cold`."""

    def __init__(
        self, directory: Path, server: Zygote | None = None, cold: Container[str] = (), **settings: str
    ) -> None:
        self.directory, self.server, self.cold = directory, server, cold
        self.job = registry.get(settings.get("JOB", "rl"))
        if (name := settings.get("JOB", "rl")) not in registry.JOBS:
            del sys.modules[Path(name).stem]  # another test's file may have the same name
        self.others = self.job.roles[-1]
        self.checkpoints = Path(settings.get("CHECKPOINT_DIR", directory / "checkpoints"))
        # short, for the sockets that lie in it
        self.temporary = tempfile.mkdtemp(prefix="rolecall-test-")
        self.settings = {
            **QUICK,
            **ENDLESS.get(settings.get("JOB", "rl"), {}),  # a user's job has settings of its own
            "JOB": "rl",
            "MASTER_ADDR": "127.0.0.1",
            "BIND_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "JOB_TOKEN": TOKEN,
            "CHECKPOINT_DIR": str(self.checkpoints),
            "TMPDIR": self.temporary,
            **settings,
        }
        self.ranks: dict[str, Rank] = {}
        self.count = 0  # members of the last role that were started
        self._everyone: list[Rank] = []

    def add(self, role: str, ordinal: int, **settings: str) -> Rank:
        """A rank, not yet started."""
        known = {name: value for name, value in os.environ.items() if name not in ("ROLE", "ORDINAL", "JOB", "RANK")}
        port, metrics = free_ports(2)
        own = {"ROLE": role, "ORDINAL": str(ordinal), "PORT": str(port), "METRICS_PORT": str(metrics)}
        if (role, ordinal) == (self.job.roles[0].name, 0) or settings.get("RANK") == "0":
            own["PORT"] = self.settings["MASTER_PORT"]
        environment = {**known, **self.settings, **own, **settings}
        rank = Rank(role, ordinal, environment, self.directory / f"{role}-{ordinal}.log")
        rank.server = None if rank.name in self.cold else self.server
        self._everyone.append(rank)
        self.ranks[rank.name] = rank
        return rank

    def start(self, count: int = 2, described: bool = False) -> Cluster:
        """Start rank 0, all of the other roles but the last one, and `count` members of that.

        Where they are `described`, they know a user's job as those of `rolecall run` do; otherwise each asks a process
        of its own, which imports torch for it.
        """
        if counter(self.others):
            self.settings.setdefault(counter(self.others), str(count))
        self.count = count
        if described:
            self.describe(self.settings["JOB"])
        for role in self.job.roles[:-1]:
            # a setting's default is 1 here
            for ordinal in range(int(self.settings.get(counter(role), 1 if counter(role) else role.count))):
                self.add(role.name, ordinal).start()
        for ordinal in range(count):
            self.add(self.others.name, ordinal).start()
        return self

    def describe(self, job: str) -> None:
        """From now on ranks that are added know the user's `job`, as those of `rolecall run` do."""
        assert self.server is not None
        file, log = self.directory / "description", self.directory / "describe.log"
        process = warm.Process(
            self.server, {**os.environ, **self.settings}, log, ["describe", "--output", str(file), job]
        )
        assert process.wait(DEADLINE) == 0, log.read_text()
        self.settings[config.DESCRIPTION] = file.read_text()

    def evaluated(self, saved: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What `rolecall eval` says of a checkpoint, with rank 0's environment if no other."""
        assert self.server is not None
        output, log = self.directory / "evaluated.json", self.directory / "eval.log"
        output.unlink(missing_ok=True)
        words = ["eval", self.settings["JOB"], "--checkpoint", str(saved), "--json", *arguments]
        process = warm.Process(self.server, environment or self.first.environment, log, words, output)
        assert process.wait(DEADLINE) == 0, log.read_text()
        return dict(json.loads(output.read_text()))

    @property
    def first(self) -> Rank:
        """Rank 0."""
        return self.ranks[f"{self.job.roles[0].name}-0"]

    @property
    def agent(self) -> Rank:
        return self.first

    def member(self, ordinal: int) -> Rank:
        """A member of the last role."""
        return self.ranks[f"{self.others.name}-{ordinal}"]

    def observer(self, ordinal: int) -> Rank:
        return self.member(ordinal)

    def workers(self, role: str) -> dict[str, int]:
        """The process ids of the workers of `role`, by rank."""
        ranks = [rank for rank in self.ranks.values() if rank.role == role]
        return {rank.name: int(until(rank.worker, f"a worker of {rank.name}").pid) for rank in ranks}

    def iterations(self) -> float:
        return self.first.metric("step")

    def members(self) -> float:
        return self.first.metric("gang_members", role=self.others.name)

    def trains(self, more: int = 3) -> None:
        """Wait until `more` further iterations are done."""
        start = self.iterations()
        until(lambda: self.iterations() >= start + more or self.iterations() < start, f"{more} more iterations")
        if self.iterations() < start:  # resumed from an older checkpoint
            until(lambda: self.iterations() >= start, "the iterations made again")

    def is_whole(self) -> None:
        """Wait until a generation with all members that were started makes steps."""
        until(lambda: self.members() == self.count, "all members in the gang")
        self.trains()

    def logs(self) -> str:
        return "\n".join(f"===== {rank.name}\n{rank.text()}" for rank in self._everyone)

    def close(self) -> None:
        for rank in self._everyone:
            if rank.process:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.process.wait(DEADLINE)
        shutil.rmtree(self.temporary, ignore_errors=True)


def reported(directory: Path) -> tuple[dict[str, Any], History]:
    """The summary and the history that a run has left, beside its page."""
    assert (directory / rundir.PAGE).stat().st_size > 10_000
    found = history.read(directory)
    for points in found.curves.values():
        assert [point.step for point in points] == sorted({point.step for point in points})
    return json.loads((directory / rundir.SUMMARY).read_text()), found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
