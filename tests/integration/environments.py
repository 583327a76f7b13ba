"""Environments that tests need: quick, endless, failing, breaking, and one for each kind of space."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple


class Guess(gymnasium.Env[Any, Any]):
    """Says which of two actions is right; `length` steps an episode, a reward of 1 for each right one.

    A step takes `seconds`, as a real environment's does: ranks that train at full speed leave no core to a test that
    only waits for something to happen beside it.
    """

    observation_space = Box(-1.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 4, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds
        self.steps = self.total = 0

    def _show(self) -> Any:
        self.right = int(self.np_random.integers(2))
        return np.array([self.right, 1 - self.right], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.seconds:
            time.sleep(self.seconds)
        self.steps += 1
        self.total += 1
        reward = float(action == self.right)
        return self._show(), reward, self.steps >= self.length, False, {}


class Resetting(Guess):
    """Adds a line to the file RESETS for each reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with Path(os.environ["RESETS"]).open("a") as file:
            print(os.getpid(), file=file)
        return super().reset(seed=seed, options=options)


class Loud(Guess):
    """Prints megabytes without an end of line, once in each process."""

    said = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not Loud.said:
            Loud.said = True
            print("x" * 3_000_000, end="", flush=True)
        return super().reset(seed=seed, options=options)


class Breaking(Guess):
    """Breaks at step `at` of its process: `how` says in which way. With a folder in BREAKS_IN, the first that comes
    there breaks, and no other: the tests look at who goes on.
    """

    def __init__(self, how: str, at: int = 30, seconds: float = 0.0) -> None:
        super().__init__(seconds=seconds)
        self.how, self.at = how, at

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        shown, reward, terminated, truncated, info = super().step(action)
        if self.total < self.at or not self._is_first():
            return shown, reward, terminated, truncated, info
        match self.how:
            case "crash":
                raise ValueError("the simulator fell over\nand said more than a line")
            case "exit":
                raise SystemExit("the simulator has enough")
            case "hang":
                threading.Event().wait()
            case "spin":
                while True:
                    pass
            case "nan":
                shown[1] = np.nan
            case "reward":
                reward = float("inf")
            case "shape":
                shown = np.zeros(3, np.float32)
            case "dtype":
                shown = np.array(["left", "right"])
        return shown, reward, terminated, truncated, info

    def _is_first(self) -> bool:
        if not (folder := os.environ.get("BREAKS_IN")):
            return True
        try:
            (Path(folder) / "broken").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


IMAGE = Box(0, 255, (36, 36), np.uint8)


class Match(gymnasium.Env[Any, Any]):
    """Shows one of two sides, in a space called `shown`, and pays 1 for an action, in a space called `acted`, that is
    all on this side; less for one that is so in part. Episodes of `length` steps.
    """

    shows: ClassVar[dict[str, Any]] = {
        "box": Box(-1.0, 1.0, (2,), np.float64),
        "cube": Box(-1.0, 1.0, (2, 1, 3), np.float16),
        "bytes": Box(0, 255, (4,), np.uint8),
        "discrete": Discrete(2, start=7),
        "multidiscrete": MultiDiscrete([2, 3]),
        "multibinary": MultiBinary(2),
        "dict": Dict(side=Discrete(2), noise=Box(-1.0, 1.0, (2,), np.float64)),
        "tuple": Tuple((MultiBinary(2), Dict(deep=Discrete(2)))),
        "pixels": IMAGE,
        "rgb": Box(0, 255, (60, 50, 3), np.uint8),
        "mixed": Dict(noise=Box(-1.0, 1.0, (2,), np.float32), picture=IMAGE, zero=Discrete(2)),
    }
    acts: ClassVar[dict[str, Any]] = {
        "discrete": Discrete(2, start=3),
        "multidiscrete": MultiDiscrete([2, 2, 2], start=[0, 1, -1]),
        "multibinary": MultiBinary((2, 1)),
        "box": Box(np.array([-4.0, 0.0]), np.array([0.0, 10.0]), dtype=np.float64),
    }

    def __init__(self, shown: str = "box", acted: str = "discrete", length: int = 4) -> None:
        self.shown, self.acted, self.length = shown, acted, length
        self.observation_space, self.action_space = self.shows[shown], self.acts[acted]

    def _show(self) -> Any:
        self.side = side = int(self.np_random.integers(2))
        both = np.array([side, 1 - side])
        match self.shown:
            case "box" | "multibinary":
                return both.astype(self.observation_space.dtype)
            case "cube":
                return np.full((2, 1, 3), side, np.float16)
            case "bytes":
                return np.full(4, 255 * side, np.uint8)
            case "discrete":
                return 7 + side
            case "multidiscrete":
                return np.array([side, 2])
            case "dict":
                return {"side": side, "noise": self.np_random.uniform(-1, 1, 2)}
            case "tuple":
                return both.astype(np.int8), {"deep": side}
        picture = np.zeros(self.shows["rgb" if self.shown == "rgb" else "pixels"].shape, np.uint8)
        half = picture.shape[1] // 2
        picture[:, half:] = 255 * side
        picture[:, :half] = 255 * (1 - side)
        if self.shown == "mixed":
            return {"noise": self.np_random.uniform(-1, 1, 2).astype(np.float32), "picture": picture, "zero": 0}
        return picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        space = self.action_space
        if action not in space:
            raise ValueError(f"{action!r} is not in {space}")
        self.steps += 1
        if isinstance(space, Box):
            part = (np.asarray(action) - space.low) / (space.high - space.low)  # of the way from low to high
        else:
            part = np.asarray(action) - getattr(space, "start", 0)
        reward = 1.0 - float(np.abs(part - self.side).mean())
        return self._show(), reward, self.steps >= self.length, False, {}


class Talks(Guess):
    """Observations that no policy is made for."""

    observation_space = Text(5)


gymnasium.register("Talks-v0", Talks)
gymnasium.register("Loud-v0", Loud, reward_threshold=1000.0, kwargs={"seconds": 0.0005})
gymnasium.register("Quick-v0", Guess, reward_threshold=3.6)
gymnasium.register("Endless-v0", Guess, reward_threshold=1000.0, kwargs={"seconds": 0.008})
gymnasium.register("Resetting-v0", Resetting, reward_threshold=1e9, kwargs={"length": 10**9, "seconds": 0.002})
gymnasium.register("NoThreshold-v0", Guess)
gymnasium.register("Easy-v0", Guess, reward_threshold=0.0)

for way in ("crash", "exit", "hang", "spin", "nan", "reward", "shape", "dtype"):
    gymnasium.register(f"Breaks-{way}-v0", Breaking, reward_threshold=1000.0, kwargs={"how": way, "seconds": 0.0005})
for name in Match.shows:
    gymnasium.register(f"Shows-{name}-v0", Match, reward_threshold=3.6, kwargs={"shown": name})
for name in Match.acts:
    gymnasium.register(f"Acts-{name}-v0", Match, reward_threshold=3.6, kwargs={"acted": name})
