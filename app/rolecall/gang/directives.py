"""Epochs: the numbers of directives."""

from __future__ import annotations

from dataclasses import replace

from rolecall.gang.protocol import Directive
from rolecall.gang.roster import MemberRecord


class Epochs:
    """Numbers directives. An epoch names one directive of a member; a directive keeps the epoch at which it was first
    given. `revision` grows if any member's directive may have changed."""

    def __init__(self) -> None:
        self.newest = 1
        self.revision = 0

    def advance(self) -> None:
        """Any directive may differ from now on."""
        self.newest += 1
        self.revision += 1

    def exceed(self, epoch: int) -> None:
        """Later epochs exceed `epoch`, which may be an earlier coordinator's."""
        self.newest = max(self.newest, epoch)

    def give(self, member: MemberRecord, order: Directive) -> Directive:
        """Gives `order` to `member`, under the old epoch if the order is the old one.

        A directive to stop that was given before `member` may have started a worker proves nothing: it is renewed.
        """
        last = member.directive
        if last is None or last.epoch < member.stop_epoch or last.content != order.content:
            if last is not None and last.epoch == order.epoch:
                self.newest += 1
                order = replace(order, epoch=self.newest)
            last = order
        member.directive, member.revision = last, self.revision
        return last
