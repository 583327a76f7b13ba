"""What drives a gang: its effects are persisted before it goes on, and waiting requests are answered in time."""

from __future__ import annotations

from collections.abc import Callable

from rolecall.gang.gang import Gang
from rolecall.gang.protocol import Answer, Beat, Effect, Key
from rolecall.gang.wire import name_of_directive


def step(gang: Gang, now: float, persist: Callable[[Effect], bool]) -> bool:
    """Moves `gang` on to `now` (seconds); returns False where nothing more is due.

    `persist` puts an effect on disk and returns whether it is there. A generation whose number is not on disk does not
    start, since its number could be used twice; the next step tries again. A job that is done is done even so.
    """
    effect = gang.tick(now)
    if effect is None or (not persist(effect) and effect.kind == "begin"):
        return False
    gang.confirm(effect, now)
    return True


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
