"""The replies to the query "stacks" as text: what each rank's threads do, who waits for whom, and deadlocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rolecall.observe.stacks import waits
from rolecall.observe.stacks.waits import Call, Picture, Rank
from rolecall.record.stacks import HANDLER, RPC_THREADS, TURNS, Frame, Thread

SILENT = 2.0  # seconds: a worker sends a heartbeat every half second
WIDTH = 120  # characters
# what every stack begins with
OUTER = ("rolecall/rank/", "multiprocessing/", "threading.py", "rolecall/jobs/script/", "rolecall/torch_rpc/program.py")


def read(replies: Mapping[str, Mapping[str, Any]]) -> list[Rank]:
    """The ranks of `replies`, by name. Of a reply that cannot be read, nothing is known but that."""
    ranks = []
    for name, reply in replies.items():
        try:
            ranks.append(waits.read(name, reply))
        except (KeyError, TypeError, ValueError):
            problem = "its reply cannot be read; run the same version in every rank"
            ranks.append(Rank(name, running=False, error=problem))
    return ranks


def text(replies: Mapping[str, Mapping[str, Any]], only: Collection[str] | None = None, native: bool = False) -> str:
    """All of it. Only the stacks of the ranks `only` are shown, where they are given; `native` frames where asked
    for."""
    ranks = read(replies)
    parts = []
    for rank in ranks:
        if only is None or rank.name in only:
            parts.append("\n".join(_of_rank(rank, replies[rank.name], ranks, native)))
    silent = [f"{name}: {problem}" for name, reply in replies.items() if (problem := silence(reply))]
    parts.append("\n".join([*conclusions(waits.look(ranks)), *silent]))
    return "\n\n".join(parts)


# ---- who waits for whom


def conclusions(picture: Picture) -> Iterator[str]:
    """Who waits for whom, and what follows."""
    if not picture.waits:
        yield "nobody waits long for another rank"
    else:
        yield "who waits for whom:"
    for wait in picture.waits:
        yield f"  {wait}"
    for circle in picture.deadlocks:
        yield f"deadlock: {' > '.join(circle)}{_inside(circle, picture)}"
    for circle in picture.circles:
        others = _list(picture.awake) or "a condition"
        yield f"a circle, which {others} may end: {' > '.join(circle)}"
    if picture.waits and not picture.awake and not picture.deadlocks:
        yield "standstill: nothing goes on in any rank"


def _inside(circle: Collection[str], picture: Picture) -> str:
    """What a deadlock within one rank is."""
    if len({*circle}) > 1:
        return ""
    if {*circle} <= {*picture.exhausted}:
        return f" (its {RPC_THREADS} RPC threads wait for answers, and an answer needs one of them)"
    return " (threads of its process wait for each other)"


def silence(reply: Mapping[str, Any]) -> str:
    """Since when a worker sends no heartbeats, and why; empty where it does."""
    seconds = float(reply.get("silent_seconds", 0.0))
    if seconds <= SILENT:
        return ""
    holder = any(thread["gil"] for thread in reply["threads"])
    cause = "a thread holds the GIL" if holder else "a thread holds the GIL, or the process gets no CPU"
    return f"no heartbeat for {seconds:.1f} s" + ("" if reply["state"] == "stopped" else f": {cause}")


def _list(names: Collection[str]) -> str:
    *most, last = names or ("",)
    return f"{', '.join(most[:5])}{' ...' if len(most) > 5 else ''} or {last}" if most else last


# ---- a rank


def _of_rank(rank: Rank, reply: Mapping[str, Any], ranks: Collection[Rank], native: bool) -> Iterator[str]:
    if rank.error:
        yield f"{rank.name}: {rank.error}"
        return
    yield f"{rank.name}: {', '.join(_facts(reply))}"
    groups: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[Mapping[str, float]]] = {}
    threads = [thread for thread in rank.threads if thread.main or not thread.idle]
    for thread in sorted(threads, key=lambda each: (not each.main, not each.in_rpc, each.in_background, each.number)):
        calls = [call for call in rank.calls if call.thread == thread.number]
        is_waiting = calls and (thread.waits or not thread.state) and not rank.at_a_lock(thread)
        waits = _waits(calls) if is_waiting else {}
        frames = () if thread.idle else tuple(_frames(thread, native))
        kind = _name(thread, rank, ranks), "" if is_waiting else thread.doing, tuple(waits), frames
        groups.setdefault(kind, []).append(waits)  # however long each of them has waited
    for (name, doing, _, frames), alike in groups.items():
        longest = {what: max(waits[what] for waits in alike) for what in alike[0]}
        doing = ", ".join(f"waits {seconds:.1f} s for {what}" for what, seconds in longest.items()) or doing
        head = f"{name}: {doing}" if doing else name
        yield "\n".join([f"  {f'{len(alike)} threads: ' if len(alike) > 1 else ''}{head}", *frames])
    if rest := _rest(rank, int(reply.get("rpc_threads", 0))):
        yield f"  {rest}"


def _facts(reply: Mapping[str, Any]) -> Iterator[str]:
    state = str(reply["state"])
    yield {"none": "no worker", "stopped": "its worker is stopped (SIGSTOP)"}.get(state, state)
    if reply.get("generation"):
        yield f"generation {reply['generation']}"
    if reply.get("step"):
        yield f"step {reply['step']}"
    if reply.get("phase"):
        yield f"{reply['phase']} for {reply['phase_seconds']:.1f} s"
    if problem := silence(reply):
        yield problem
    if reply["by"] or reply["note"]:
        by = f"stacks by {reply['by']}" if reply["by"] else "no stacks"
        yield f"{by} ({reply['note']})" if reply["note"] else by


def _name(thread: Thread, rank: Rank, ranks: Collection[Rank]) -> str:
    name = "main thread" if thread.main else f"thread {thread.name!r}" if thread.name else "a thread"
    called = thread.serves
    if called:
        callers = sorted({each.name for each in ranks for call in each.calls
                          if call.to == rank.name and call.method in thread.served})  # fmt: skip
        name = f"serves {called}" + (f" for {_list(callers)}" if callers else "")
    return name


def _waits(calls: Collection[Call]) -> dict[str, float]:
    """What a thread with these calls waits for, and for how many seconds: the oldest of a function's at a rank."""
    alike: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        alike.setdefault((call.to, call.method), []).append(call.seconds)
    return {
        f"{to} ({f'{len(each)} calls of ' if len(each) > 1 else ''}{method})": max(each)
        for (to, method), each in alike.items()
    }


