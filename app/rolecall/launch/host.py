"""A host of `rolecall run --hosts`: its connection by ssh, which can be made anew after a cut, and the ranks there."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

from rolecall import machine
from rolecall.config import __version__
from rolecall.errors import CRASHED, UsageError
from rolecall.launch import ssh
from rolecall.launch.here import answer
from rolecall.machine import Versions
from rolecall.messages.codec import MessageError, decode_line, encode_line
from rolecall.messages.hosts import (
    MAX_LINE_BYTES,
    Alive,
    Drain,
    Ended,
    Files,
    FromHost,
    Kill,
    Killed,
    KillPart,
    Output,
    PartKilled,
    Ready,
    Start,
    Started,
    ToHost,
)
from rolecall.rank.guard import CrashBackoff
from rolecall.record import rundir

READY_SECONDS = 60.0  # from the connection to the first message
ALIVE_SECONDS = 3.0  # between two messages that only say that this side lives
KILL_SECONDS = 5.0  # for a host to answer that it has killed a part of a rank
CLOSE_SECONDS = 10.0  # for a host to end its ranks and to clean up
MAX_ERROR_LINES = 50  # of ssh's, before the first message


class HostedProcess:
    """A rank's process on a host, with the methods of `LocalProcess`. What it writes goes to `output`."""

    def __init__(self, rank: str, connection: Connection, output: asyncio.StreamWriter) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.lost = ""
        self.output = output
        self._rank, self._connection, self._ended = rank, connection, asyncio.Event()
        # by part, in order: the host answers each request
        self._killing = defaultdict[str, deque[asyncio.Future[Killed]]](deque)

    async def wait(self) -> int:
        """See `LocalProcess`."""
        await self._ended.wait()
        return CRASHED if self.returncode is None else self.returncode

    def drain(self) -> None:
        """See `LocalProcess`."""
        if self.returncode is None:
            self._connection.send(Drain(self._rank))

    def kill(self) -> None:
        """See `LocalProcess`."""
        if self.returncode is None:
            self._connection.send(Kill(self._rank))

    async def kill_part(self, part: str) -> Killed:
        """See `LocalProcess`. Raises UsageError if the host does not answer."""
        answer: asyncio.Future[Killed] = asyncio.get_running_loop().create_future()
        self._killing[part].append(answer)
        self._connection.send(KillPart(self._rank, part))
        try:
            async with asyncio.timeout(KILL_SECONDS):
                return await answer
        except TimeoutError:
            problem = f"{self._connection.host}: does not answer within {KILL_SECONDS:g} s; is it cut off?"
            raise UsageError(problem) from None

    def answer_kill(self, part: str, killed: Killed) -> None:
        """The host has `killed` processes, as `kill_part` has asked."""
        if self._killing[part] and not (answer := self._killing[part].popleft()).done():  # its asker still waits
            answer.set_result(killed)

    def restart(self, why: str) -> None:
        """Kills it, which is no crash: it starts again."""
        self.lost = why
        self.kill()

    def end(self, code: int, lost: str = "") -> None:
        """It has ended, or was lost with its host: `lost` says so."""
        self.returncode, self.lost = code, lost or self.lost
        self.output.close()
        self._ended.set()


class Connection:
    """One connection to a host, made by `open`. `show` displays a line that the host writes."""

    def __init__(self, host: str, python: str, socket: Path, show: Callable[[str], None]) -> None:
        self.host, self.socket = host, socket
        self._python, self._show = python, show
        self._lost = f"lost with {host}, starts again when that is back, or on another host"
        self._processes = dict[str, HostedProcess]()  # by rank
        self._errors: list[str] | None = []  # until the first message
        self._tasks = list[asyncio.Task[None]]()
        self.began = time.monotonic()
        self.over = asyncio.Event()

    async def open(self, job: str) -> Ready:
        """Connects; the host makes the imports of the built-in `job`, if it is one. Raises UsageError, and leaves
        nothing behind then."""
        self.socket.unlink(missing_ok=True)  # of a client that was killed
        program = [self._python, "-P", "-m", "rolecall.launch.hosted", *filter(None, [job])]
        command = ssh.connect(self.host, self.socket, program)
        try:
            self._ssh = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # Ctrl-C of a terminal ends the ranks first
            )
        except OSError as error:
            raise UsageError(f"ssh: cannot be run ({error.strerror}); install OpenSSH's client") from error
        self._stdin: asyncio.StreamWriter = self._ssh.stdin  # type: ignore[assignment]
        self._stdout: asyncio.StreamReader = self._ssh.stdout  # type: ignore[assignment]
        self._stderr: asyncio.StreamReader = self._ssh.stderr  # type: ignore[assignment]
        errors = asyncio.create_task(self._read_errors())
        self._tasks.append(errors)
        try:
            async with asyncio.timeout(READY_SECONDS):
                ready = await self._first()
                if ready is None:
                    code = await self._ssh.wait()
                    await asyncio.wait({errors}, timeout=1.0)
                    raise UsageError(ssh.problem(self.host, self._python, code, self._errors or []))
            if ready.version != __version__:
                raise UsageError(
                    f"{self.host}: {self._python} has Rolecall {ready.version}, and this is {__version__}; "
                    "install the same version on both"
                )
        except TimeoutError:
            await self.close()
            raise UsageError(f"{self.host}: nothing starts there within {READY_SECONDS:g} s; try it by ssh") from None
        except BaseException:
            await self.close()
            raise
        self._errors = None
        self._tasks += [asyncio.create_task(self._read()), asyncio.create_task(self._send_alive())]
        return ready

    async def _first(self) -> Ready | None:
        """The first message, after what a login shell has written; None if there is none."""
        while line := await self._stdout.readline():
            with contextlib.suppress(MessageError):
                ready: Ready = decode_line(Ready, line)
                return ready
        return None

    def send(self, message: ToHost) -> None:
        """Sends a message, unless the connection has ended."""
        if not self.over.is_set() and not self._stdin.is_closing():
            self._stdin.write(encode_line(message))

    def add(self, start: Start, output: asyncio.StreamWriter) -> HostedProcess:
        """Starts a rank."""
        process = self._processes[start.rank] = HostedProcess(start.rank, self, output)
        if self.over.is_set():
            process.end(CRASHED, self._lost)
        self.send(start)
        return process

    async def close(self) -> None:
        """Ends the connection, and with it all ranks on the host."""
        self._stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._ssh.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._ssh.kill()
            await self._ssh.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while line := await self._stdout.readline():
                message: FromHost = decode_line(FromHost, line, MAX_LINE_BYTES)
                match message:
                    case Started(rank, pid):
                        self._processes[rank].pid = pid
                    case Output(rank, data):
                        output = self._processes[rank].output
                        with contextlib.suppress(OSError):  # nobody reads it any more
                            output.write(data)
                            await output.drain()
                    case PartKilled(rank, part, killed):
                        self._processes[rank].answer_kill(part, killed)
                    case Ended(rank, code):
                        self._processes[rank].end(code)
        except (ValueError, KeyError) as error:
            self._show(f"{self.host}: sent what is no message ({type(error).__name__}); its connection is ended")
        finally:
            self.over.set()
            for process in self._processes.values():
                if process.returncode is None:
                    process.end(CRASHED, self._lost)
            self._stdin.close()

    async def _read_errors(self) -> None:
        while line := await self._stderr.readline():
            text = line.decode(errors="replace").rstrip()
            if self._errors is None:
                self._show(f"{self.host}: {text}")
            elif len(self._errors) < MAX_ERROR_LINES:
                self._errors.append(text)

    async def _send_alive(self) -> None:
        while not self.over.is_set():
            self.send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)


