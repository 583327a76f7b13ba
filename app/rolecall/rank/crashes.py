"""When a crashed rank is started again: at once, then with exponential backoff."""

from __future__ import annotations

SETTLED = 10.0  # seconds after which a rank's start counts as a success
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds


class Crashes:
    """Counts a rank's crashes in a row."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def add(self, lived: float) -> float:
        """The rank crashed `lived` seconds after its start. Returns the seconds until its next start."""
        self.in_a_row = 1 if lived > SETTLED else self.in_a_row + 1
        return float(min(FIRST_PAUSE * 2 ** (self.in_a_row - 1), LONGEST_PAUSE))
