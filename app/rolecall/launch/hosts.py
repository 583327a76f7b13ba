"""`rolecall run JOB --hosts a,b,c`: which rank runs on which host, and what all of them are given."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
import time
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
from rolecall.launch.here import writer_of
from rolecall.launch.host import Connection, Host, HostedProcess
from rolecall.launch.room import Room, Seat
from rolecall.messages.hosts import Files, Start
from rolecall.secret import read_token

SCRIPT = "script"  # the job whose setting of that name is a user's file
LOOPBACK = ("localhost", "127.", "::1")
COPIES = 1  # the default of CHECKPOINT_COPIES
LOOK_SECONDS = 5.0  # between two looks whether another host has room


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
        self._places = dict[str, Place]()  # by rank
        self._shared = dict[str, str]()  # variables of all ranks, since rank 0 is on another host
        self._run = secrets.token_hex(8)
        self._keeping = list[asyncio.Task[None]]()
        self._moved: Callable[[], None] = lambda: None
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

    def show_by(self, show: Callable[[str], None], moved: Callable[[], None]) -> None:
        """From now on, `show` displays lines, and `moved` is called once rank 0 is on another host."""
        self._show, self._moved = show, moved

    async def connect(self) -> None:
        """Connects to all hosts. Raises UsageError, with a line for each that cannot be used."""
        connecting = [asyncio.create_task(host.connect()) for host in self._hosts.values()]
        ready = await asyncio.gather(*connecting, return_exceptions=True)
        problems = [str(problem) for problem in ready if isinstance(problem, UsageError)]
        if problems:
            raise UsageError("\nrolecall: ".join(problems))
        for one in ready:
            if one is not None:
                raise one

    async def prepare(self, job: Description, settings: Settings) -> None:
        """Makes the hosts ready for `job`: from now on `job` is it as they see it. Raises UsageError."""
        if unknown := set(self._placement.roles) - {role.name for role in job.roles}:
            raise UsageError(f"--role {min(unknown)}=...: {job.name} has the roles {', '.join(job.needs)}")
        self.job, files = sent(job)
        for host in self._hosts.values():
            host.send_files(files)
        self._job_settings = settings
        self.room = Room(settings.host_timeout)
        for host in self._hosts.values():
            self.room.gpus[host.host] = host.ready.gpus
            self._keeping.append(asyncio.create_task(self._keep(host)))
        self._leader = name_of((job.roles[0].name, 0))
        rank0 = self._hosts[self._host_of(job.roles[0].name, 0)]
        self._rank0 = rank0.host
        self._address = config.exported("MASTER_ADDR") or await self._address_of(rank0.host)
        (self._page,) = here.reserve(1, here.PORTS)
        await rank0.forward(self._page.getsockname()[1], rank0.ready.metrics_port)

    async def _keep(self, host: Host) -> None:
        """Connects to `host` again after each cut."""
        while True:
            await host.cut()
            self.room.lost(host.host, time.monotonic())
            await host.reconnect()
            self.room.gpus[host.host] = host.ready.gpus
            self.room.back(host.host, time.monotonic())

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
        ports = _ports(self._hosts[self._rank0])
        return [ports if rank == self._leader else {} for rank in gpus]

    def forget(self, rank: str) -> None:
        """See `Here`: its host notices it."""
        del self._places[rank]

    def place(self, role: str, ordinal: int) -> Place:
        """See `Here`: ranks are dealt out in order, unless their role has hosts of its own."""
        name, host = name_of((role, ordinal)), self._hosts[self._host_of(role, ordinal)]
        self._dealt += role not in self._placement.roles
        self._places[name] = Place(self, name, role, host, dict(self._shared))
        return self._places[name]

    def environment(self, folder: Path, token_file: str, directory: Path) -> dict[str, str]:
        """See `Here`: the settings that are set here; all else is as on the hosts."""
        token = read_token(Path(token_file)) if token_file else self._job_settings.token
        self._directory = directory
        return {
            "CHECKPOINT_COPIES": str(COPIES),
            **given(self.job),
            config.RUN: self._run,
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

    # ---- a host that stays away

    async def move(self, place: Place) -> bool:
        """Has the rank of `place` go to another host, if one has room; else displays why not. Returns whether it
        goes."""
        away = f"{place.host}, away for HOST_TIMEOUT={self.room.timeout:g} s"
        others, problem = self._others(place)
        for host in others:
            problem = await self._lead(self._hosts[host]) if place.rank == self._leader else ""
            if place.at.connection:
                return False
            if problem or host not in self._others(place)[0]:
                continue
            restarts = "; the other ranks start again with it" if place.rank == self._leader else ""
            self.show(f"{place.rank}: moves from {away}, to {host}{restarts}")
            place.at = self._hosts[host]
            if place.rank == self._leader:
                await self._follow(place)
            return True
        if problem != place.problem:
            place.problem = problem
            self.show(f"{place.rank}: waits for {away}: {problem}")
        return False

    def _others(self, place: Place) -> tuple[list[str], str]:
        needs = self.job.needs
        seats = {each.rank: Seat(each.host, needs[each.role].gpus or 0) for each in self._places.values()}
        among = self._placement.roles.get(place.role, self._placement.hosts)
        return self.room.others(seats[place.rank], seats.values(), among)

    async def _lead(self, host: Host) -> str:
        """Why rank 0 cannot be on `host`; empty if it can."""
        if config.exported("MASTER_ADDR"):
            return "MASTER_ADDR names it for the other ranks"
        try:
            self._address = await self._address_of(host.host)
        except UsageError as error:
            return str(error)
        settings = self._job_settings
        copies = settings.checkpoint_copies if "checkpoint_copies" in settings.model_fields_set else COPIES
        if await host.take_over(self._directory, self._run) or copies:
            return ""
        return (
            f"its checkpoints are not in {host.host}:{self._directory}, and CHECKPOINT_COPIES=0; set CHECKPOINT_DIR to "
            "one that hosts share"
        )

    async def _follow(self, place: Place) -> None:
        """Has all ranks, and this machine, reach rank 0 at its new host."""
        self._hosts[self._rank0].stop_forwarding()
        self._rank0, ports = place.host, _ports(place.at)
        self._shared = {"MASTER_ADDR": self._address, "MASTER_PORT": ports["PORT"]}
        for each in self._places.values():
            each.variables |= self._shared
            if each is not place and each.process:
                each.process.restart("starts again with rank 0")
        place.variables |= {**ports, "RESUME": "1"}  # it goes on with this run in any case
        self._moved()
        if self._page:
            await place.at.forward(self._page.getsockname()[1], place.at.ready.metrics_port)

    async def close(self) -> None:
        """Ends what runs on the hosts, and the connections. Can be called again."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in self._hosts.values()))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._page is not None:
            self._page.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