class Host:
    """The host `host`. `socket` is of ssh's connection, `job` the run's if it is a built-in one, and `show` displays a
    line."""

    def __init__(self, host: str, python: str, socket: Path, job: str, show: Callable[[str], None]) -> None:
        self.host = host
        self._python, self._socket, self._job, self._show = python, socket, job, show
        self._files: Files | None = None
        self._forwarded: tuple[int, int] | None = None
        self._connection: Connection | None = None
        self.up = asyncio.Event()  # connected, unless it has just been cut off

    @property
    def connection(self) -> Connection | None:
        """The connection, if there is one now."""
        return self._connection if self._connection and not self._connection.over.is_set() else None

    async def connect(self) -> None:
        """Connects. Raises UsageError."""
        connection = Connection(self.host, self._python, self._socket, self._show)
        self.ready = await connection.open(self._job)
        self._connection = connection
        self._compare(Versions(self.ready.torch, self.ready.python), machine.versions())
        if self._files:
            connection.send(self._files)
        if self._forwarded:
            await self._forward(*self._forwarded)
        self.up.set()

    def _compare(self, there: Versions, here: Versions) -> None:
        """Displays a line if the versions of torch and Python are too different."""
        if [*map(machine.minor, there)] != [*map(machine.minor, here)]:
            self._show(
                f"rolecall: warning: {self.host}: {self._python} is {_spelled(there)}, and this is {_spelled(here)}; "
                "ranks may not understand each other: install the same versions, or name another Python with --python"
            )

    def send_files(self, files: Files) -> None:
        """Has the host hold the job's files."""
        self._files = files
        if self._connection:
            self._connection.send(files)

    async def forward(self, local: int, remote: int) -> None:
        """Has a port of this machine's loopback reach one of the host's."""
        self._forwarded = (local, remote)
        if self._connection:
            await self._forward(local, remote)

    def stop_forwarding(self) -> None:
        """Does not forward a port any more once it is back."""
        self._forwarded = None

    async def _forward(self, local: int, remote: int) -> None:
        code, text = await answer(ssh.forward(self.host, self._socket, local, remote), ssh.COMMAND_SECONDS)
        if code:
            self._show(f"{self.host}: rank 0's page and commands for this run do not reach it ({text})")

    async def take_over(self, directory: Path, run: str) -> bool:
        """Whether `directory` there is the one that rank 0 of `run` has used on another host, which is away. If it is,
        nothing holds its locks any more."""
        generation, *locks = (str(directory / name) for name in (rundir.GENERATION, *rundir.LOCKS))
        words = ["sh", "-c", f"grep -qF {run} {shlex.quote(generation)} && rm -f {shlex.join(locks)}"]
        code, _ = await answer(ssh.run(self.host, self._socket, words), ssh.COMMAND_SECONDS)
        return code == 0

    async def cut(self) -> None:
        """Waits until the connection has ended."""
        if self._connection:
            await self._connection.over.wait()
        self.up.clear()

    async def reconnect(self) -> None:
        """Connects again, as often as it takes."""
        crashes, said = CrashBackoff(), ""
        if self._connection:
            await self._connection.close()
            await asyncio.sleep(crashes.add(time.monotonic() - self._connection.began))
        while True:
            started = time.monotonic()
            try:
                await self.connect()
                return
            except UsageError as error:
                if str(error) != said:
                    said = str(error)
                    self._show(f"rolecall: {said}; trying again")
            await asyncio.sleep(crashes.add(time.monotonic() - started))

    async def close(self) -> None:
        """Ends what runs on the host, and the connection."""
        if self._connection:
            await self._connection.close()


def _spelled(versions: Versions) -> str:
    return f"Python {versions.python} with torch {versions.torch or 'missing'}"
