"""The control socket of `rolecall run`: other commands list its ranks there, and change how many there are.

A request and its reply are one line of JSON each. The socket is in a folder that only the user can open. Both
sides accept their own user only: the processes that another user's socket lists could be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from rolecall.errors import UsageError
from rolecall.messages.codec import MessageError, decode_line, encode_line
from rolecall.messages.control import KillRank, ListedRank, ListRanks, Reply, Request, ScaleRole, StopRun
from rolecall.observe import targets
from rolecall.record import rundir
from rolecall.tunnel.local import same_user

REPLY_SECONDS = 10.0  # for a request and its reply
CLOSE_SECONDS = 60.0  # for all that a run does at its end, once rank 0 has ended; less by its own deadlines
MAX_REPLY_BYTES = 2**20  # some thousand ranks


class EndingError(UsageError):
    """The run is ending."""


class Control:
    """Serves the socket at `path`: `ranks` lists the ranks; `scale` changes how many a role has, and `kill` kills a
    rank, or a part of it; both return what they do for that, or raise UsageError. `stop` returns the seconds within
    which the run is over."""

    def __init__(
        self,
        path: Path,
        ranks: Callable[[], list[ListedRank]],
        scale: Callable[[str, int], Awaitable[str]],
        kill: Callable[[str, int, str], Awaitable[str]],
        stop: Callable[[bool], float],
    ) -> None:
        self.path, self._ranks, self._scale, self._kill, self._stop = path, ranks, scale, kill, stop

    async def start(self) -> asyncio.Server:
        """Listens. Raises UsageError if that is not possible in TMPDIR."""
        try:
            return await asyncio.start_unix_server(self._serve, self.path)
        except OSError as error:  # a socket's path has at most 107 characters
            raise UsageError(f"TMPDIR={tempfile.gettempdir()}: cannot hold a run's socket ({error})") from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError):  # the client has gone or is slow
                async with asyncio.timeout(REPLY_SECONDS):
                    if same_user(writer.get_extra_info("socket")):
                        writer.write(encode_line(await self._answer(await reader.readline())))
                        await writer.drain()
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Reply:
        try:
            request: Request = decode_line(Request, line)
            match request:
                case ListRanks():
                    return Reply(ranks=tuple(self._ranks()))
                case ScaleRole(role, count):
                    return Reply(done=await self._scale(role, count))
                case KillRank(role, ordinal, part):
                    return Reply(done=await self._kill(role, ordinal, part))
                case StopRun(now):
                    return Reply(seconds=self._stop(now))
        except MessageError:
            return Reply(error="the run does not know this request; use the same version of Rolecall")
        except UsageError as error:
            return Reply(error=str(error))


def ask(run: str, request: Request) -> Reply:
    """The reply of the local run that `run` names. Raises UsageError if it is not under way, and for a request that it
    cannot carry out; EndingError if it is ending."""
    local = targets.run_in(rundir.find(run))
    path = local.control if local else ""
    if not path:
        raise UsageError(f"RUN {run!r}: no such run is under way; one that starts is once it has named its page")
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(REPLY_SECONDS)
            sock.connect(path)
            if not same_user(sock):
                raise UsageError(f"RUN {run!r}: belongs to another user, who alone can act on it")
            sock.sendall(encode_line(request))
            with sock.makefile("rb") as file:
                reply: Reply = decode_line(Reply, file.readline(MAX_REPLY_BYTES))
    except TimeoutError as error:
        problem = f"does not answer within {REPLY_SECONDS:g} s; is it frozen?"
        raise UsageError(f"RUN {run!r}: `rolecall run` {problem}") from error
    except (OSError, ValueError) as error:
        raise EndingError(f"RUN {run!r}: the run is ending, and takes no commands any more") from error
    if reply.error:
        raise UsageError(reply.error)
    return reply
