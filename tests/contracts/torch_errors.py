"""Makes every error that torch has for a peer which is gone, silent or fails, in real processes, and prints a line of
JSON for each: its name, whether Rolecall takes it for a lost peer, and its text. Beside them runs the scene of
torch_light.py.

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

from rolecall.context.context import Context
from rolecall.declare.task import Peer
from rolecall.torch_rpc import adopt
from rolecall.torch_rpc.distributed import Torch, connect
from rolecall.torch_rpc.failures import is_lost
from tests.context.contexts import AGENT, JOB, ONE, TWO, make
from tests.contracts import torch_light

DEADLINE = 20  # seconds; a fail-safe
SHORT = 0.3  # seconds: of what is to time out
DIRECTORY = Path(tempfile.mkdtemp())


def attempt(name: str, function: Callable[[], Any]) -> None:
    """Prints what `function` raises."""
    try:
        function()
        raise AssertionError("nothing was raised")
    except Exception as error:
        line = json.dumps({"name": name, "lost": is_lost(error), "text": str(error)[:1000]})
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


# ---- the scenes, each a process


def observer(me: Peer, port: int) -> None:
    context = connected(me, port)
    agent = os.pidfd_open(os.getppid())
    select.select([agent], [], [])
    if me == ONE:
        attempt("the store is gone", lambda: context.torch.store().get("key"))


def agent(port: int) -> None:
    processes = {peer.name: start(observer, peer, port) for peer in (ONE, TWO)}
    connected(AGENT, port)

    def called(peer: Peer, function: Callable[..., Any], *arguments: Any, timeout: float = DEADLINE) -> Any:
        return lambda: rpc.rpc_sync(peer.name, function, args=arguments, timeout=timeout)

    attempt("a function raises", called(ONE, fails))
    attempt("a call takes too long", called(ONE, waits, timeout=SHORT))
    under_way = rpc.rpc_async(TWO.name, waits)
    os.kill(processes[TWO.name], signal.SIGKILL)
    attempt("a peer is killed during a call", under_way.wait)
    attempt("a peer is killed before a call", called(TWO, waits))
    attempt("a peer is killed before the first call", called(ONE, asks, TWO.name))


def connected(me: Peer, port: int, timeout: float = DEADLINE) -> Context[Any]:
    own = DIRECTORY / f"{me.name}-{port}"
    own.mkdir()
    context = make(
        DIRECTORY,
        me=me,
        job=JOB,
        master_addr="127.0.0.1",
        master_port=port,
        bind_addr="127.0.0.1",
        connect_timeout=timeout,
        phase_timeout=SHORT,
        device="cpu",
    )
    connect(context, own)
    rank, world_size = me.rank, len(context.members)
    adopt.adopt(context.settings, rank, world_size, context.generation, context.torch.store())
    rpc.init_rpc(me.name, rank=rank, world_size=world_size)
    return context


def alone(port: int) -> None:
    attempt("a member never connects", lambda: connected(AGENT, port, SHORT))


def group(store: TCPStore, name: str, me: Peer, fate: str) -> None:
    """A process group of both observers, of whom the second one is `absent`, `silent`, or has `ended`."""
    context = make(DIRECTORY, me=me, device="cpu")
    meeting = PrefixStore(name, store.clone())
    meeting.set_timeout(timedelta(seconds=SHORT if fate == "absent" else DEADLINE))
    torch_side, limit = Torch(context, None, store=meeting), DEADLINE if fate == "ended" else SHORT
    if fate == "absent":
        attempt(name, lambda: torch_side.join_group("observer", limit))
        return
    torch_side.join_group("observer", limit)
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