class Place:
    """Where a rank of `hosts` runs: on a host, or on another one once that stays away. `variables` are the rank's, in
    place of those that it began with."""

    def __init__(self, hosts: Hosts, rank: str, role: str, at: Host, variables: dict[str, str]) -> None:
        self._hosts, self.rank, self.role, self.at, self.variables = hosts, rank, role, at, variables
        self.process: HostedProcess | None = None
        self.problem = ""  # why it waits for its host

    @property
    def host(self) -> str:
        """The host."""
        return self.at.host

    async def start(
        self, rank: str, environment: Mapping[str, str], output: int, alone: bool, stopped: asyncio.Event
    ) -> HostedProcess | None:
        """See `Here`."""
        writer = await writer_of(os.dup(output))
        if connection := await self._connected(stopped):
            self.process = connection.add(Start(rank, {**environment, **self.variables}, alone), writer)
            return self.process
        writer.close()
        return None

    async def _connected(self, stopped: asyncio.Event) -> Connection | None:
        """The connection to its host, as soon as there is one; None if `stopped` was set before."""
        stopping = asyncio.create_task(stopped.wait())
        try:
            while not (connection := self.at.connection):
                left = self._hosts.room.left(self.host, time.monotonic())
                if not left and await self._hosts.move(self):
                    continue
                up = asyncio.create_task(self.at.up.wait())
                await asyncio.wait({up, stopping}, timeout=left or LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                up.cancel()
                if stopped.is_set():
                    return None
            self.problem = ""
            return connection
        finally:
            stopping.cancel()


def _ports(host: Host) -> dict[str, str]:
    """Those that `host` has for rank 0."""
    return {"PORT": str(host.ready.port), "METRICS_PORT": str(host.ready.metrics_port)}


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
