"""The replies to the query "stacks" as text: the activity of each rank's threads, who waits for whom, deadlocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rolecall.messages.codec import MessageError, convert
from rolecall.observe.stacks import deadlocks
from rolecall.observe.stacks.deadlocks import Conclusions
from rolecall.observe.stacks.threads import Call, Frame, Rank, Thread
from rolecall.wire.messages import MAX_RUNNING

MAX_HEARTBEAT_AGE_SECONDS = 2.0  # a worker sends a heartbeat every half second
LINE_WIDTH = 120  # characters
OUTERMOST = ("multiprocessing/", "threading.py", "rolecall/jobs/script/")  # files of frames at the end of a stack


def read(replies: Mapping[str, Mapping[str, Any]]) -> list[Rank]:
    """The ranks of `replies`. A reply that cannot be read becomes an error."""
    ranks = []
    for name, reply in replies.items():
        try:
            ranks.append(convert(Rank, {**reply, "name": name}))
        except MessageError:
            ranks.append(Rank(name, error="its reply cannot be read; run the same version in every rank"))
    return ranks


def text(replies: Mapping[str, Mapping[str, Any]], only: Collection[str] | None = None) -> str:
    """The report, with the stacks of the ranks `only`, or of all, and the conclusions from all."""
    ranks = read(replies)
    parts = ["\n".join(_of_rank(rank, ranks)) for rank in ranks if only is None or rank.name in only]
    silent = [f"{rank.name}: {problem}" for rank in ranks if (problem := silence(rank))]
    parts.append("\n".join([*conclusions(deadlocks.look(ranks)), *silent]))
    return "\n\n".join(parts)


# ---- who waits for whom


def conclusions(result: Conclusions) -> Iterator[str]:
    """Lines: who waits for whom, deadlocks, a standstill."""
    if not result.waits:
        yield "no rank waits long for another"
    else:
        yield "who waits for whom:"
    for wait in result.waits:
        yield f"  {wait}"
    for circle in result.deadlocks:
        yield f"deadlock: {' > '.join(circle)}{_inside(circle, result)}"
    if result.waits and not result.active and not result.deadlocks:
        yield "standstill: no rank has any activity"


def _inside(circle: Collection[str], result: Conclusions) -> str:
    """The explanation of a deadlock within one rank."""
    if len({*circle}) > 1:
        return ""
    if {*circle} <= {*result.exhausted}:
        return f" (the {MAX_RUNNING} calls that it carries out wait for one that it has not begun)"
    return " (threads of its process wait for each other)"


def silence(rank: Rank) -> str:
    """How long a worker has sent no heartbeat, and why; empty if it sends them."""
    if rank.silent_seconds <= MAX_HEARTBEAT_AGE_SECONDS:
        return ""
    holder = any(thread.gil for thread in rank.threads)
    cause = "a thread holds the GIL" if holder else "a thread holds the GIL, or the process gets no CPU"
    return f"no heartbeat for {rank.silent_seconds:.1f} s" + ("" if rank.state == "stopped" else f": {cause}")


def _list(names: Collection[str]) -> str:
    *most, last = names or ("",)
    return f"{', '.join(most[:5])}{' ...' if len(most) > 5 else ''} or {last}" if most else last


# ---- a rank


def _of_rank(rank: Rank, ranks: Collection[Rank]) -> Iterator[str]:
    if rank.error:
        yield f"{rank.name}: {rank.error}"
        return
    yield f"{rank.name}: {', '.join(_facts(rank))}"
    groups: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[Mapping[str, float]]] = {}
    threads = [thread for thread in rank.threads if thread.main or not thread.idle]
    for thread in sorted(threads, key=lambda each: (not each.main, not each.in_call, each.in_background, each.number)):
        calls = [call for call in rank.calls if call.thread == thread.number]
        is_waiting = calls and (thread.waits or not thread.state) and not thread.at_a_lock
        waits = _waits(calls) if is_waiting else {}
        frames = () if thread.idle else tuple(_frames(thread))
        kind = _name(thread, rank, ranks), "" if is_waiting else thread.doing, tuple(waits), frames
        groups.setdefault(kind, []).append(waits)  # alike if they wait for the same, however long
    for (name, doing, _, frames), alike in groups.items():
        longest = {what: max(waits[what] for waits in alike) for what in alike[0]}
        doing = ", ".join(f"waits {seconds:.1f} s for {what}" for what, seconds in longest.items()) or doing
        head = f"{name}: {doing}" if doing else name
        yield "\n".join([f"  {f'{len(alike)} threads: ' if len(alike) > 1 else ''}{head}", *frames])
    if rank.exhausted:
        yield f"  it carries out {MAX_RUNNING} calls: a further one waits until one of them ends"


def _facts(rank: Rank) -> Iterator[str]:
    yield {"none": "no worker", "stopped": "its worker is stopped (SIGSTOP)"}.get(rank.state, rank.state)
    if rank.generation:
        yield f"generation {rank.generation}"
    if rank.step:
        yield f"step {rank.step}"
    if rank.phase:
        yield f"{rank.phase} for {rank.phase_seconds:.1f} s"
    if problem := silence(rank):
        yield problem
    if rank.note:
        yield f"no stacks ({rank.note})"


def _name(thread: Thread, rank: Rank, ranks: Collection[Rank]) -> str:
    name = "main thread" if thread.main else f"thread {thread.name!r}" if thread.name else "a thread"
    called = thread.serves
    if called:
        calls = ((each.name, call) for each in ranks for call in each.calls if call.to == rank.name)
        callers = sorted({caller for caller, call in calls if call.method in thread.served})
        name = f"serves {called}" + (f" for {_list(callers)}" if callers else "")
    return name


def _waits(calls: Collection[Call]) -> dict[str, float]:
    """The seconds for which a thread waits, by what it waits for: of a method at a rank, those of the oldest call."""
    alike: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        alike.setdefault((call.to, call.method), []).append(call.seconds)
    return {
        f"{to} ({f'{len(each)} calls of ' if len(each) > 1 else ''}{method})": max(each)
        for (to, method), each in alike.items()
    }


def _frames(thread: Thread) -> Iterator[str]:
    """The frames without those that every stack has at its end."""
    frames = [*thread.frames]
    for place, frame in enumerate(frames):
        if frame.serves or frame.file.startswith("rolecall/rank/"):
            frames = frames[:place]
            break
    while frames and (frames[-1].in_rolecall or frames[-1].file.startswith(OUTERMOST)):
        frames.pop()
    return (f"    {_line(frame)}" for frame in frames)


def _line(frame: Frame) -> str:
    line = f"{frame}  {frame.text}" if frame.text else str(frame)
    return line if len(line) <= LINE_WIDTH - 4 else line[: LINE_WIDTH - 8] + " ..."
