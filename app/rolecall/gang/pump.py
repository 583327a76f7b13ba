"""What drives a gang: its effects are persisted before it goes on, and waiting requests are answered in time."""

from __future__ import annotations

from collections.abc import Callable

from rolecall.gang.gang import Gang
from rolecall.gang.protocol import Answer, Beat, Effect, Key
from rolecall.gang.wire import name_of_directive


class Pump:
    """Moves `gang` on. `write` begins to put an effect on disk and returns at once; the caller reports by `written`.

    One effect is written at a time, and the gang goes on meanwhile: members join, and leases expire. An effect may no
    longer be due when it is on disk; then its number is given up, and what is due is written in its turn.
    """

    def __init__(self, gang: Gang, write: Callable[[Effect], None]) -> None:
        self.gang, self._write = gang, write
        self._writing: Effect | None = None
        self._since = 0.0

    def step(self, now: float) -> None:
        """Moves the gang on to `now` (seconds). A job is over even where DONE or FAILED is not on disk within
        `rejoin_timeout`; a number that is not fails the job in the gang itself."""
        due = self.gang.tick(now)
        if self._writing is None and due is not None:
            self._writing, self._since = due, now
            self._write(due)
        elif self._writing and self._writing.kind != "begin" and now - self._since > self.gang.rules.rejoin_timeout:
            self.written(False, now)

    def written(self, on_disk: bool, now: float) -> None:
        """The effect that was being written is on disk, or could not be put there; the next `step` goes on.

        A generation whose number is not on disk does not start, since its number could be used twice; the next step
        tries again. A job that is over is over even so.
        """
        effect, self._writing = self._writing, None
        if effect is None:
            return  # its time was over
        if self.gang.tick(now) != effect:
            if on_disk:
                self.gang.burn(effect)
        elif on_disk or effect.kind != "begin":
            self.gang.confirm(effect, now)


def answer_by(gang: Gang, received_at: float) -> float:
    """When a request that was received at `received_at` is answered at the latest (seconds)."""
    return received_at + gang.rules.lease / 6


def receive(gang: Gang, beat: Beat, now: float) -> Key | None:
    """Takes `beat`. Returns its member's key; None where the member is to send its whole heartbeat.

    Raises RejectedError.
    """
    if beat.heartbeat is None:
        return gang.renew(beat.incarnation, beat.sequence, beat.since, now)
    return gang.receive(beat.heartbeat, now)


def answer(gang: Gang, key: Key, beat: Beat, received_at: float, now: float) -> Answer | None:
    """The answer to `beat` of the member `key`; None while the request is to wait."""
    if now < answer_by(gang, received_at) and beat.known == name_of_directive(gang.incarnation, gang.directive(key)):
        return None
    return gang.answer(key, beat)
