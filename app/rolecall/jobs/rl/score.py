"""The score of the policy: the mean return of the last episodes, or the tutorial's running reward."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rolecall.jobs.rl.messages import Episode

MEAN_EPISODES = 100  # gymnasium's thresholds are means over 100 episodes
HOLD_EPISODES = 20  # the policy is held if each of the last 20 reaches the threshold


class Score:
    """`last` is the mean return of the worst observer in the newest iteration, `running` the tutorial's running reward,
    and `updates` the number of iterations in which an episode ended.

    Short episodes end first. So SOLVED_BY=episodes needs as many steps of each environment as the `longest` episode may
    have; they are counted anew if the agent is restarted or an observer joins.
    """

    def __init__(
        self, threshold: float | None, solved_by: Literal["episodes", "running", "never"], longest: int = 0
    ) -> None:
        self.threshold, self.solved_by, self.longest = threshold, solved_by, longest
        self.steps = 0  # of each environment
        self.last = self.running = 0.0
        self.updates = 0
        self.returns: deque[float] = deque(maxlen=MEAN_EPISODES)
        self.lengths: deque[int] = deque(maxlen=MEAN_EPISODES)
        self.observers: deque[int] = deque(maxlen=MEAN_EPISODES)  # number of the observer in its iteration

    def add(self, observers: Sequence[Sequence[Episode]], steps: int = 0, first: bool = False) -> None:
        """Adds the episodes of each observer that ended in an iteration of `steps` steps, the `first` ones of some
        environments."""
        self.steps = steps if first else self.steps + steps
        means = [float(np.mean([episode.total for episode in episodes])) for episodes in observers if episodes]
        for number, episode in _merged(observers):
            self.observers.append(number)
            self.returns.append(episode.total)
            self.lengths.append(episode.length)
        if not means:
            return
        self.last = min(means)
        if not self.updates and self.threshold is not None and self.threshold <= 0:
            self.running = self.last  # the tutorial's initial 0 would count as solved
        self.running = 0.95 * self.running + 0.05 * self.last
        self.updates += 1

    @property
    def mean(self) -> float | None:
        """The mean return of the last episodes; None before the first."""
        return float(np.mean(self.returns)) if self.returns else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest mean return of an observer in the last episodes; None before the first."""
        returns = defaultdict[int, list[float]](list)
        for number, total in zip(self.observers, self.returns, strict=True):
            returns[number].append(total)
        means = [float(np.mean(totals)) for totals in returns.values()]
        return (min(means), max(means)) if means else None

    @property
    def mean_length(self) -> float:
        """The mean length of the last episodes, in steps."""
        return float(np.mean(self.lengths)) if self.lengths else 0.0

    @property
    def longest_episode(self) -> int:
        """The steps that an episode may have, or, if they are not bounded, the most of one of the last episodes."""
        return self.longest or max(self.lengths, default=0)

    @property
    def value(self) -> float | None:
        """The value that is compared with the threshold; None before the first episode has ended."""
        return self.running if self.solved_by == "running" and self.updates else self.mean

    @property
    def solved(self) -> bool:
        """Whether the mean reaches the threshold, or the running reward exceeds it, as in the tutorial."""
        if self.threshold is None or self.solved_by == "never" or not self.updates:
            return False
        if self.solved_by == "running":
            return self.running > self.threshold
        if len(self.returns) < MEAN_EPISODES or self.steps < self.longest:
            return False
        return self.mean is not None and self.mean >= self.threshold

    @property
    def holds(self) -> bool:
        """Whether the policy is not updated, because the last HOLD_EPISODES episodes each reach the threshold."""
        if self.threshold is None or self.solved_by != "episodes" or len(self.returns) < HOLD_EPISODES:
            return False
        return min(list(self.returns)[-HOLD_EPISODES:]) >= self.threshold

    def __str__(self) -> str:
        if self.solved_by == "running":
            return f"Running reward is now {self.running:.2f}"
        if self.mean is None:
            return "No episode has ended"
        return f"Mean return of the last {len(self.returns)} episodes is {self.mean:.2f}"

    def state_dict(self) -> dict[str, Any]:
        """The results, without the settings and the steps of the environments."""
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
    """The episodes and the numbers of their observers, about in the order in which they ended, so that the oldest
    episodes of all observers leave the mean first.
    """
    ends = [
        ((place + 1) / len(episodes), number, episode)
        for number, episodes in enumerate(observers)
        for place, episode in enumerate(episodes)
    ]
    return [(number, episode) for _, number, episode in sorted(ends, key=lambda end: end[:2])]
