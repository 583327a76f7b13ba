"""How good the policy is: the mean return of the last episodes, and the tutorial's running reward."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rolecall.jobs.rl.messages import Episode

EPISODES = 100  # gymnasium's thresholds are means over so many
GOOD = 20  # the last of them: where each reaches the threshold, the others only have to be counted


class Score:
    """`last` is the worst observer's mean return in the newest iteration, `running` the tutorial's running reward,
    `updates` counts the iterations in which an episode ended.

    Short episodes are the first to end. So nothing is solved by `episodes` before each environment has made as many
    steps as the `longest` episode takes; after a restart, all of them begin anew.
    """

    def __init__(
        self, threshold: float | None, solved_by: Literal["episodes", "running", "never"], longest: int = 0
    ) -> None:
        self.threshold, self.solved_by, self.longest = threshold, solved_by, longest
        self.steps = 0  # of each environment
        self.last = self.running = 0.0
        self.updates = 0
        self.returns: deque[float] = deque(maxlen=EPISODES)
        self.lengths: deque[int] = deque(maxlen=EPISODES)
        self.observers: deque[int] = deque(maxlen=EPISODES)  # whose they are, by their numbers in the iteration

    def add(self, observers: Sequence[Sequence[Episode]], steps: int = 0) -> None:
        """Takes the episodes that ended in an iteration of so many `steps`, of each observer."""
        self.steps += steps
        means = [float(np.mean([episode.total for episode in episodes])) for episodes in observers if episodes]
        for number, episode in _merged(observers):
            self.observers.append(number)
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
        if not means:
            return
        self.last = min(means)
        if not self.updates and self.threshold is not None and self.threshold <= 0:
            self.running = self.last  # from the tutorial's 0 it would count as solved at once
        self.running = 0.95 * self.running + 0.05 * self.last
        self.updates += 1

    @property
    def mean(self) -> float | None:
        """The mean return of the last episodes, up to EPISODES; None before the first."""
        return float(np.mean(self.returns)) if self.returns else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest of the observers' mean returns, of the same episodes; None before the first."""
        returns = defaultdict[int, list[float]](list)
        for number, total in zip(self.observers, self.returns, strict=True):
            returns[number].append(total)
        means = [float(np.mean(totals)) for totals in returns.values()]
        return (min(means), max(means)) if means else None

    @property
    def mean_length(self) -> float:
        """Their mean length, in steps."""
        return float(np.mean(self.lengths)) if self.lengths else 0.0

    @property
    def value(self) -> float | None:
        """What is to reach the threshold; None before the first episode has ended."""
        return self.running if self.solved_by == "running" and self.updates else self.mean

    @property
    def solved(self) -> bool:
        """Whether the threshold is reached; the running reward is to pass it, as in the tutorial."""
        if self.threshold is None or self.solved_by == "never" or not self.updates:
            return False
        if self.solved_by == "running":
            return self.running > self.threshold
        if len(self.returns) < EPISODES or self.steps < self.longest:
            return False
        return float(np.mean(self.returns)) >= self.threshold

    @property
    def holds(self) -> bool:
        """Whether the policy stays as it is: the last GOOD episodes each reach the threshold that ends the training."""
        if self.threshold is None or self.solved_by != "episodes" or len(self.returns) < GOOD:
            return False
        return min(list(self.returns)[-GOOD:]) >= self.threshold

    def __str__(self) -> str:
        if self.solved_by == "running":
            return f"Running reward is now {self.running:.2f}"
        if self.mean is None:
            return "No episode has ended"
        return f"Mean return of the last {len(self.returns)} episodes is {self.mean:.2f}"

    def state_dict(self) -> dict[str, Any]:
        """All but the threshold, what is to reach it, and the environments' steps."""
        columns = {"returns": [*self.returns], "lengths": [*self.lengths], "observers": [*self.observers]}
        return {"last": self.last, "running": self.running, "updates": self.updates, **columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self.last, self.running, self.updates = state["last"], state["running"], state["updates"]
        self.steps = 0
        for name in ("returns", "lengths", "observers"):
            column = getattr(self, name)
            column.clear()
            column.extend(state[name])


def _merged(observers: Sequence[Sequence[Episode]]) -> list[tuple[int, Episode]]:
    """The observers' episodes, each with its observer's number, about in the order in which they ended: whatever is
    forgotten first, is forgotten of all observers.
    """
    ends = [
        ((place + 1) / len(episodes), number, episode)
        for number, episodes in enumerate(observers)
        for place, episode in enumerate(episodes)
    ]
    return [(number, episode) for _, number, episode in sorted(ends, key=lambda end: end[:2])]
