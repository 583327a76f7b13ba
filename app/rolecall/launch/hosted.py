"""What `rolecall run --hosts` starts on each host, by ssh: runs ranks there, as messages on standard input say.

Its argument is the job, if that is a built-in one: its modules are imported at once. It ends all ranks, and leaves
nothing behind, if the connection ends or brings nothing for SILENCE_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rolecall import config, machine, secret
from rolecall.declare import describe
from rolecall.errors import CRASHED, USAGE, UsageError
from rolecall.launch import gpu, here
from rolecall.launch.here import Here, LocalProcess
from rolecall.messages.codec import MessageError, decode_line, encode_line
from rolecall.messages.hosts import (
    MAX_LINE_BYTES,
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
from rolecall.rank import descendants
from rolecall.rank.zygote import Zygote

SILENCE_SECONDS = 12.0  # less than ssh takes to notice a cut, so that a rank does not start while its last one runs
PORTS = range(29400, 32000)  # PORT of the ranks on a host, which other hosts must reach
CHUNK_BYTES = 2**16
RANK0 = "rank 0"  # has ports that others must know before it starts
JOB = "job"  # in the temporary folder: the job's files, and the ranks' working directory


class Hosted:
    """The ranks on this host, forked from `zygote`. `home` is where relative checkpoint directories lie, `folder` the
    temporary folder."""

    def __init__(self, home: Path, folder: Path, zygote: Zygote) -> None:
        self._home, self._folder, self._zygote = home, folder, zygote
        self._here = Here(zygote, PORTS)
        self._processes = dict[str, LocalProcess]()  # by rank
        self._killed = dict[str, asyncio.Event]()  # of ranks that are starting
        self._tasks = set[asyncio.Task[None]]()
        self._over = False

    async def serve(self, requests: int, answers: int) -> None:
        """Carries out the messages that come from the file descriptor `requests`, until it ends or is silent."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(requests, "rb", 0))
        self._answers = await here.writer_of(answers)
        reading = asyncio.create_task(self._read(stream))
        try:
            await asyncio.wait({reading, asyncio.create_task(over.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            self._over = True
            self._zygote.end()  # a rank may wait for its imports
            await asyncio.to_thread(descendants.kill, os.getpid())

    async def _read(self, stream: asyncio.StreamReader) -> None:
        (ports,) = self._here.plan({RANK0: 0})
        self._answers.write(b"\n")  # after what a login shell has written
        port, metrics_port = int(ports["PORT"]), int(ports["METRICS_PORT"])
        await self._send(
            Ready(config.__version__, port, metrics_port, **machine.versions()._asdict(), gpus=len(gpu.visible()))
        )
        while line := await self._next(stream):
            try:
                message: ToHost = decode_line(ToHost, line, MAX_LINE_BYTES)
            except MessageError as error:  # of another version, which `Ready` tells
                raise UsageError(
                    f"`rolecall run` has sent what {config.__version__} does not know; install the same version on both"
                ) from error
            match message:
                case Files(files):
                    for name, content in files.items():
                        path = self._folder / JOB / name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content)
                case Start() as start:
                    self._killed[start.rank] = asyncio.Event()
                    self._begin(self._run(start, self._killed[start.rank]))
                case Drain(rank):
                    if process := self._processes.get(rank):
                        process.drain()
                case Kill(rank):
                    self._killed[rank].set()
                    if process := self._processes.get(rank):
                        process.kill()
                case KillPart(rank, part):
                    self._begin(self._kill_part(rank, part))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill_part(self, rank: str, part: str) -> None:
        process = self._processes.get(rank)
        killed = await process.kill_part(part) if process else Killed((), ())
        await self._send(PartKilled(rank, part, killed))

    @staticmethod
    async def _next(stream: asyncio.StreamReader) -> bytes:
        """The next line; empty if the connection has ended, or is silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_SECONDS):
                return await stream.readline()
        return b""

    async def _run(self, start: Start, killed: asyncio.Event) -> None:
        """Starts a rank, sends what it writes, and how it ends."""
        (read, write), problem = os.pipe(), CRASHED
        try:
            environment = self._environment(start)
            process = await self._here.start(start.rank, environment, write, start.alone, killed)
        except (UsageError, OSError) as error:
            os.write(write, f"rolecall: {start.rank}: cannot start: {error}\n".encode())
            process, problem = None, USAGE if isinstance(error, UsageError) else CRASHED
        finally:
            os.close(write)
        if process is None:
            os.close(read)
            await self._send(Ended(start.rank, problem))
            return
        self._processes[start.rank] = process
        if killed.is_set():
            process.kill()
        await self._send(Started(start.rank, process.pid))

        async def send(stream: asyncio.StreamReader) -> None:
            while data := await stream.read(CHUNK_BYTES):
                await self._send(Output(start.rank, data))

        code = await here.follow(process.wait(), read, send)
        del self._processes[start.rank]
        self._here.forget(start.rank)
        await self._send(Ended(start.rank, code))

    def _environment(self, start: Start) -> dict[str, str]:
        given = dict(start.environment)
        job = describe.ADAPTER.validate_json(given[config.DESCRIPTION])
        self._here.forget(start.rank)
        (planned,) = self._here.plan({start.rank: job.needs[given["ROLE"]].gpus})
        given["CHECKPOINT_DIR"] = str(self._home / given["CHECKPOINT_DIR"])
        return config.child_environment(**{**planned, **given})  # rank 0's ports are given

    async def _send(self, message: FromHost) -> None:
        if self._over:  # what is killed now has not crashed: it is lost with the host
            return
        with contextlib.suppress(OSError):  # the connection has ended, which `serve` notices
            self._answers.write(encode_line(message))
            await self._answers.drain()


def main(jobs: Sequence[str] = ()) -> int:
    """Serves one connection, for ranks of `jobs`. Returns the exit code."""
    secret.forbid_core_dumps()
    machine.name_part("hosted")
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # nothing that a process here prints is a message
    home = Path.cwd()
    here.remove_leftovers()
    folder, lock = here.temporary_folder()
    try:
        (folder / JOB).mkdir()
        os.chdir(folder / JOB)
        config.export(TMPDIR=str(folder), PWD=str(folder / JOB))
        tempfile.tempdir = None  # TMPDIR differs
        descendants.adopt()
        zygote = Zygote(*jobs, withheld=(requests, answers, lock))  # before this process has other threads
        asyncio.run(Hosted(home, folder, zygote).serve(requests, answers))
        return 0
    except UsageError as error:
        print(f"rolecall: {error}", file=sys.stderr)
        return USAGE
    finally:
        os.chdir(home)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # `multiprocessing` would look for its folder, which is gone
