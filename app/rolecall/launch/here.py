"""What ranks need of their machine: ports, GPUs, a temporary folder, and the start of their processes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rolecall import config, machine
from rolecall.declare import sources
from rolecall.errors import UsageError
from rolecall.launch import gpu
from rolecall.messages.hosts import Killed
from rolecall.rank import descendants
from rolecall.rank.fork_server import ForkError
from rolecall.rank.zygote import Forked, Zygote

PORTS = range(20000, 32000)  # below those that the kernel assigns by itself
REASONS = "rolecall-reasons-"  # begins the name of a locked file in TMPDIR, with why processes of a run have ended
LOCK = "lock"  # in a run's temporary folder
LEFT = ("fork-server-{}-*", "rolecall-{}-*")  # there, by the process of a rank: what a killed one leaves
NO_ANSWER = 255  # the exit code of a command that has not ended in time
LAST_OUTPUT_SECONDS = 2.0  # seconds for the rest of an ended rank's output
RANKS_A_CORE = 8  # that can start at once within the defaults of LEASE_SECONDS and CONNECT_TIMEOUT


def reserve(count: int, among: Sequence[int]) -> list[socket.socket]:
    """Sockets that are bound to free ports of 127.0.0.1. Until they are closed, no other run is given these ports, and
    a rank, or ssh for one, can listen there. Raises UsageError if there are too few.
    """
    held: list[socket.socket] = []
    for port in random.sample(among, len(among)):  # seeded by the system
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as listeners do; set before, it would share
        held.append(holder)
        if len(held) == count:
            return held
    for holder in held:
        holder.close()
    raise UsageError(f"no {count} free ports between {among[0]} and {among[-1]}")


def start_bounds(ranks: int, cores: int) -> dict[str, str]:
    """Variables that give `ranks`, which start at once on `cores`, longer than by default, as far as they are not
    set."""
    times = ranks / (RANKS_A_CORE * cores)
    names = ("lease_seconds", "connect_timeout") if times > 1 else ()
    longer = {name.upper(): f"{times * config.Settings.model_fields[name].default:g}" for name in names}
    return {**longer, **config.given(longer)}


def temporary_folder(kind: str = "local") -> tuple[Path, int]:
    """A new folder for one run, which holds its token, and the locked file that shows that the run lives."""
    folder = Path(tempfile.mkdtemp(prefix="rolecall-new-"))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder.rename(folder.with_name(folder.name.replace("new", kind, 1))), lock


def remove_leftovers() -> None:
    """Removes the folders of runs of this user that were killed, and the files of who has started them."""
    folder = Path(tempfile.gettempdir())
    folders = ((path, path / LOCK) for path in folder.glob("rolecall-local-*"))
    files = (path for prefix in (sources.PREFIX, REASONS) for path in folder.glob(f"{prefix}*"))
    for path, file in (*folders, *((path, path) for path in files)):
        with contextlib.suppress(OSError), locked(file):
            if path == file:
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Within the block, `file` is locked. Raises OSError for another user's, and for one whose run lives, or has just
    removed it."""
    lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_left(temporary: Path, rank: int) -> None:
    """Removes what the rank with that process ID has left in its TMPDIR."""
    for path in (path for name in LEFT for path in temporary.glob(name.format(rank))):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def arguments() -> list[str]:
    """A rank's arguments."""
    return ["rank", "--tied", str(os.getpid())]


def command() -> list[str]:
    """A rank's command."""
    # -P: no module of the working directory may replace one of a library
    return [sys.executable, "-P", "-m", "rolecall", *arguments()]


