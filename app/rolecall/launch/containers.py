"""`rolecall run JOB --on docker`: a container for each rank, and what all of them are given.

What is secret is in files that only the containers' user can read: `docker inspect` shows every variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall import config
from rolecall.config import Settings, __version__
from rolecall.declare.describe import Description
from rolecall.errors import UsageError
from rolecall.launch import gpu, here, hosts
from rolecall.launch.here import Here
from rolecall.messages.hosts import Killed
from rolecall.record import rundir
from rolecall.secret import read_token

KIND = "docker"  # in the names of temporary folders
LABEL = "rolecall.run"  # of a run's containers and network: the name of its temporary folder
TITLE, VERSION = "org.opencontainers.image.title", "org.opencontainers.image.version"  # labels of the image
RANK0 = "rank0"  # its name on the network
JOB, SECRETS = "/job", "/run/secrets"  # folders in a container
USER = 10001  # of the image: a run of root's is not root in its containers
COMMAND_SECONDS = 60.0  # for the engine to answer
REMOVE_SECONDS = 30.0  # for containers and the network to go
POLL_SECONDS = 0.2
PART = "container"  # what can be killed of a rank
ID = re.compile(r"^[0-9a-f]{12,64}$", re.MULTILINE)
# as in compose.yaml
CONFINED = (
    "--no-healthcheck",
    "--read-only",
    "--tmpfs=/tmp:rw,noexec,nosuid,nodev,size=256m,mode=1777",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges:true",
    "--add-host=loopback:::ffff:127.0.0.1",  # torch looks up this address's name, slowly without DNS
)
RUN = ("docker", "run", "--rm", "--interactive", "--pull=never", "--sig-proxy=false", "--log-driver=none")
RANK = ("--", "python", "-P", "-m", "rolecall", "rank", "--tied-to-input")  # for tini


def image_named(name: str) -> str:
    """The image that --image or IMAGE names, with TORCH as its tag if it has none: rolecall:cpu, which `make image`
    builds, by default. Raises UsageError."""
    name = name or config.exported("IMAGE") or "rolecall"
    if not re.match(r"\w", name) or not name.isprintable() or " " in name:
        raise UsageError(f"--image {name!r}: is no name of an image, such as rolecall:cpu")
    tagged = re.search(r"[:@]", name.rpartition("/")[2])
    return name if tagged else f"{name}:{config.exported('TORCH') or 'cpu'}"


async def docker(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it has written. Raises OSError if there is no such program."""
    return await here.answer(["docker", *words], COMMAND_SECONDS)


