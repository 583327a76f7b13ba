"""How long the lead has waited for each trainer. Pure logic: times are passed in, in seconds."""

from __future__ import annotations

from collections.abc import Iterable

PAUSE = 1.0  # seconds between two looks after which the lead was busy, or suspended, and not waiting


class Patience:
    """When each of the trainers `names` was heard last. While the lead does something else, such as saving, gradients
    wait in its inbox: that time does not count.
    """

    def __init__(self, names: Iterable[str], now: float) -> None:
        self._heard = dict.fromkeys(names, now)
        self._looked = now

    def heard(self, names: Iterable[str], now: float) -> None:
        """Each of `names` has sent a gradient, or got an answer."""
        self._heard |= dict.fromkeys(names, now)

    def look(self, now: float) -> None:
        """The lead looks for those who are late."""
        pause, self._looked = now - self._looked, now
        if pause > PAUSE:
            self._heard = {name: min(heard + pause, now) for name, heard in self._heard.items()}

    def seconds(self, name: str, now: float) -> float:
        """How long the lead has waited for `name`."""
        return now - self._heard[name]
