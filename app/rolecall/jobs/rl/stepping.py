"""A group of environments that continue from rollout to rollout, and the errors of those that break or hang.

Shapes: n are the environments of a group, ... an observation's own shape, A an action's own shape.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rolecall import ProgramError, UsageError
from rolecall.jobs.rl import RlSettings, envs
from rolecall.jobs.rl.envs import Singles, WrongAnswerError, checked
from rolecall.jobs.rl.messages import Array, Done, Episode
from rolecall.jobs.rl.spaces import Actions

MAX_SEED = 2**31 - 2**17  # environment number i has the seed + i, and libraries in C++ take 31 bits
MAX_CHECK_SECONDS = 1.0  # between two checks for a hanging step
SUSPENDED_SECONDS = 1.0  # if a check is later, this process was suspended
MAX_ERROR_LENGTH = 300  # characters of an environment's error
HANG_EXIT_CODE = 3  # of a process that ends because an environment hangs


class BrokenEnvError(ProgramError):
    """An environment raised an error, or returned an invalid observation or reward. The text is one line that names the
    environment, its step and its seed. The cause is the error of the environment.
    """


def abandon(line: str) -> None:
    """Ends this process, whose main thread is in an environment that does not return, with `line`."""
    sys.stderr.write(f"rolecall: {line}\n")
    sys.stderr.flush()
    os._exit(HANG_EXIT_CODE)


class Envs:
    """`num_envs` environments, reset with `seed`; the first is number `first` of its observer.

    `observations` [n, ...] are the newest, in arrays that are not changed later; `rewards` [n] float32 and `dones` [n]
    uint8 are of the last step.

    If a step or a reset has not returned after ENV_TIMEOUT, another thread calls `on_hang` with a line about it; by
    default it ends the process. With `render`, `picture` shows the first environment.

    Raises UsageError if the environments cannot be made, and BrokenEnvError if their first reset fails.
    """

    def __init__(
        self,
        settings: RlSettings,
        num_envs: int,
        seed: int,
        first: int = 0,
        on_hang: Callable[[str], None] = abandon,
        render: bool = False,
    ) -> None:
        self._envs, self.spaces = envs.make(settings, num_envs, render)
        self.env_id, self.first, self.seed = settings.env_id, first, seed % MAX_SEED
        self._timeout, self._actions = settings.env_timeout, Actions(self.spaces.action)
        space = self.spaces.observation
        self._shape, self._dtype = (num_envs, *space.shape), space.dtype
        self.observations: Array = np.zeros(self._shape, self._dtype)
        self.rewards, self.dones = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.uint8)
        self.episodes: list[Episode] = []
        self._going = np.zeros(num_envs, np.uint8)  # the dones of a step that ends no episode
        self._ended: Array = np.zeros(0, np.int64)  # numbers of the environments whose episode the last step ended
        self._return = np.zeros(num_envs, np.float64)
        self._steps = 0  # of the group
        self._start = np.zeros(num_envs, np.int64)  # steps of the group before the first one of the episode
        self._episode = np.ones(num_envs, np.int64)  # its number
        self._since = math.inf  # when the step under way began
        self._closed = threading.Event()
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._closed, self._timeout, on_hang), daemon=True
        ).start()
        self._reset(self.seed)

    def reset(self) -> None:
        """Ends the episodes under way, which count nowhere. Raises BrokenEnvError."""
        self._ended, self._return[:], self._start[:] = np.zeros(0, np.int64), 0, self._steps
        self.rewards, self.dones = np.zeros_like(self.rewards), self._going
        self._episode += 1
        self._reset()

    def _reset(self, seed: int | None = None) -> None:
        self._since = time.monotonic()
        try:
            self._show(self._envs.reset(seed=seed)[0])
        except (Exception, SystemExit) as error:
            self._fail(error)
        finally:
            self._since = math.inf

    def step(self, actions: Array) -> None:
        """Steps with a policy's `actions` [n, *A]. Raises BrokenEnvError."""
        self._since = time.monotonic()
        try:
            self._steps += 1
            observations, rewards, terminated, truncated, _ = self._envs.step(self._actions(actions))
            self._show(observations)
            self._pay(rewards, terminated, truncated)
        except (Exception, SystemExit) as error:
            self._fail(error)
        finally:
            self._since = math.inf

    def take_episodes(self) -> list[Episode]:
        """The episodes completed since the last call."""
        episodes, self.episodes = self.episodes, []
        return episodes

    def picture(self) -> Array:
        """The picture of the first environment [height, width, 3] uint8. Raises UsageError if it has none."""
        advice = "if a package is missing, pip install 'rolecall[video]'"
        with UsageError.wrap(f"ENV_ID={self.env_id}: cannot be rendered", advice=advice):
            frame = np.asarray((self._envs.render() or [None])[0])
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise UsageError(f"ENV_ID={self.env_id}: renders no RGB picture, but {frame.dtype} of shape {frame.shape}")
        return frame

    def close(self) -> None:
        """Closes the environments."""
        self._closed.set()
        self._envs.close()

    def _show(self, observations: Any) -> None:
        # a copy, because a vector may return a buffer that it uses again
        seen = np.array(checked(observations, self._shape, self._dtype, "observations"), self._dtype)
        if self._dtype.kind == "f" and not (finite := np.isfinite(seen)).all():
            number = int(finite.reshape(len(seen), -1).all(1).argmin())
            raise BrokenEnvError(self._line("returned an observation that is not finite", number))
        self.observations = seen

    def _pay(self, rewards: Any, terminated: Any, truncated: Any) -> None:
        paid, over = np.array(rewards, np.float32), np.logical_or(terminated, truncated)
        if not paid.shape == over.shape == self.dones.shape:
            raise WrongAnswerError(f"rewards of shape {paid.shape} and ends of {over.shape}, not {self.dones.shape}")
        if self._ended.size:
            paid[self._ended] = 0  # the step that resets has no reward
            self._start[self._ended] = self._steps
        if not (finite := np.isfinite(paid)).all():
            number = int(finite.argmin())
            raise BrokenEnvError(self._line(f"returned a reward of {np.asarray(rewards)[number]}", number))
        self.rewards = paid
        self._return += paid
        self._ended = ended = np.flatnonzero(over)
        if not ended.size:
            self.dones = self._going
            return
        self.dones = over.astype(np.uint8) * np.uint8(Done.TRUNCATED)
        self.dones[np.asarray(terminated, np.bool_)] = Done.TERMINATED
        lengths = (self._steps - self._start[ended]).tolist()
        self.episodes += map(Episode, self._return[ended].tolist(), lengths)
        self._return[ended] = 0
        self._episode[ended] += 1

    # ---- errors

    def _fail(self, error: BaseException) -> None:
        """Raises `error` as an error for the user."""
        if isinstance(error, UsageError | BrokenEnvError):  # some libraries make their environments at the first reset
            raise error
        if isinstance(error, WrongAnswerError):
            raise BrokenEnvError(self._line(f"returned {error}")) from None
        text = (str(error).strip().splitlines() or [""])[0][:MAX_ERROR_LENGTH]
        raise BrokenEnvError(self._line(f"raised {type(error).__name__}: {text}".removesuffix(": "))) from error

    def _line(self, what: str, number: int | None = None) -> str:
        """One line with the environment, its step and `what`; without a `number`, about the current environment."""
        singles, n = isinstance(self._envs, Singles), len(self.dones)
        if number is None:
            number = self._envs.at if isinstance(self._envs, Singles) else 0 if n == 1 else None
        if number is None:
            who, where = f"environments {self.first} to {self.first + n - 1}", f"step {self._steps} since their reset"
        else:
            who, where = f"environment {self.first + number}", f"episode {self._episode[number]}"
            reset = self._steps == 0 or self.dones[number] != Done.CONTINUES
            where = f"reset for {where}" if reset else f"step {self._steps - self._start[number]} of {where}"
        seed = f"seed {self.seed + (number or 0)}" if singles else f"the group's seed {self.seed}"
        return f"ENV_ID={self.env_id}: {who}, {where}, {seed}: {what}"

    def hangs(self, awake: float) -> str:
        """A line if the current step, counted from `awake` at the earliest, takes too long; otherwise empty."""
        if time.monotonic() - max(self._since, awake) <= self._timeout:
            return ""
        return self._line(f"has not returned within ENV_TIMEOUT={self._timeout:g} s")


def _watch(group: weakref.ref[Envs], closed: threading.Event, timeout: float, on_hang: Callable[[str], None]) -> None:
    """Calls `on_hang` once a step of the group hangs. Time in which this process is suspended does not count."""
    period = min(MAX_CHECK_SECONDS, timeout / 4)
    looked = awake = time.monotonic()
    while not closed.wait(period):
        now, watched = time.monotonic(), group()
        if watched is None:
            return
        awake, looked = now if now - looked > period + SUSPENDED_SECONDS else awake, now
        if line := watched.hangs(awake):
            on_hang(line)
            return
        del watched
