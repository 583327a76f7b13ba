"""What a peer's program says of its training, as lines of JSON, and the options that each of them takes.

A peer's program runs under an interpreter of its own (`make peers`) and imports nothing of Rolecall. Its clock begins
with the first step of an environment and stands still while a policy is evaluated.

Lines: {"event": "begin", "at"}; {"event": "snapshot", "steps", "seconds", "scores"} for each policy that was evaluated;
{"event": "end", "steps", "seconds", "paused", "scores", "updates"}. `at` is the machine's monotonic clock, `steps`
counts environment steps, `seconds` is the training's clock, `paused` the seconds of evaluations, `scores` the returns
of fresh episodes, `updates` the optimizer's steps of an off-policy algorithm.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from bench.peers.zoo import Algorithm

EPISODES = 20
GRANULARITY = 0.02  # of the training's seconds, between evaluations of a long one
SEED_OFFSET = 1_000_003  # episodes that were not trained on


@dataclass(frozen=True)
class Options:
    """What to train, and until when: `steps` environment steps, `seconds`, or a mean score of `threshold`."""

    environment: str
    seed: int
    steps: int
    seconds: float
    threshold: float | None
    every: float  # seconds of training between evaluations for the threshold
    episodes: int  # of an evaluation; 0: none at the end
    memory: bool
    sampled: bool  # actions of an evaluation, otherwise the most probable ones
    algorithm: Algorithm = "ppo"

    @staticmethod
    def parse(description: str | None) -> Options:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--environment", required=True)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--seconds", type=float, default=math.inf)
        parser.add_argument("--threshold", type=float)
        parser.add_argument("--every", type=float, default=0.25)
        parser.add_argument("--episodes", type=int, default=EPISODES)
        parser.add_argument("--memory", action="store_true")
        parser.add_argument("--sampled", action="store_true")
        parser.add_argument("--algorithm", choices=get_args(Algorithm), default="ppo")
        return Options(**vars(parser.parse_args()))


class Report:
    """A training's clock, and its lines. `evaluate(episodes)` returns as many fresh episodes' returns."""

    def __init__(self, options: Options, evaluate: Callable[[int], list[float]]) -> None:
        self.options, self._evaluate = options, evaluate
        self._begun, self.paused = 0.0, 0.0
        self._looked_at = 0.0  # the training's clock at the last evaluation
        self._newest: tuple[int, list[float]] | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun - self.paused

    def begin(self) -> None:
        """The first step is about to be made."""
        self._begun = time.monotonic()
        say("begin", at=self._begun)

    def look(self, steps: int) -> bool:
        """Evaluates the policy where that is due. Returns whether the training is to end: the threshold is reached, or
        the seconds are over.
        """
        threshold = self.options.threshold
        if threshold is not None and due(self.seconds, self._looked_at, self.options.every):
            self._looked_at = self.seconds
            scores = self._measure(steps)
            say("snapshot", steps=steps, seconds=self._looked_at, scores=scores)
            if np.mean(scores) >= threshold:
                return True
        return self.seconds >= self.options.seconds

    def end(self, steps: int, updates: int = 0) -> None:
        """The training has ended: the last policy's scores, unless they are known."""
        seconds = self.seconds
        if self._newest is None or self._newest[0] != steps:
            self._measure(steps)
        assert self._newest is not None
        say("end", steps=steps, seconds=seconds, paused=self.paused, scores=self._newest[1],
            updates=updates)  # fmt: skip

    def _measure(self, steps: int) -> list[float]:
        began = time.monotonic()
        scores = self._evaluate(self.options.episodes) if self.options.episodes else []
        self.paused += time.monotonic() - began
        self._newest = steps, scores
        return scores


def due(seconds: float, last: float, every: float) -> bool:
    """Whether a policy is to be evaluated, `last` being when one was."""
    return seconds - last >= max(every, GRANULARITY * seconds)


def play(make: Callable[[], Any], act: Callable[[Any], Any], episodes: int, seed: int) -> list[float]:
    """The returns of fresh episodes, one in each of as many environments: `act` maps observations [n, ...] to actions
    [n, ...].
    """
    environments = [make() for _ in range(episodes)]
    observations = [each.reset(seed=seed + SEED_OFFSET + number)[0] for number, each in enumerate(environments)]
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        actions = act(np.stack(observations))
        for number in np.flatnonzero(running):
            observations[number], reward, terminated, truncated, _ = environments[number].step(actions[number])
            returns[number] += float(reward)
            running[number] = not (terminated or truncated)
    for each in environments:
        each.close()
    return [float(each) for each in returns]


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)