class ContainerProcess:
    """A rank's container, with the methods of `LocalProcess`. `client` is `docker run`, which ends with it."""

    lost = ""
    pid = 1  # in the container

    def __init__(self, name: str, client: asyncio.subprocess.Process) -> None:
        self._name, self._client = name, client
        self._tasks = set[asyncio.Task[None]]()

    @property
    def returncode(self) -> int | None:
        """See `LocalProcess`."""
        code = self._client.returncode
        return 128 - code if code and code - 128 in {*signal.Signals} else code

    async def wait(self) -> int:
        """See `LocalProcess`."""
        await self._client.wait()
        return self.returncode or 0

    def drain(self) -> None:
        """See `LocalProcess`."""
        self._signal("TERM")

    def kill(self) -> None:
        """See `LocalProcess`."""
        self._signal("KILL")

    def _signal(self, name: str) -> None:
        async def send() -> None:
            while self.returncode is None:
                code, _ = await docker("kill", f"--signal={name}", self._name)
                if not code:
                    return
                await asyncio.sleep(POLL_SECONDS)  # the engine still makes it, or has just removed it

        task = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def kill_part(self, part: str) -> Killed:
        """See `LocalProcess`: all of the container. Raises UsageError if the engine does not kill it."""
        there = (PART,) if self.returncode is None else ()
        if not there or part not in ("", PART):
            return Killed((), there)
        code, text = await docker("kill", self._name)
        if code:
            raise UsageError(f"{self._name}: is not killed ({text})")
        return Killed(("its container",), there)

    async def close(self) -> None:
        """Ends the client, whatever the container does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._client.kill()
            await self._client.wait()


class Container:
    """Starts the container of a rank, called `host`, as `Here` starts a process, with `options` of `docker run`."""

    def __init__(self, host: str, options: Sequence[str], image: str) -> None:
        self.host = host
        self._options, self._image = options, image
        self.process: ContainerProcess | None = None

    async def start(
        self, rank: str, environment: Mapping[str, str], output: int, alone: bool, stopped: asyncio.Event
    ) -> ContainerProcess:
        """See `Here`."""
        directory = _absolute(environment["CHECKPOINT_DIR"])  # has the same name there
        variables = {**environment, "CHECKPOINT_DIR": directory}
        gpus = variables.pop(gpu.VISIBLE, "" if self._image.endswith(":cpu") else ",".join(gpu.visible()))
        command = [*RUN, *self._options, f"--name={self.host}", _mount(directory, directory)]
        if _is_rank0(environment):
            port = environment["METRICS_PORT"]
            command += [f"--network-alias={RANK0}", f"--publish=127.0.0.1:{port}:{port}"]
        if gpus:
            command.append(f'--gpus="device={gpus}"')
        command += [f"--env={name}" for name in variables]  # values would be seen by every user
        command += ["--env=HOME=/tmp", "--env=USER=rolecall"]  # libraries ask who that is
        client = await asyncio.create_subprocess_exec(
            *command,
            self._image,
            *RANK,
            env=config.child_environment(**variables),
            start_new_session=True,  # Ctrl-C of a terminal drains the ranks
            stdin=asyncio.subprocess.PIPE,  # ends with this process, and then the rank does
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
        self.process = ContainerProcess(self.host, client)
        return self.process


class Containers:
    """The containers of one run, from `image`, with the methods of `Hosts`."""

    engine, host = "docker", ""  # the run's files are here

    def __init__(self, image: str) -> None:
        self._image = image
        self._folder, self._lock = here.temporary_folder(KIND)  # with the job's files, and secrets
        self._show: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
        self._here = Here()
        self._name = ""  # of the network; begins those of the containers
        self._containers = list[Container]()
        self._given: tuple[Path, int, int] | None = None  # what root has given to USER, its owner and group

    def show_by(self, show: Callable[[str], None], moved: Callable[[], None]) -> None:
        """From now on, `show` displays lines. No rank moves."""
        self._show = show

    async def connect(self) -> None:
        """Asks the engine for the image, and removes what runs that were killed have left. Raises UsageError."""
        try:
            code, text = await docker("image", "inspect", "--format={{json .Config.Labels}}", self._image)
        except OSError as error:
            raise UsageError(f"docker: cannot be run ({error.strerror}); install Docker") from error
        if code:
            raise UsageError(_problem(self._image, text))
        labels: dict[str, Any] = json.loads(text.splitlines()[-1]) or {}
        version = labels.get(VERSION)
        if labels.get(TITLE) == "rolecall" and version and version != __version__:
            raise UsageError(
                f"{self._image}: has Rolecall {version}, and this is {__version__}; build it anew, or name another "
                "with --image"
            )
        for folder in _folders():
            with contextlib.suppress(OSError), here.locked(folder / here.LOCK):
                if problem := await _remove(folder.name):
                    self._show(f"rolecall: warning: containers of a run that was killed are not removed ({problem})")
                else:
                    shutil.rmtree(folder, ignore_errors=True)

    async def prepare(self, job: Description, settings: Settings) -> None:
        """Makes all that containers of `job` share: from now on `job` is it as they see it. Raises UsageError."""
        self.job, files = hosts.sent(job)
        self._job_settings = settings
        user, group = (os.getuid(), os.getgid()) if os.getuid() else (USER, USER)
        (self._folder / "secrets").mkdir()
        job_options = []
        if files.files:
            (self._folder / "job").mkdir()
            for name, content in files.files.items():
                path = self._folder / "job" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            job_options = [_mount(str(self._folder / "job"), JOB, "readonly"), f"--workdir={JOB}"]
        key = self._folder.name.rpartition(f"-{KIND}-")[2]
        self._name = re.sub(r"[^\w.-]", "-", f"rolecall-{job.name}-{key}", flags=re.ASCII)
        # its ports can be published, and it has no route to the internet
        network = ["--opt=com.docker.network.bridge.enable_ip_masquerade=false", f"--label={LABEL}={self._folder.name}"]
        code, text = await docker("network", "create", *network, self._name)
        if code:
            raise UsageError(f"docker: makes no network for the run ({text})")
        self._options = [
            *CONFINED,
            f"--user={user}:{group}",
            f"--label={LABEL}={self._folder.name}",
            f"--network={self._name}",
            "--entrypoint=/usr/bin/tini",
            *job_options,
            _mount(str(self._folder / "secrets"), SECRETS, "readonly"),
        ]

    def plan(self, gpus: Mapping[str, int | None]) -> list[dict[str, str]]:
        """See `Here`: a container listens on the ports that are free here."""
        return self._here.plan(gpus)

    def forget(self, rank: str) -> None:
        """See `Here`."""
        self._here.forget(rank)

    def place(self, role: str, ordinal: int) -> Container:
        """See `Here`."""
        name = f"{self._name}-{role}-{ordinal}"
        host = name[-63:].strip("-_.").replace("_", "-")  # the same after a crash, which resumes even with RESUME=0
        needs = self.job.needs[role]
        limits = [f"--cpus={needs.cpus:g}"] if needs.cpus else []
        limits += [f"--memory={needs.memory_mb * 10**6}"] if needs.memory_mb else []
        self._containers.append(Container(name, [*self._options, *limits, f"--hostname={host}"], self._image))
        return self._containers[-1]

    def environment(self, folder: Path, token_file: str, directory: Path) -> dict[str, str]:
        """See `Here`: the settings that are set here; secrets are in files."""
        given = hosts.given(self.job)
        secrets = {name: given.pop(name.upper()) for name in self.job.secrets if name.upper() in given}
        if token := read_token(Path(token_file)) if token_file else self._job_settings.token:
            secrets["job_token"] = token
        for name, value in secrets.items():
            file = self._folder / "secrets" / name
            file.touch(0o600)
            file.write_text(value)
        if os.getuid() == 0:
            self._give(directory.resolve())
        return {**given, config.SECRETS: SECRETS, "MASTER_ADDR": RANK0, "METRICS_BIND_ADDR": "0.0.0.0"}

    def _give(self, directory: Path) -> None:
        """Has USER own what it needs. Raises UsageError for a directory that is not the run's alone."""
        there = {path.name for path in directory.iterdir()} - {"logs", rundir.OUTPUT}
        if there and rundir.GENERATION not in there:
            raise UsageError(
                f"CHECKPOINT_DIR={directory}: has files of no run; containers of root's run as user {USER}, who is "
                "given the directory: name a new one"
            )
        now = directory.stat()  # given away by a run that was killed, perhaps
        self._given = (directory, 0, 0) if now.st_uid == USER else (directory, now.st_uid, now.st_gid)
        for folder in (directory, self._folder / "job", self._folder / "secrets"):
            _chown(folder, USER, USER)

    def metrics(self, environment: Mapping[str, str]) -> str:
        """See `Here`: only rank 0's are published on this machine."""
        return self._here.metrics(environment) if _is_rank0(environment) else ""

    def results(self, directory: Path) -> str:
        """Nothing: they are here."""
        return ""

    async def close(self) -> None:
        """Removes containers, network and files. Can be called again."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        await asyncio.gather(*(one.process.close() for one in self._containers if one.process))
        if self._name and (problem := await _remove(self._folder.name)):
            self._show(f"rolecall: warning: the run's containers are not removed ({problem})")
        if self._given:
            _chown(*self._given)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(lock)


def _folders() -> list[Path]:
    """Those of all runs."""
    return [*Path(tempfile.gettempdir()).glob(f"rolecall-{KIND}-*")]


async def _remove(run: str) -> str:
    """Removes the containers and the network of a run. Returns the problem, if any. Raises OSError."""
    end = time.monotonic() + REMOVE_SECONDS
    while True:
        problem = ""
        for kind, all_of_them, force in (("container", ["--all"], ["--force"]), ("network", [], [])):
            code, text = await docker(kind, "ls", *all_of_them, "--quiet", f"--filter=label={LABEL}={run}")
            if not code and (there := ID.findall(text)):
                code, text = await docker(kind, "rm", *force, *there)
            problem = problem or (" ".join(text.split()) if code else "")
        if not problem or time.monotonic() > end:
            return problem
        await asyncio.sleep(POLL_SECONDS)  # one may be under way by itself


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _is_rank0(environment: Mapping[str, str]) -> bool:
    """Whether that is rank 0's: no two ranks have the same port."""
    return environment["PORT"] == environment["MASTER_PORT"]


