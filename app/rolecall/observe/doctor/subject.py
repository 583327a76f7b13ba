"""The rank that is examined, as the environment of this process describes it."""

from __future__ import annotations

import http.client
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import describe, registry
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.task import Peer
from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of
from rolecall.observe.doctor.checks import Once, within
from rolecall.observe.doctor.rank0 import Rank0
from rolecall.observe.probe import LOCAL

# a rank's environment has at least one of these settings
RANK_SETTINGS = {"role", "rank", "master_addr", "job_token", "job_token_file", "tls_cert"}
Address = tuple[socket.AddressFamily, str]


@dataclass
class Subject:
    """One rank of `job`. `timeout` bounds each wait, `wait` the time in which rank 0 may start (seconds). Tests replace
    the rest."""

    settings: Settings
    job: Description
    timeout: float = 10.0
    wait: float = 0.0
    host: str = field(default_factory=config.host_name)
    clock: Callable[[], float] = time.time
    cgroup: Path = Path("/sys/fs/cgroup")
    proc: Path = Path("/proc")

    def __post_init__(self) -> None:
        self.addresses = Once(self._resolve)
        self.served = Once(self._served)
        self.rank0_name = Peer(self.job.roles[0].name, 0, 0).name
        self.rank0 = Rank0(
            settings=self.settings,
            job=self.job.name,
            name=self.rank0_name,
            # at rank 0 this machine: its Service may not lead back to it
            host=_local(self.settings.bind_addr) if self.is_rank0 else self.settings.master_addr,
            timeout=self.timeout,
            wait=self.wait,
            clock=lambda: self.clock(),
        )

    @property
    def named(self) -> bool:
        """Whether the environment is a rank's: it has a place, an address of rank 0, or credentials."""
        return bool(self.settings.model_fields_set & RANK_SETTINGS)

    @property
    def identity(self) -> Identity | None:
        """This rank's place. Raises UsageError for a place that does not exist."""
        return registry.identity(self.job.roles, self.settings, self.host)

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0."""
        try:
            return self.identity == Identity(self.job.roles[0].name, 0)
        except UsageError:
            return False

    @property
    def name(self) -> str:
        """This rank's place in words."""
        try:
            place = self.identity
        except UsageError:
            return "a rank with a wrong place"
        if place is None or not place.role:
            return "a rank without a place"
        return place.role if place.ordinal is None else name_of((place.role, place.ordinal))

    @property
    def port(self) -> int:
        """The port that this rank listens on."""
        return self.settings.rank0_port if self.is_rank0 else self.settings.port

    @property
    def runs(self) -> bool:
        """Whether this rank runs now, on this machine."""
        try:
            labels, place = self.served.get(), self.identity
        except (OSError, UsageError):
            return False
        if labels.get("job") != self.job.name or place is None:
            return False
        return place.role in ("", labels.get("role")) and str(place.ordinal) in ("None", labels.get("ordinal"))

    def _resolve(self) -> list[Address]:
        """The addresses of MASTER_ADDR. Raises OSError, and TimeoutError after the deadline."""
        host = self.settings.master_addr
        answers = within(self.timeout, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        return list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in answers))

    def _served(self) -> dict[str, str]:
        """The labels of the rank that serves METRICS_PORT on this machine. Raises OSError if no rank does."""
        s = self.settings
        url = f"http://{_local(s.metrics_bind_addr or s.bind_addr)}:{s.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=self.timeout) as response:
                text = response.read(2**22).decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError("another program answers") from error
        info = re.search(r"^rolecall_rank_info{(.*)}", text, re.MULTILINE)
        return dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}


def _local(host: str) -> str:
    """The address on this machine of what listens at `host`, which may stand for every address."""
    return LOCAL.get(host, host)


def load(target: str = "", timeout: float = 10.0, wait: float = 0.0) -> Subject:
    """The rank of the environment, of the job `target` or else JOB. Raises UsageError if its settings are wrong."""
    target = target or config.job_name()
    try:
        job = describe.of_rank(target) if target == config.job_name() else describe.ask(target)
    except SystemExit as error:  # the child process that describes it has logged why
        raise UsageError(f"JOB={target}: cannot be described; the lines above say why") from error
    return Subject(config.load(Settings), job, timeout=timeout, wait=wait)
