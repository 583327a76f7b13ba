"""Makes every error that torch has for a peer which is gone, silent or fails, in real processes, and prints a line of
JSON for each: its name, its type, how Rolecall takes it, and its text. Beside them runs the scene of torch_light.py.

A program, not a test: its processes are forked from one that has imported torch and started no thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rpc

from rolecall import telemetry
from rolecall.context.context import Context
from rolecall.declare.task import Peer
from rolecall.errors import CallTimeoutError, RemoteError
from rolecall.torch_rpc.failures import is_lost
from rolecall.torch_rpc.rpc import TorchRpc, connect
from tests.context.contexts import AGENT, ONE, TWO, make
from tests.contracts import torch_light

DEADLINE = 20  # seconds; a fail-safe
SHORT = 0.3  # seconds: of what is to time out
DIRECTORY = Path(tempfile.gettempdir())
CONTEXTS: list[Context[Any]] = []  # this process's


def attempt(name: str, function: Callable[[], Any]) -> None:
    """Prints what `function` raises."""
    try:
        function()
        raise AssertionError("nothing was raised")
    except Exception as error:
        kinds = {CallTimeoutError: "late", RemoteError: "remote"}
        taken = "lost" if is_lost(error) else kinds.get(type(error), "own")
        cause = str(error.__cause__ or "")[:2000]
        line = json.dumps({"name": name, "taken": taken, "text": str(error)[:1000], "cause": cause})
        os.write(1, line.encode() + b"\n")


def start(function: Callable[..., Any], *arguments: Any) -> int:
    """Forks a process that runs `function`."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(DEADLINE)
            function(*arguments)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


# ---- what peers are asked to do


def fails() -> NoReturn:
    raise KeyError("no such thing")


def waits() -> None:
    time.sleep(DEADLINE)


def asks(name: str) -> None:
    rpc.rpc_sync(name, waits)


class OddError(Exception):
    """Cannot be made of a text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def is_odd() -> NoReturn:
    raise OddError(1, 2)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def fails_later() -> torch.futures.Future[float]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(0)
    return future.then(lambda zero: 1 / zero.value())


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def passes_on(name: str, function: Callable[..., Any]) -> torch.futures.Future[Any]:
    return CONTEXTS[0].call(name, function, timeout=SHORT)  # type: ignore[no-any-return]


def waits_for(name: str, function: Callable[..., Any]) -> Any:
    return CONTEXTS[0].call(name, function, timeout=SHORT).wait()


# ---- the scenes, each a process


def observer(me: Peer, port: int) -> None:
    context = connected(me, port)
    agent = os.pidfd_open(os.getppid())
    select.select([agent], [], [])
    if me == ONE:
        attempt("the store is gone", lambda: context.store.get("key"))


def agent(port: int) -> None:
    processes = {peer.name: start(observer, peer, port) for peer in (ONE, TWO)}
    context = connected(AGENT, port)

    def waited(peer: Peer, function: Callable[..., Any], *arguments: Any, timeout: float = -1.0) -> Any:
        return lambda: context.wait_all([context.call(peer, function, *arguments, timeout=timeout)])

    def awaited(peer: Peer, function: Callable[..., Any], *arguments: Any, timeout: float = -1.0) -> Any:
        return lambda: context.call(peer, function, *arguments, timeout=timeout).wait()

    attempt("a function raises", lambda: list(context.call_all("observer", fails, lost="raise")))
    attempt("a function raises, to all", waited(ONE, fails))
    attempt("a function raises, to a future", awaited(ONE, fails))
    attempt("a function raises what torch cannot make again", awaited(ONE, is_odd))
    attempt("a function raises in a future of its own", awaited(ONE, fails_later))
    attempt("an operator of torch raises", lambda: context.call(ONE, torch.add, torch.ones(2), torch.ones(3)).wait())
    attempt("a function raises at the caller itself", awaited(AGENT, fails))
    attempt("a peer is told that a function raised", awaited(ONE, waits_for, TWO.name, fails))
    attempt("a peer passes on that a function raised", awaited(ONE, passes_on, TWO.name, fails))
    telemetry.setup_logging("json", "info")
    attempt("a call takes too long", waited(ONE, waits, timeout=SHORT))
    attempt("a call takes too long, to a future", awaited(ONE, waits, timeout=SHORT))
    attempt(
        "a call takes too long, of a role",
        lambda: list(context.call_all("observer", waits, timeout=SHORT, lost="raise")),
    )
    attempt("a call of a peer takes too long", awaited(ONE, waits_for, TWO.name, waits))
    attempt("a call of a peer takes too long, passed on", awaited(ONE, passes_on, TWO.name, waits))
    telemetry.setup_logging("json", "error")
    os.kill(processes[TWO.name], signal.SIGSTOP)
    attempt("a peer is stopped", waited(TWO, waits, timeout=SHORT))
    os.kill(processes[TWO.name], signal.SIGCONT)
    under_way = context.call(TWO, waits)
    os.kill(processes[TWO.name], signal.SIGKILL)
    attempt("a peer is killed during a call", lambda: context.wait_all([under_way]))
    attempt("a peer is killed before a call", waited(TWO, waits))
    print(json.dumps({"lost": sorted(context.lost)}), flush=True)
    attempt("a peer is killed before a call, to a future", awaited(TWO, waits))
    attempt("a peer is killed before the first call", waited(ONE, asks, TWO.name))
    attempt("a peer is killed, as a peer says", awaited(ONE, waits_for, TWO.name, waits))
    attempt("a peer is killed, as a peer passes on", awaited(ONE, passes_on, TWO.name, waits))
    attempt("nobody has that name", lambda: context.call("nobody", waits).wait())


def connected(me: Peer, port: int, timeout: float = DEADLINE) -> Context[Any]:
    context = make(
        DIRECTORY,
        me=me,
        master_addr="127.0.0.1",
        master_port=port,
        bind_addr="127.0.0.1",
        connect_timeout=timeout,
        phase_timeout=SHORT,
        device="cpu",
    )
    connect(context)
    CONTEXTS.append(context)
    return context


def alone(port: int) -> None:
    attempt("a member never connects", lambda: connected(AGENT, port, SHORT))


def group(store: TCPStore, name: str, me: Peer, fate: str) -> None:
    """A process group of both observers, of whom the second one is `absent`, `silent`, or has `ended`."""
    context = make(DIRECTORY, me=me, device="cpu")
    meeting = PrefixStore(name, store.clone())
    meeting.set_timeout(timedelta(seconds=SHORT if fate == "absent" else DEADLINE))
    transport, limit = TorchRpc(context, meeting), DEADLINE if fate == "ended" else SHORT
    if fate == "absent":
        attempt(name, lambda: transport.join_group(context, "observer", limit))
        return
    transport.join_group(context, "observer", limit)
    if me == ONE:
        attempt(name, lambda: [dist.all_reduce(torch.ones(4)) for _ in range(2)])
        meeting.set("over", "")
        return
    dist.all_reduce(torch.ones(4))
    if fate == "silent":
        meeting.wait(["over"])


def main() -> None:
    """Its arguments are two free ports."""
    warnings.simplefilter("ignore")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    first, second = map(int, sys.argv[1:])
    scenes = [start(agent, first), start(alone, second)]
    scenes.append(start(group, store, "a member of a group never comes", ONE, "absent"))
    for name, fate in (("a member of a group falls silent", "silent"), ("a member of a group ends", "ended")):
        scenes += [start(group, store, name, peer, fate) for peer in (ONE, TWO)]
    scenes.append(start(torch_light.main))
    for pid in scenes:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
