"""What drives a gang: its effects are persisted before it goes on, and waiting requests are answered in time."""

from __future__ import annotations

from collections.abc import Callable

from rolecall.gang.gang import Gang
from rolecall.gang.protocol import Directive, Effect, Key


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


def answer(gang: Gang, key: Key, known: Directive | None, received_at: float, now: float) -> Directive | None:
    """The answer to a request of `key`, which knows the directive `known`; None while the request is to wait."""
    directive = gang.directive(key)
    return directive if directive != known or now >= answer_by(gang, received_at) else None