class LocalProcess:
    """A rank's process on this machine, which leads a session, and whose TMPDIR is `temporary`. `HostedProcess`
    (host.py) is one on a host: if that is lost, or it must start again, it has not crashed, and `lost` says why."""

    lost = ""

    def __init__(self, process: asyncio.subprocess.Process | Forked, temporary: Path | None = None) -> None:
        self._process, self._temporary = process, temporary

    @property
    def pid(self) -> int:
        """Its number on its machine."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for its exit, and removes what it has left in its TMPDIR. Returns the exit code."""
        code = await self._process.wait()
        if self._temporary:
            _remove_left(self._temporary, self.pid)
        return code

    def drain(self) -> None:
        """Asks it to leave the job."""
        if self.returncode is None:
            self._process.terminate()
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.pid, signal.SIGCONT)  # a stopped one would never take the signal

    def kill(self) -> None:
        """Kills it and all processes below it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.pid, signal.SIGSTOP)  # so that it neither replaces what is killed nor logs its end
            descendants.kill(self.pid)  # those that have left its process group too
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.pid, signal.SIGKILL)  # a new fork leads no process group yet
        with contextlib.suppress(ProcessLookupError):  # they have ended
            os.killpg(self.pid, signal.SIGKILL)

    async def kill_part(self, part: str) -> Killed:
        """Kills those that are `part`, or any if that is empty, and does not wait for their ends."""
        there = [] if self.returncode is not None else [*machine.parts(self.pid)]
        chosen = [(name, process) for name, process in there if part in ("", name)]
        for _, process in chosen:  # the supervisor first, so that it starts nothing
            with contextlib.suppress(OSError):  # a full disk hinders no kill
                if self._temporary:
                    descendants.mark(self._temporary, self.pid, process.pid).touch()
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return Killed(tuple(f"{name} {process.pid}" for name, process in chosen), tuple(name for name, _ in there))


class Here:
    """Starts ranks on this machine: forks of `zygote`, or processes of their own. Each PORT is one of `ports`. `Hosts`
    (hosts.py) are other machines."""

    host = ""
    engine = "local"

    def __init__(self, zygote: Zygote | None = None, ports: range = PORTS) -> None:
        self.zygote, self._ports = zygote, ports
        self._gpus = dict[str, list[str]]()  # by rank
        self._held = dict[str, tuple[socket.socket, socket.socket]]()  # its ports, since it listens seconds later
        self._alone = set[str]()  # ranks that the zygote has failed

    def plan(self, gpus: Mapping[str, int | None]) -> list[dict[str, str]]:
        """Variables of each new rank alone, by how many GPUs each wants: its ports, and its GPUs. Raises UsageError."""
        gpu.require(gpus)
        shares = gpu.share([*gpus.values()], [name for names in self._gpus.values() for name in names])
        # every other one: with TLS=off rank 0 takes the next port too
        pairs = [*zip(reserve(len(gpus), self._ports[::2]), reserve(len(gpus), PORTS[::2]), strict=True)]
        chosen = [[*filter(None, share.get(gpu.VISIBLE, "").split(","))] for share in shares]
        self._gpus |= zip(gpus, chosen, strict=True)
        self._held |= zip(gpus, pairs, strict=True)
        return [
            {"PORT": str(port.getsockname()[1]), "METRICS_PORT": str(scraped.getsockname()[1]), **share}
            for (port, scraped), share in zip(pairs, shares, strict=True)
        ]

    def forget(self, rank: str) -> None:
        """The rank has ended for good: others may have its ports and GPUs."""
        self._gpus.pop(rank, None)
        for holder in self._held.pop(rank, ()):
            holder.close()

    def place(self, role: str, ordinal: int) -> Here:
        """Where a new rank is started."""
        return self

    def environment(self, folder: Path, token_file: str, directory: Path) -> dict[str, str]:
        """The variables of all ranks, with the run's temporary `folder`, the file in it with its token, and the
        `directory` of its checkpoints."""
        token = {"JOB_TOKEN_FILE": token_file} if token_file else {}
        loopback = {"MASTER_ADDR": "127.0.0.1", "BIND_ADDR": "127.0.0.1"}
        bounds = start_bounds(len(self._gpus), machine.cores())
        return config.child_environment(**bounds, **loopback, **token, TMPDIR=str(folder))

    def metrics(self, environment: Mapping[str, str]) -> str:
        """The URL of a rank's metrics."""
        return f"http://127.0.0.1:{environment['METRICS_PORT']}/metrics"

    async def start(
        self, rank: str, environment: Mapping[str, str], output: int, alone: bool, stopped: asyncio.Event
    ) -> LocalProcess | None:
        """Starts the rank, which writes to the file descriptor `output`. With `alone` it shares no imports with other
        ranks. Returns None if `stopped` was set before that was possible."""
        if self.zygote and not alone and rank not in self._alone:
            try:
                forked = await asyncio.to_thread(self.zygote.fork, arguments(), environment, output, output)
                return LocalProcess(forked, Path(environment.get("TMPDIR", "/tmp")))
            except ForkError as error:
                if stopped.is_set():
                    return None
                self._alone.add(rank)
                os.write(output, f"{rank}: starts by itself, without the zygote: {error}\n".encode())
        return LocalProcess(
            await asyncio.create_subprocess_exec(
                *command(),
                env=dict(environment),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            ),
            Path(environment.get("TMPDIR", "/tmp")),
        )


async def answer(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """The exit code of a command that ends within some seconds, and what it has written. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            text, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return NO_ANSWER, f"no answer within {seconds:g} s"
    return process.returncode or 0, text.decode(errors="replace").strip()


async def writer_of(descriptor: int) -> asyncio.StreamWriter:
    """Writes to a pipe or a socket, which it closes."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()  # nothing is read
    file = os.fdopen(descriptor, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return asyncio.StreamWriter(transport, protocol, reader, loop)


async def follow(end: Awaitable[int], output: int, read: Callable[[asyncio.StreamReader], Awaitable[None]]) -> int:
    """Has `read` read what a process writes, from the file descriptor `output`, until its `end`. Returns its exit code.

    It has a pipe of its own: for one of asyncio's, `wait` would wait too.
    """
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(output, "rb", 0)
    )
    # a killed supervisor's orphans keep the pipe open for a moment; only its exit counts
    reader = asyncio.ensure_future(read(stream))
    code = await end
    done, _ = await asyncio.wait({reader}, timeout=LAST_OUTPUT_SECONDS)
    reader.cancel()
    transport.close()
    for task in done:
        task.result()
    return code
