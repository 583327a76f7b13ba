"""Members' requests: each is answered as soon as its member's directive is another than the one that it names, or after
a while that it is the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from rolecall.gang.directives import name_of_directive
from rolecall.gang.protocol import Answer, Beat, Directive, Key, RejectedError, Reply, Rules


@dataclass(frozen=True)
class Request:
    """A request that waits, and the number that the driver has given it."""

    number: int
    beat: Beat
    received_at: float


class Requests:
    """Those that wait, one a member, the one that is answered first first. A beat that changes nothing costs the same
    at any number.

    `directive` is what a member must do, and `answer` says that as an answer of `coordinator` to a beat.
    """

    def __init__(
        self,
        rules: Rules,
        coordinator: str,
        directive: Callable[[Key], Directive],
        answer: Callable[[Beat, Directive], Answer],
    ) -> None:
        self.waiting: OrderedDict[Key, Request] = OrderedDict()
        self._patience, self._tick = rules.lease / 6, rules.tick
        self._coordinator, self._directive, self._answer_of = coordinator, directive, answer
        self._replies: list[Reply] = []
        self._new: list[Key] = []  # of those that bring a heartbeat
        self._revision = 0
        self._closed = False

    def add(self, number: int, key: Key | None, beat: Beat, now: float) -> None:
        """The request `number` of the member `key`; None asks for the heartbeat that the beat renews. The next tick
        answers one that brings a heartbeat."""
        if key is None:
            self._replies.append(Reply(number, Answer(again=True)))
            return
        # one of the same member, which has sent a newer one; or of a replaced one, which must stop before its successor
        # works
        self.answer(key)
        self.waiting[key] = Request(number, beat, now)
        if self._closed:
            self.answer(key)
        elif beat.heartbeat:
            self._new.append(key)
        else:
            self._answer_if_new(key)

    def refuse(self, number: int, error: RejectedError) -> None:
        """Refuses the request `number`."""
        self._replies.append(Reply(number, error))

    def answer(self, key: Key) -> None:
        """Answers the request of the member `key`, if one waits."""
        if request := self.waiting.pop(key, None):
            answer = self._answer_of(request.beat, self._directive(key))
            self._replies.append(Reply(request.number, answer, key))

    def _answer_if_new(self, key: Key) -> None:
        request = self.waiting.get(key)
        if request and request.beat.known != name_of_directive(self._coordinator, self._directive(key)):
            self.answer(key)

    def tick(self, revision: int, now: float) -> None:
        """Answers those with a new directive, if there is another `revision`, and those that have waited long enough;
        of these, requests that arrived together are spread over a few ticks."""
        changed, self._revision = revision != self._revision, revision
        for key in [*self.waiting] if changed else self._new:
            self._answer_if_new(key)
        self._new = []
        spread = 1 + int(2 * len(self.waiting) * self._tick / self._patience)
        for key, request in [*islice(self.waiting.items(), spread)]:
            if now >= request.received_at + self._patience:
                self.answer(key)

    def close(self) -> None:
        """Answers all, and those that come, at once."""
        self._closed = True
        for key in [*self.waiting]:
            self.answer(key)

    def replies(self) -> tuple[Reply, ...]:
        """The answers since the last call."""
        replies, self._replies = tuple(self._replies), []
        return replies
