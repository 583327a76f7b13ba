"""What a doctor examines: one rank, as the environment of this process has it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from pydantic_settings import SettingsError

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.task import Peer
from rolecall.errors import UsageError
from rolecall.observe.doctor.rank0 import Rank0
from rolecall.observe.doctor.steps import Once, within
from rolecall.observe.probe import LOCAL

S = TypeVar("S", bound=Settings)
# settings of which a rank has one at least; `rolecall run` gives its ranks all that they need
OF_A_RANK = {"role", "rank", "master_addr", "job_token", "job_token_file", "tls_cert"}
Address = tuple[socket.AddressFamily, str]


@dataclass
class Patient:
    """One rank. `wrong` says what its settings are wrong by; `settings` has defaults in the place of those. `job` is
    None where it cannot be described. `timeout` bounds each wait, `wait` that for a rank 0 that is about to start (both
    in seconds). The rest is what tests replace.
    """

    settings: Settings
    job: Description | None
    target: str = ""
    wrong: list[str] = field(default_factory=list)
    timeout: float = 10.0
    wait: float = 0.0
    host: str = field(default_factory=config.host_name)
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    cgroup: Path = Path("/sys/fs/cgroup")
    proc: Path = Path("/proc")
    shared_memory: Path = Path("/dev/shm")

    def __post_init__(self) -> None:
        self.addresses = Once(self.resolve)
        self.here = Once(self._rank_here)
        self.rank0 = Rank0(self.settings, self.job_name, self.rank0_name, self.timeout, self.wait, self._rank0_hosts)

    @property
    def job_name(self) -> str:
        """The short name of the job, by which keys are derived; empty where JOB is wrong."""
        if self.job:
            return self.job.name
        return registry.name_of(self.target) if self.target else ""

    @property
    def rank0_name(self) -> str:
        """Rank 0's name, as its certificate has it; empty where the job cannot be described."""
        if self.job:
            return Peer(self.job.roles[0].name, 0, 0).name
        builtin = self.target in registry.JOBS
        return Peer(registry.get(self.target).roles[0].name, 0, 0).name if builtin else ""

    @property
    def named(self) -> bool:
        """Whether the environment is a rank's: it says where rank 0 is, which rank this is, or what proves it one."""
        return bool(self.settings.model_fields_set & OF_A_RANK)

    @property
    def variables(self) -> Collection[str]:
        """The names of the job's own settings, as far as they are known."""
        if self.job:
            return self.job.variables
        fields = registry.get(self.target).settings.model_fields if self.target in registry.JOBS else ()
        return [name.upper() for name in fields if name not in Settings.model_fields]

    @property
    def identity(self) -> Identity | None:
        """This rank's place; None where it is not known. Raises UsageError for one that there is not."""
        return registry.identity(self.job.roles, self.settings, self.host) if self.job else None

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        try:
            place = self.identity
        except UsageError:
            return False
        return place is not None and self.job is not None and place == Identity(self.job.roles[0].name, 0)

    @property
    def name(self) -> str:
        """This rank's place in words."""
        try:
            place = self.identity
        except UsageError:
            return "a rank without a place"
        if place is None:
            return "a rank"
        if not place.role:
            return "a rank that is given its place"
        return place.role if place.ordinal is None else f"{place.role} {place.ordinal}"

    @property
    def port(self) -> int:
        """The port that this rank listens on."""
        return self.settings.rank0_port if self.first else self.settings.port

    def resolve(self) -> list[Address]:
        """What MASTER_ADDR resolves to now. Raises OSError, TimeoutError after the deadline."""
        host = self.settings.master_addr
        answers = within(self.timeout, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        return list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in answers))

    def _rank0_hosts(self) -> list[str]:
        """Where rank 0 is dialled. At rank 0 itself that is this machine: its Service may not lead back to it."""
        if self.first:
            return [local(self.settings.bind_addr)]
        return [host for _, host in self.addresses.get()]

    def _rank_here(self) -> dict[str, str] | None:
        """Which rank serves METRICS_PORT here: the labels of its metric; None where nothing answers there. Raises
        OSError where something else does."""
        s = self.settings
        connection = http.client.HTTPConnection(
            local(s.metrics_bind_addr or s.bind_addr), s.metrics_port, timeout=self.timeout
        )
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read(2**22).decode(errors="replace")
            samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
            for sample in samples:
                if sample.name == "rolecall_rank_info":
                    return dict(sample.labels)
        except ConnectionRefusedError:
            return None
        except (ValueError, http.client.HTTPException) as error:
            raise OSError(f"what answers is no rank ({type(error).__name__})") from error
        finally:
            connection.close()
        raise OSError("what answers is no rank")

    @property
    def runs(self) -> bool:
        """Whether this rank runs here, beside the doctor."""
        try:
            labels = self.here.get()
            place = self.identity
        except (OSError, UsageError):
            return False
        if labels is None or labels.get("job") != self.job_name or place is None:
            return False
        return place.role in ("", labels.get("role")) and str(place.ordinal) in ("None", labels.get("ordinal"))


def local(host: str) -> str:
    """Where this machine reaches what listens at `host`, which may mean every address."""
    return LOCAL.get(host, host)


def admit(target: str = "", timeout: float = 10.0, wait: float = 0.0) -> Patient:
    """The rank that the environment names, of the job `target`, or else JOB, however wrong its settings are."""
    target, job, wrong = target or config.job_name(), None, list[str]()
    try:
        job = describe.of_rank(target) if target == config.job_name() else describe.ask(target)
    except UsageError as error:
        wrong.append(str(error))
    except SystemExit:  # the child process that was to describe it has said why
        wrong.append(f"JOB={target}: cannot be described; the lines above say why")
    if job is None and target in registry.JOBS:
        _, _, replaced = _usable(registry.get(target).settings)
        with contextlib.suppress(UsageError):  # said already
            job = describe.describe(target, replaced=replaced)
    settings, text, _ = _usable(Settings)
    if text and not any(known.startswith("wrong settings") for known in wrong):
        wrong.append(text)  # otherwise they are among the job's
    known = target if not wrong or _is_known(target) else ""
    return Patient(settings, job, known, wrong, timeout, wait)


def _is_known(target: str) -> bool:
    try:
        registry.require_target(target)
        registry.name_of(target)
    except UsageError:
        return False
    return True


def _usable(cls: type[S]) -> tuple[S, str, dict[str, Any]]:
    """The settings of `cls` with defaults for those that are wrong, what is wrong with these, and the defaults."""
    try:
        return config.load(cls), "", {}
    except UsageError as error:
        text = str(error)
    defaults, replaced = {name: field.default for name, field in cls.model_fields.items()}, dict[str, Any]()
    for _ in defaults:
        try:
            return cls(**replaced), text, replaced
        except ValidationError as error:
            for details in error.errors():
                names = [str(details["loc"][0])] if details["loc"] else ["tls_cert", "tls_key", "tls_ca"]
                replaced |= {name: defaults[name] for name in names}
        except SettingsError:  # a list or a table that is no JSON: which one is in the text alone
            break
    return cls.model_construct(), text, defaults
