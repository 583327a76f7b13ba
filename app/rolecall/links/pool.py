"""Which member is called with which item, and in what order the answers are given out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

from rolecall.errors import CallError, PeerLostError

AHEAD = 16  # items that are read and whose answers are not given out, for each call that may be under way
MAX_LOSSES = 6  # members in a row that are lost with an item: it may be what ends them
Lost = Literal["skip", "raise", "answer"]


@dataclass(eq=False, slots=True)
class Task:
    """An item, the number of which counts from 0 in the order of the items."""

    number: int
    item: Any
    member: Any = None  # that is called with it
    losses: int = 0  # of members that were called with it


class Answered(NamedTuple):
    """An item and its answer."""

    item: Any
    answer: Any


class Pool:
    """The items of a map, and the members that are called with them, each with up to `window` at a time.

    | an item | what holds | moves on to |
    | --- | --- | --- |
    | unread | the caller's iterable has it, as long as no member has room | waiting: `read` |
    | waiting | it is next, perhaps again, since the member that was called with it is lost | under way: `next_call` |
    | under way | a member is called with it | answered; waiting: `lost`, if it may be called `again` |
    | answered | its answer waits until the caller asks for it, and, if `ordered`, for those before it | given out |

    A member is any hashable value, another one each time that it joins. One that has to be `prepared` is called once
    it is. A lost one is not called again. Without `again`, or if MAX_LOSSES members were lost with an item, `on_loss`
    decides: the item is left out ("skip"), its answer is the error ("answer"), or `lost` raises it ("raise").
    """

    def __init__(self, window: int, *, ordered: bool, again: bool, on_loss: Lost, prepares: bool = False) -> None:
        self._window, self._ordered, self._again, self._on_loss = window, ordered, again, on_loss
        self._prepares = prepares
        self._members: dict[Any, int] = {}  # that can be called, with the number of their calls
        self._preparing = set[Any]()
        self._lost = set[Any]()  # the caller may name them for a moment yet
        self._tasks: dict[int, Task] = {}  # in order, from when they are read until their answers are given out
        self._under_way: dict[int, Any] = {}
        self._waiting: list[int] = []  # a heap
        self._answers: dict[int, Any] = {}  # not given out, in the order in which they came
        self._count = 0
        self._exhausted = False

    # ---- members

    def see(self, members: Iterable[Any]) -> list[Any]:
        """These members are there now, in the order in which they are called if none has fewer calls. Returns those
        that are to be prepared."""
        there = [member for member in members if member not in self._lost]
        new = [member for member in there if member not in self._members and member not in self._preparing]
        self._preparing = {*new, *self._preparing} & {*there}
        self._members = {member: self._members[member] for member in there if member in self._members}
        if self._prepares:
            return new
        for member in new:
            self.prepared(member)
        return []

    def prepared(self, member: Any) -> None:
        """A member can be called from now on."""
        if member in self._preparing:
            self._preparing.discard(member)
            self._members[member] = 0

    def forget(self, member: Any) -> None:
        """A member is lost: it is not called any more."""
        self._lost.add(member)
        self._preparing.discard(member)
        self._members.pop(member, None)

    @property
    def nobody(self) -> bool:
        """Whether no member is there, and no answer can come."""
        return not (self._members or self._preparing or self._under_way)

    # ---- items

    @property
    def wants(self) -> bool:
        """Whether the next item is to be read: by `read`, or by `exhausted` if there is none."""
        if self._exhausted or self._waiting or (self._tasks and self._free() is None):
            return False
        return len(self._tasks) < max(1, AHEAD * self._window * len(self._members))

    def read(self, item: Any) -> None:
        """The next item."""
        self._tasks[self._count] = Task(self._count, item)
        heappush(self._waiting, self._count)
        self._count += 1

    def exhausted(self) -> None:
        """There are no more items."""
        self._exhausted = True

    def _free(self) -> Any:
        """The member to be called next; None if all have their calls."""
        member = min(self._members, key=self._members.__getitem__, default=None)
        return None if member is None or self._members[member] >= self._window else member

    def next_call(self) -> Task | None:
        """The item that its `member` is to be called with now; None if there is none."""
        member = self._free()
        if member is None or not self._waiting:
            return None
        task = self._tasks[heappop(self._waiting)]
        task.member = self._under_way[task.number] = member
        self._members[member] += 1
        return task

    def _end(self, number: int) -> Any:
        member = self._under_way.pop(number)
        if member in self._members:
            self._members[member] -= 1
        return member

    def answered(self, number: int, answer: Any) -> None:
        """The member that was called with an item has answered."""
        self._end(number)
        self._answers[number] = answer

    def lost(self, number: int, error: CallError) -> None:
        """The member that was called with an item is lost. Raises the error if the map fails with it."""
        self.forget(self._end(number))
        task = self._tasks[number]
        task.losses += 1
        if self._again and task.losses < MAX_LOSSES:
            heappush(self._waiting, number)
            return
        if self._again:
            problem = f"item {number} was lost with {task.losses} members, one after the other: {error}"
            error = PeerLostError(problem)
        match self._on_loss:
            case "answer":
                self._answers[number] = error
            case "skip":
                del self._tasks[number]
            case "raise":
                raise error

    # ---- answers

    def take(self) -> Answered | None:
        """The next answer to be given out, if it is there."""
        number = next(iter(self._tasks if self._ordered else self._answers), -1)
        if number not in self._answers:
            return None
        return Answered(self._tasks.pop(number).item, self._answers.pop(number))

    @property
    def over(self) -> bool:
        """Whether all answers were given out."""
        return self._exhausted and not self._tasks
