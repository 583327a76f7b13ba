"""One run: the job is started, hurt, drained, started again to finish, and judged."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import jobs, series
from tests.chaos.hurt import SoakError, Strike, strike, wait
from tests.chaos.measure import Measured, Recording, line, measure
from tests.chaos.network import Network
from tests.chaos.plan import Event
from tests.chaos.ranks import ChaosRank, Keeper, dump_stacks
from tests.chaos.watcher import Watcher
from tests.disk import SlowDisk
from tests.ports import free_ports

START_DEADLINE = 120.0
STEP_DEADLINE = 90.0  # from the end of an event to training going on
WHOLE_PATIENCE = 15.0  # a rank that died young again and again is kept waiting longer: then the run goes on without it
CALM = 1.0  # what an event does may show a moment later
DRAIN_DEADLINE = 40.0
FINISH_DEADLINE = 600.0
GONE_DEADLINE = 10.0
PORT = 29400
METRICS_PORT = 8000


@dataclass
class Result:
    """What came out."""

    measured: list[Measured] = field(default_factory=list)
    judged: str = ""
    right: bool = False
    failure: str = ""
    leftovers: list[str] = field(default_factory=list)
    drain_codes: dict[str, int] = field(default_factory=dict)
    finish_codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Soak:
    """The ranks of a job and what is known of them. `say` is given a line for each thing that happens; `settings` are
    the job's for the whole run, beside those of `jobs`.
    """

    def __init__(
        self,
        job: str,
        seed: int,
        network: Network | None,
        say: Callable[[str], None],
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.job, self.say, self._network, self._settings = job, say, network, dict(settings or {})
        self.shape = jobs.shape(job)
        self.directory = Path(tempfile.mkdtemp(prefix="rolecall-chaos-"))
        self.checkpoints = self.directory / "checkpoints"
        (self.directory / "t").mkdir()  # a socket lies in it, whose path has to be short
        self.keeper = Keeper()
        self.watchers: dict[str, Watcher] = {}
        self.strikes: list[Strike] = []
        self.result = Result()
        self._port = PORT if network else free_ports(1)[0]  # rank 0's
        self._environment = {
            **jobs.environment(job, {**self._settings, **jobs.SOAKS[job].hurting}, seed),
            "MASTER_PORT": str(self._port),
            "JOB_TOKEN": secrets.token_urlsafe(),
            "CHECKPOINT_DIR": str(self.checkpoints),
            "TMPDIR": str(self.directory / "t"),
        }
        self._master = ""

    # ---- where events happen

    def join(self, name: str) -> None:
        """Start a rank that has not been there, or has left."""
        rank = self.keeper.ranks.get(name)
        if rank is None:
            rank = self._make(name)
            self.watchers[name] = Watcher(rank, first=name == self.shape.ranks[0])
            self.watchers[name].start()
        self.keeper.add(rank)

    def cut(self, name: str) -> None:
        assert self._network is not None
        self._network.cut(name)

    def heal(self, name: str) -> None:
        assert self._network is not None
        self._network.heal(name)

    def slow_disk(self, name: str, seconds: float) -> None:
        """Each fsync of the rank takes so much longer from now on."""
        self._disk(name).slow(seconds)

    def _disk(self, name: str) -> SlowDisk:
        return SlowDisk(self.directory / f"{name}.fsync")

    def _make(self, name: str) -> ChaosRank:
        role, _, ordinal = name.rpartition("-")
        number = len(self.keeper.ranks)
        address, prefix = self._network.add(name) if self._network else ("127.0.0.1", [])
        self._master = self._master or address
        port, metrics = (PORT, METRICS_PORT + number) if self._network else free_ports(2)
        own = {
            **self._disk(name).environment,
            "ROLE": role,
            "ORDINAL": ordinal,
            "PORT": str(port if number else self._port),
            "METRICS_PORT": str(metrics),
            "MASTER_ADDR": self._master,
            "BIND_ADDR": "" if self._network else "127.0.0.1",
        }
        log = self.directory / f"{name}.log"
        return ChaosRank(role, int(ordinal), {**self._environment, **own}, log, address=address, prefix=prefix)

    # ---- the run

    def run(self, events: list[Event], on: Callable[[int], None]) -> Result:
        """Everything; `on` is told how many events are over. Raises SoakError where the job does not do as it must."""
        started = time.monotonic()
        try:
            self._start()
            for event, following in zip(events, [*events[1:], None], strict=True):
                self._play(event, following)
                on(event.number)
            self._drain()
            self._finish()
        except SoakError as error:
            self.result.failure = str(error)
            dump_stacks(self.keeper.processes(), self.directory / "stacks.txt")
        with contextlib.suppress(SoakError):
            wait(lambda: not self.keeper.processes(), "every process to be gone", GONE_DEADLINE)
        self.result.leftovers = [str(process) for process in self.keeper.processes()]
        self.result.seconds = time.monotonic() - started
        return self.result

    def _start(self) -> None:
        self.keeper.start()
        for name in self.shape.ranks:
            self.join(name)
        wait(lambda: self._complete() and len(self.steps()) >= 3, "all ranks training", START_DEADLINE)
        self.say(f"training with {', '.join(self.shape.ranks)}")

    def _play(self, event: Event, following: Event | None) -> None:
        time.sleep(event.gap)  # the plan's moment
        self._check_exits()
        complete = self._complete()
        done = strike(event, self)
        done.note = done.note or ("" if complete else "not all ranks were members")
        self.strikes.append(done)
        if following and following.overlaps:
            done.disturbed = True
            return
        waiting = [earlier for earlier in self.strikes if not earlier.settled]
        self._settle(waiting)
        for each in waiting:
            each.disturbed |= each.event.overlaps
            self.result.measured.append(measure(each, self.recording(), self.shape))
            self.say(line(self.result.measured[-1]))

    def _settle(self, strikes: list[Strike]) -> None:
        """Wait until training goes on, and for a while also until all are members again."""
        over = strikes[-1].over
        before = series.generation_at(self._samples(), strikes[0].at)

        def goes_on() -> bool:
            self._check_exits()
            return time.monotonic() > over + CALM and sum(step.time > over for step in self.steps()) >= 3

        wait(goes_on, f"training to go on after {strikes[-1].event}, from generation {before}", STEP_DEADLINE)
        with contextlib.suppress(SoakError):
            wait(self._complete, "all ranks to be members", WHOLE_PATIENCE)
        now = time.monotonic()
        for each in strikes:
            each.settled = now
            each.whole = self._whole_since(each.over) if self._complete() else None

    def _drain(self) -> None:
        """All ranks leave in order, at once."""
        steps = len(self.steps())
        wait(lambda: len(self.steps()) >= steps + 2, "training to go on after the last event", STEP_DEADLINE)
        self.keeper.restarting = False
        present = [name for name, rank in self.keeper.ranks.items() if rank.wanted]
        for name in present:
            self.keeper.signal_supervisor(name, signal.SIGTERM)
        self.result.drain_codes = self._end(present, "to drain", DRAIN_DEADLINE)
        self.say(f"drained, exit codes {sorted(self.result.drain_codes.values())}")

    def _finish(self) -> None:
        soak = jobs.SOAKS[self.job]
        names = self.shape.ranks
        before = {name: len(self.log(name)) for name in names}
        dropped = dict.fromkeys(soak.hurting, "")  # empty is as good as not set
        self.keeper.restart_all(names, {**dropped, **self._settings, **soak.finishing(self.checkpoints)})
        self.result.finish_codes = self._end(names, "to finish", FINISH_DEADLINE)
        self.say(f"finished, exit codes {sorted(self.result.finish_codes.values())}")
        try:
            log = self.log(names[0])[before[names[0]] :]
            self.result.judged, self.result.right = soak.judge(self.checkpoints, log, self._settings)
        except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
            self.result.judged = f"cannot be judged: {error}"
        self.say(f"result: {self.result.judged}")

    def _end(self, names: list[str] | tuple[str, ...], what: str, deadline: float) -> dict[str, int]:
        ranks = [self.keeper.ranks[name] for name in names]
        wait(lambda: not any(rank.running for rank in ranks), f"all ranks {what}", deadline)
        return {rank.name: rank.wait() for rank in ranks}

    # ---- what is known

    def steps(self) -> list[series.Step]:
        return series.made(self._samples())

    def log(self, name: str) -> str:
        return self.keeper.ranks[name].text()

    def recording(self) -> Recording:
        notices = sorted(notice for watcher in self.watchers.values() for notice in list(watcher.notices))
        drains = [at for at, what in notices if what.endswith('cause="drained"')]
        ordered = [notice for notice in notices if not notice[1].endswith(('cause="drained"', 'cause="left"'))]
        return Recording(self._samples(), {n: r.starts for n, r in self.keeper.ranks.items()}, ordered, drains)

    def counters(self) -> Mapping[tuple[str, str], float]:
        """Every counter's growth, over all ranks."""
        total: Counter[tuple[str, str]] = Counter()
        for watcher in self.watchers.values():
            total.update(watcher.counters)
        return total

    def _samples(self) -> list[series.Sample]:
        return list(self.watchers[self.shape.ranks[0]].samples)

    def _complete(self) -> bool:
        """Whether the generation that runs has all ranks, and has made a step."""
        samples, steps = self._samples(), self.steps()
        if not samples or not steps or samples[-1].members != self._expected():
            return False
        return steps[-1].generation == samples[-1].generation

    def _expected(self) -> int:
        return sum(rank.wanted for rank in self.keeper.ranks.values())

    def _whole_since(self, over: float) -> float:
        """Since when all have been members, `over` at the earliest."""
        since = over
        for sample in self._samples():
            if sample.members != self._expected():
                since = over
            elif since == over:
                since = max(over, sample.time)
        return since

    def _check_exits(self) -> None:
        """A job that failed for good ends the run."""
        if failed := [ended for ended in self.keeper.exits if ended.code == 3]:
            raise SoakError(f"{failed[0].rank} ended with exit code 3: the job failed, or a drain took too long")

    def close(self) -> None:
        for watcher in self.watchers.values():
            watcher.close()
        self.keeper.close()
