"""`rolecall run JOB --hosts a,b,c`: which rank runs on which host, and what all of them are given."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import flags, loader, registry, sources
from rolecall.declare.describe import Description
from rolecall.errors import UsageError
from rolecall.gang.protocol import name_of
from rolecall.launch import here, ssh
from rolecall.launch.host import Host
from rolecall.messages.hosts import Files
from rolecall.secret import read_token

SCRIPT = "script"  # the job whose setting of that name is a user's file
LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Placement:
    """The hosts of a run, those of some roles, and the Python there."""

    hosts: tuple[str, ...]
    roles: Mapping[str, tuple[str, ...]]
    python: str

    @property
    def all(self) -> tuple[str, ...]:
        """Each host once."""
        return tuple(dict.fromkeys([*self.hosts, *(host for hosts in self.roles.values() for host in hosts)]))


def placement(options: flags.RunOptions) -> Placement:
    """What the options of the command line say. Raises UsageError."""
    roles = dict[str, tuple[str, ...]]()
    for given in options.roles:
        role, _, hosts = given.partition("=")
        if not role or not hosts or role in roles:
            raise UsageError(f"--role {given}: must be ROLE=HOST,HOST, once for a role")
        roles[role] = _names(f"--role {given}", hosts.split(","))
    return Placement(_names("--hosts", _listed(options.hosts)), roles, options.python or sys.executable)


def _listed(text: str) -> list[str]:
    """The hosts in a file, one a line, or separated by commas."""
    if "," in text or not Path(text).is_file():
        return text.split(",")
    try:
        lines = Path(text).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hosts {text}: cannot be read ({error})") from error
    return [host for line in lines if (host := line.partition("#")[0].strip())]


def _names(option: str, hosts: Sequence[str]) -> tuple[str, ...]:
    hosts = [host.strip() for host in hosts]
    if not hosts or any(not host or host.startswith("-") or any(c.isspace() for c in host) for host in hosts):
        raise UsageError(f"{option}: must be hosts as ssh knows them, separated by commas, or a file with one a line")
    return tuple(hosts)


class Hosts:
    """The hosts of one run, with the methods of `Here`. `target` is its job."""

    def __init__(self, placement: Placement, target: str) -> None:
        self._placement = placement
        here.remove_leftovers()
        self._folder, self._lock = here.temporary_folder()  # with the sockets of ssh's connections
        self._show: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
        job = target if target in registry.JOBS else ""
        self._hosts = {
            host: Host(host, placement.python, self._folder / f"ssh{number}", job, self.show)
            for number, host in enumerate(placement.all)
        }
        self._dealt = 0  # ranks whose role has no hosts of its own
        self._ports = dict[str, tuple[int, int]]()  # of each host, for rank 0
        self._page: socket.socket | None = None  # bound to this machine's port for rank 0's page

    @property
    def engine(self) -> str:
        """As `rolecall run --on` names it."""
        return f"hosts:{','.join(self._placement.all)}"

    @property
    def host(self) -> str:
        """Where rank 0 writes what it keeps."""
        return self._rank0

    def show(self, line: str) -> None:
        """Displays a line."""
        self._show(line)

    def show_by(self, show: Callable[[str], None]) -> None:
        """From now on, `show` displays lines."""
        self._show = show

    async def connect(self) -> None:
        """Connects to all hosts. Raises UsageError, with a line for each that cannot be used."""
        connecting = [asyncio.create_task(host.connect()) for host in self._hosts.values()]
        ready = await asyncio.gather(*connecting, return_exceptions=True)
        problems = [str(problem) for problem in ready if isinstance(problem, UsageError)]
        if problems:
            raise UsageError("\nrolecall: ".join(problems))
        for host, one in zip(self._hosts, ready, strict=True):
            if isinstance(one, BaseException):
                raise one
            self._ports[host] = (one.port, one.metrics_port)

    async def prepare(self, job: Description, settings: Settings) -> None:
        """Makes the hosts ready for `job`: from now on `job` is it as they see it. Raises UsageError."""
        if unknown := set(self._placement.roles) - {role.name for role in job.roles}:
            raise UsageError(f"--role {min(unknown)}=...: {job.name} has the roles {', '.join(job.needs)}")
        self.job, files = sent(job)
        for host in self._hosts.values():
            host.send_files(files)
        self._job_settings = settings
        rank0 = self._hosts[self._host_of(job.roles[0].name, 0)]
        self._rank0 = rank0.host
        self._address = config.exported("MASTER_ADDR") or await self._address_of(rank0.host)
        (self._page,) = here.reserve(1, here.PORTS)
        await rank0.forward(self._page.getsockname()[1], self._ports[rank0.host][1])

    async def _address_of(self, rank0: str) -> str:
        """Where the other hosts reach rank 0's. Raises UsageError."""
        others = [host for host in self._hosts if host != rank0]
        if not others:
            return "127.0.0.1"
        address = await ssh.address(rank0)
        if address.startswith(LOOPBACK):
            raise UsageError(
                f"{rank0}: is a loopback address ({address}), at which {others[0]} does not reach rank 0; set "
                "MASTER_ADDR to one at which it does"
            )
        return address

    def _host_of(self, role: str, ordinal: int) -> str:
        hosts = self._placement.roles.get(role)
        return hosts[ordinal % len(hosts)] if hosts else self._placement.hosts[self._dealt % len(self._placement.hosts)]

    def plan(self, gpus: Mapping[str, int | None]) -> list[dict[str, str]]:
        """See `Here`: rank 0's ports; each host decides on the others', and on GPUs."""
        port, metrics_port = self._ports[self._rank0]
        rank0 = name_of((self.job.roles[0].name, 0))
        ports = {"PORT": str(port), "METRICS_PORT": str(metrics_port)}
        return [ports if rank == rank0 else {} for rank in gpus]

    def forget(self, rank: str) -> None:
        """See `Here`: hosts notice it."""

    def place(self, role: str, ordinal: int) -> Host:
        """See `Here`: ranks are dealt out in order, unless their role has hosts of its own."""
        host = self._hosts[self._host_of(role, ordinal)]
        self._dealt += role not in self._placement.roles
        return host

    def environment(self, folder: Path, token_file: str, directory: Path) -> dict[str, str]:
        """See `Here`: the settings that are set here; all else is as on the hosts."""
        token = read_token(Path(token_file)) if token_file else self._job_settings.token
        return {
            "CHECKPOINT_COPIES": "1",
            **given(self.job),
            **({"JOB_TOKEN": token} if token else {}),
            "MASTER_ADDR": self._address,
            "METRICS_BIND_ADDR": "127.0.0.1",
        }

    def metrics(self, environment: Mapping[str, str]) -> str:
        """See `Here`: only rank 0's are forwarded to this machine."""
        if "METRICS_PORT" not in environment or self._page is None:
            return ""
        return f"http://127.0.0.1:{self._page.getsockname()[1]}/metrics"

    def results(self, directory: Path) -> str:
        """Where rank 0 has written what it keeps."""
        return f"checkpoints and report in {self._rank0}:{directory}"

    async def close(self) -> None:
        """Ends what runs on the hosts, and the connections. Can be called again."""
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._page is not None:
            self._page.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def given(job: Description) -> dict[str, str]:
    """The settings of `job` that are set here."""
    names = {*Settings.model_fields, *(name.lower() for name in job.variables)} - {*flags.NO_FLAG, "job_token_file"}
    return config.given(name.upper() for name in names)


def sent(job: Description) -> tuple[Description, Files]:
    """The job as a host or a container sees it, whose working directory has its files, and these. Raises UsageError."""
    if job.target != SCRIPT:
        target, files = sent_files(job.target)
        return replace(job, target=target), files
    script, files = sent_files(job.settings[SCRIPT])
    return replace(job, settings={**job.settings, SCRIPT: script}, flags={**job.flags, SCRIPT.upper(): script}), files


def sent_files(target: str) -> tuple[str, Files]:
    """The target of a job or a program in the folder that has its files, and these."""
    taken = registry.sources_of(target)
    if not taken:  # it is installed
        return target, Files({})
    file = Path(next(iter(taken)))
    if not sources.complete(taken, file):
        raise UsageError(
            f"{file.parent}: holds more Python files than are sent to a host ({sources.MOST_FILES}, "
            f"{sources.MOST_BYTES // 2**20} MiB); keep the job in a folder of its own"
        )
    place, name = loader.split(target)
    root = file.parent.parent if file.name == "__init__.py" and not loader.is_file(place) else file.parent
    if loader.is_file(place):
        target = file.name + (f":{name}" if name else "")
    return target, Files({str(Path(path).relative_to(root)): content for path, content in taken.items()})