def _frames(thread: Thread, native: bool) -> Iterator[str]:
    frames = [frame for frame in thread.frames if native or not frame.native]
    for place, frame in enumerate(frames):
        if frame.at(*HANDLER) or frame.at(*TURNS) or frame.file.startswith(OUTER[0]):
            frames = frames[:place]
            break
    while frames and not frames[-1].native and frames[-1].file.startswith(OUTER):
        frames.pop()
    return (f"    {_line(frame)}" for frame in frames)


def _line(frame: Frame) -> str:
    line = f"{frame}  {frame.text}" if frame.text else str(frame)
    return line if len(line) <= WIDTH - 4 else line[: WIDTH - 8] + " ..."


def _rest(rank: Rank, pool: int) -> str:
    """The threads that are not shown."""
    idle = max(0, min(pool, RPC_THREADS) - len(rank.serving))
    others = sum(thread.idle and bool(thread.code) and not thread.main for thread in rank.threads)
    parts = []
    if rank.exhausted:
        parts.append(f"all {RPC_THREADS} RPC threads serve calls: none is left for another call, or for an answer")
    elif pool:
        parts.append(f"{idle} of {min(pool, RPC_THREADS)} RPC threads are idle")
    if others:
        parts.append(f"{others} {'thread' if others == 1 else 'threads'} of Rolecall")
    return "; ".join(parts)
