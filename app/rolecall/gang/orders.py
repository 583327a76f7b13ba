"""What each member must do, and the answer that tells it. Pure logic."""

from __future__ import annotations

from typing import Any

from rolecall.gang.lifecycle import Lifecycle
from rolecall.gang.protocol import Answer, Beat, Directive, DirectiveKind, Key
from rolecall.gang.wire import answer_to


class Orders(Lifecycle):
    """The directives that follow from the gang's state."""

    def directive(self, key: Key) -> Directive:
        """What the member `key` must do now. It keeps its epoch for as long as the member is to do the same."""
        member = self.members.get(key)
        if member is None:
            return self._order(key)
        last = member.directive
        if last is not None and member.revision == self.revision:
            return last
        order = self._order(key)
        # a directive to stop that was given before it may have started a worker proves nothing
        if last is None or last.epoch < member.stop_epoch or not _is_same(last, order):
            if last is not None and last.epoch == order.epoch:
                self.epoch += 1
                order = self._order(key)
            member.directive = order
        member.revision = self.revision
        assert member.directive is not None
        return member.directive

    def _order(self, key: Key) -> Directive:
        if self.state == "finished" or self.state == "failed":
            return self._directive(self.state, key, reason=self.reason, code=self.code, final=self.final)
        if self._live(key):
            generation, drain = self.generation, self.state == "draining" and key == self.master
            reason = self.reason if drain else ""
            busy = generation.busy_since is not None and self._leaving(key)  # the others give nothing up
            return self._directive("run", key, generation=generation.number, members=generation.keys,
                                   lost=generation.lost_keys, drain=drain, reason=reason, busy=busy)  # fmt: skip
        # rank 0 leaves last: the others learn from it that they may
        if self._leaving(key) and self.members[key].idle and (key != self.master or self.state == "gathering"):
            return self._directive("leave", key, reason="left")
        return self._directive("stop", key, reason=self.reason)

    def _directive(self, kind: DirectiveKind, key: Key, **values: Any) -> Directive:
        return Directive(kind, key[1], self.epoch, role=key[0], **values)

    def answer(self, key: Key, beat: Beat) -> Answer:
        """The answer to `beat` of the member `key`: what it must do now, as far as it does not know."""
        generation = self.generation
        return answer_to(self.incarnation, beat, self.directive(key), generation.ranges, generation.lost_ranges)


def _is_same(one: Directive, other: Directive) -> bool:
    """Whether both, which are one member's, say the same. The members follow from the generation."""
    return (one.kind, one.generation, one.lost, one.drain, one.busy, one.reason, one.code, one.final) == (
        other.kind, other.generation, other.lost, other.drain, other.busy, other.reason, other.code, other.final
    )  # fmt: skip
