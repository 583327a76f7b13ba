"""kubectl: runs it, and says in a line what is wrong, and what to do, if it fails."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.errors import UsageError

COMMAND_SECONDS = 60.0  # for kubectl to end
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)  # loaded before any fork
# what kubectl says, what that means, and what to do; the first that matches
PROBLEMS = (
    (r'context "[^"]*" does not exist|context was not found', "there is no such context; `kubectl config get-contexts` "
     "lists them, and --context names one"),
    (r"no configuration has been provided|localhost:8080|no current.context|current-context is not set",
     "no cluster is configured; name a context with --context, or set KUBECONFIG"),
    (r"Unauthorized|must be logged in|getting credentials", "the cluster refuses the login; log in again"),
    (r'namespaces "[^"]*" not found', "there is no such namespace; create it, or name another with --namespace"),
    (r"orbidden.*exceeded quota", "the namespace's quota is used up; free some of it, or ask for more"),
    (r"orbidden", "this user may not do that there; ask for the right, or name another namespace with --namespace"),
    (r"refused|no such host|i/o timeout|no route to host|Unable to connect|TLS handshake|deadline exceeded|NO ANSWER",
     "the cluster cannot be reached; check the network, and the context with `kubectl cluster-info`"),
)  # fmt: skip


class MissingError(UsageError):
    """The object that kubectl was asked for does not exist."""


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl with a context and a namespace, its current ones if they are empty."""

    context: str = ""
    namespace: str = ""

    def command(self, *words: str) -> list[str]:
        """The command with these words."""
        options = {"context": self.context, "namespace": self.namespace}
        return ["kubectl", *(f"--{name}={value}" for name, value in options.items() if value), *words]

    async def run(self, *words: str, given: str = "", seconds: float = COMMAND_SECONDS) -> str:
        """What kubectl prints, which reads `given`. Raises UsageError if it fails, or does not end within `seconds`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command(f"--request-timeout={seconds:g}s", *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise _absent(error) from error
        try:
            async with asyncio.timeout(seconds):
                printed, errors = await process.communicate(given.encode())
        except TimeoutError:
            raise self.problem(words, f"NO ANSWER within {seconds:g} s") from None
        finally:
            await end(process)
        if process.returncode:
            raise self.problem(words, errors.decode(errors="replace"))
        return printed.decode(errors="replace")

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        """kubectl, which goes on, and ends with this process; what it prints can be read. Raises UsageError."""
        try:
            return await asyncio.create_subprocess_exec(
                *self.command(*words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the run
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise _absent(error) from error

    def problem(self, words: Sequence[str], said: str) -> UsageError:
        """What is wrong, in a line, if kubectl with `words` has `said` that."""
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("Warning: ")]
        last = re.sub(r"^(error|Error from server( \(\w+\))?): ", "", lines[-1]) if lines else "no reason given"
        place = " ".join(self.command(words[0]))
        for pattern, advice in PROBLEMS:
            if re.search(pattern, said):
                return UsageError(f"{place}: {advice} ({last})")
        return (MissingError if "(NotFound)" in said else UsageError)(f"{place}: {last}")


async def end(process: asyncio.subprocess.Process) -> None:
    """Ends kubectl, if it has not ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # `kill` of the process would reap it before asyncio does
        await process.wait()


def _absent(error: OSError) -> UsageError:
    return UsageError(
        f"kubectl: cannot be run ({error.strerror}); install it, see https://kubernetes.io/docs/tasks/tools"
    )


def _end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
