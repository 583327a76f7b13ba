"""A rank's reply to the query `ReadStacks`: its worker's threads with their frames, what each does and waits for."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

from msgspec import Struct

from rolecall.wire.messages import MAX_RUNNING

State = Literal["computes", "moves", "sleeps", "input", "waits", "stopped", ""]
# frames that call a method for a peer
DISPATCH = "rolecall/wire/dispatch.py"
HANDLERS = (("_call", DISPATCH), ("_stream", DISPATCH), ("_run_function", "torch/distributed/rpc/internal.py"))
TURNS = ("serve_turns", DISPATCH)
# files of Python's library that wait for a condition, which any thread may fulfil
CONDITIONS = ("threading.py", "queue.py", "concurrent/futures/", "selectors.py", "asyncio/", "multiprocessing/")
LOCK = re.compile(r"^with (?P<lock>.*?):|\.acquire\(")
COLLECTIVE = re.compile(
    "all_reduce|all_gather(_into_tensor|_object)?|all_to_all(_single)?|barrier|broadcast(_object_list)?|"
    "gather(_object)?|monitored_barrier|reduce|reduce_scatter(_tensor)?|scatter"
)
GROUPS = "torch/distributed/distributed_c10d.py"
# by the end of a frame's file and its function: what its thread waits for
WAITS = {
    ("rolecall/context/meeting.py", "_meet"): "for the other ranks' workers",
    ("rolecall/context/transport.py", "forward"): "for rank 0 to take its progress",
    ("rolecall/torch_rpc/distributed.py", "join_group"): "for the members of its process group",
    ("rolecall/torch_rpc/store.py", "open_store"): "for rank 0's store",
    ("rolecall/context/group.py", "require_peers"): "for a peer to come",
    ("torch/distributed/rpc/api.py", "shutdown"): "for all ranks to end their RPC",
    ("torch/autograd/graph.py", "_engine_run_backward"): "in a backward pass",
    ("torch/distributed/autograd/__init__.py", "backward"): "in a distributed backward pass",
}


class Frame(Struct, frozen=True, array_like=True):
    """A frame: its function, its file, the line's number, 0 if unknown, and text."""

    function: str
    file: str
    line: int = 0
    text: str = ""

    @property
    def name(self) -> str:
        """The function's name without its class."""
        return self.function.rpartition(".")[2]

    def at(self, function: str, file: str) -> bool:
        """Whether it is a frame of `function` in a file whose name ends with `file`."""
        return self.name == function and self.file.endswith(file)

    @property
    def serves(self) -> bool:
        """Whether it is the frame that calls a method for a peer."""
        return any(self.at(*handler) for handler in HANDLERS)

    @property
    def in_rolecall(self) -> bool:
        """Whether it is Rolecall's, and not that of a job."""
        return self.file.startswith("rolecall/") and not self.file.startswith("rolecall/jobs/")

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Thread(Struct, frozen=True, dict=True):
    """A thread of a worker. `number` is its native ID; `frames` are those of Python, the innermost first.

    `state` is its activity while it was watched: it "computes", "moves" a little, "sleeps" for a time, waits for
    "input" or output, "waits" for another thread, is "stopped", or is unknown.
    """

    number: int
    frames: tuple[Frame, ...] = ()
    state: State = ""
    main: bool = False
    gil: bool = False
    name: str = ""

    @property
    def waits(self) -> bool:
        """Whether only another thread can make it continue."""
        return self.state == "waits"

    @property
    def in_call(self) -> bool:
        """Whether it serves a call beside the main thread."""
        return not self.main and any(frame.serves for frame in self.frames)

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The functions within the call that it serves, the called one among them; empty if it serves none."""
        for place, frame in enumerate(self.frames):
            if frame.serves:
                return tuple(inner.name for inner in self.frames[:place])
        return ()

    @property
    def serves(self) -> str:
        """The called function, if it serves a call: the outermost one that is neither torch's nor Rolecall's."""
        inner = self.frames[: len(self.served)]
        users = [each for each in inner if not (each.in_rolecall or "torch/distributed/rpc/" in each.file)]
        return (users or inner)[-1].name if inner else ""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do, or is a thread of Rolecall's own."""
        frames = [frame for frame in self.frames if not _waiting(frame)]
        if not frames or frames[0].at(*TURNS):
            return True
        return (
            not self.main and not self.in_call and (frames[-1].in_rolecall or frames[-1].at("end", "script/ending.py"))
        )

    @property
    def in_background(self) -> bool:
        """Whether it waits, mostly for work, and neither is the main thread nor serves a call."""
        return self.waits and self.at_a_condition and not self.main and not self.in_call

    @property
    def at_a_condition(self) -> bool:
        """Whether its innermost frame is one in which Python's library waits."""
        return bool(self.frames) and _waiting(self.frames[0])

    @property
    def at_a_lock(self) -> bool:
        """Whether it waits for a lock, which a thread of its process holds: its line has `with` or `acquire`."""
        return self.waits and bool(self.frames) and not self.at_a_condition and bool(LOCK.search(self.frames[0].text))

    @property
    def collective(self) -> str:
        """The operation of its process group that it is in."""
        names = (each.name for each in self.frames if each.file.endswith(GROUPS))
        return next((name for name in names if COLLECTIVE.fullmatch(name)), "")

    @property
    def doing(self) -> str:
        """Its activity in words."""
        if self.idle:
            return "idle"
        if self.collective:
            return f"in {self.collective} of its process group"
        for frame in self.frames if self.state in ("waits", "input", "moves", "") else ():
            for (file, function), words in WAITS.items():
                if frame.at(function, file):
                    return words if words.startswith("in ") else f"waits {words}"
        if self.at_a_lock:
            match = LOCK.search(self.frames[0].text)
            lock = ((match and match["lock"]) or "").split(" as ")[0]
            return f"waits for the lock {lock}" if lock else "waits for a lock"
        words = {"moves": "goes on", "input": "waits for input or output"}.get(self.state, self.state)
        return f"{words}, holds the GIL" if self.gil else words


class Call(Struct, frozen=True, array_like=True):
    """A pending call: to which rank, of which method, for how many seconds, and the number of the calling thread."""

    to: str
    method: str
    seconds: float
    thread: int = 0


class Rank(Struct, frozen=True):
    """A rank's reply, with its worker's state, and why there are no stacks in `note`; or the `error` why there is no
    reply. The worker's last heartbeat was `silent_seconds` ago. Who asks adds the rank's name."""

    name: str = ""
    threads: tuple[Thread, ...] = ()
    calls: tuple[Call, ...] = ()
    state: str = "running"
    note: str = ""
    generation: int = 0
    step: int = 0
    phase: str = ""
    phase_seconds: float = 0.0
    silent_seconds: float = 0.0
    error: str = ""

    @property
    def role(self) -> str:
        """The rank's role."""
        return self.name.rpartition("_")[0]

    @property
    def running(self) -> bool:
        """Whether it has a worker that has started."""
        return self.state == "running" and not self.error

    @property
    def serving(self) -> tuple[Thread, ...]:
        """The threads that serve remote calls."""
        return tuple(thread for thread in self.threads if thread.in_call)

    @property
    def exhausted(self) -> bool:
        """Whether it carries out as many calls as it may at a time."""
        return len(self.serving) >= MAX_RUNNING


def _waiting(frame: Frame) -> bool:
    return frame.file.startswith(CONDITIONS)