def _problem(image: str, text: str) -> str:
    """What is wrong, and what to do, if the engine does not describe `image`."""
    said = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
    said = said.partition(': Get "')[0]  # the request
    if "permission denied" in text.lower():
        return f"docker: this user may not use the engine ({said}); join the group docker, and log in again"
    if "no such image" in text.lower():
        return (
            f"{image}: there is no such image here; `make image` in Rolecall's repository builds rolecall:cpu, and "
            "--image names another one, which `docker pull` or `docker build` has made"
        )
    return f"docker: the engine does not answer ({said}); start it, as by `systemctl start docker`"


def _mount(source: str, target: str, *options: str) -> str:
    """The option that mounts a folder of this machine: fields of CSV."""
    fields = ("type=bind", f"source={source}", f"target={target}", *options)
    return "--mount=" + ",".join('"' + field.replace('"', '""') + '"' for field in fields)


def _chown(folder: Path, user: int, group: int) -> None:
    """Changes the owner of `folder`, if there is one, and of all that is in it; follows no link."""
    with contextlib.suppress(FileNotFoundError):  # there is none
        for _, folders, files, descriptor in os.fwalk(folder):
            os.fchown(descriptor, user, group)
            for name in (*folders, *files):
                os.chown(name, user, group, dir_fd=descriptor, follow_symlinks=False)
