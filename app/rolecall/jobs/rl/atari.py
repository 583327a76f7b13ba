"""Atari's games: the Arcade Learning Environment steps them together, in C++, with their usual preprocessing.

The last four frames, grey and of 84 x 84 pixels, each of them the maximum of the last two of four that an action is
repeated for; up to 30 no-ops and, where a game needs it, the fire button at an episode's start (Mnih et al. 2015).
Rewards are as they are, and a lost life is no end.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from rolecall import UsageError

SKIP = 4  # frames that an action is repeated for
SCREEN = 84  # pixels a side
STACK = 4  # frames
NOOPS = 30  # most actions without effect at an episode's start
# arguments that the vector implementation has as well
KNOWN = {"game", "repeat_action_probability", "full_action_space", "frameskip", "max_num_frames_per_episode",
         "continuous", "continuous_action_threshold"}  # fmt: skip


def register(name: str) -> None:
    """Registers the games where `name` may be one of them. Raises UsageError where it is, and ale-py is missing."""
    if importlib.util.find_spec("ale_py"):
        importlib.import_module("ale_py")
    elif name.startswith("ALE/"):
        raise UsageError(f"ENV_ID={name}: needs the package ale-py: pip install ale-py")


def fits(spec: EnvSpec) -> bool:
    """Whether `spec` is a game whose arguments the vector implementation takes."""
    return (
        spec.entry_point == "ale_py.env:AtariEnv"
        and set(spec.kwargs) <= KNOWN
        and type(spec.kwargs.get("frameskip", SKIP)) is int
        and spec.max_episode_steps is None
        and not spec.additional_wrappers
    )


def vector(spec: EnvSpec, num_envs: int, threads: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
    """`num_envs` games that `threads` threads step; None where `spec` is no such game.

    Ids without frame skipping skip as the others do: their name says that the emulator itself does not.
    """
    if not fits(spec):
        return None
    kwargs = spec.kwargs
    frameskip = kwargs.get("frameskip", SKIP)
    envs = importlib.import_module("ale_py.vector_env").AtariVectorEnv(
        num_envs=num_envs,
        num_threads=min(threads, num_envs),
        reward_clipping=False,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        img_height=SCREEN,
        img_width=SCREEN,
        stack_num=STACK,
        noop_max=NOOPS,
        **{**kwargs, "frameskip": SKIP if frameskip == 1 else frameskip},
    )
    envs.spec = spec
    return envs  # type: ignore[no-any-return]


class Fire(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses the fire button at an episode's start, in games that have one."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """As the environment's own, with a step more."""
        observation, info = self.env.reset(**arguments)
        meanings = self.get_wrapper_attr("get_action_meanings")()
        if len(meanings) > 1 and meanings[1] == "FIRE":
            observation, _, terminated, truncated, info = self.env.step(1)
            if terminated or truncated:
                observation, info = self.env.reset()
        return observation, info


def single(spec: EnvSpec, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """One game with the same preprocessing, which can be rendered. Raises ImportError where OpenCV is missing."""
    frameskip = spec.kwargs.get("frameskip", SKIP)
    env = gymnasium.make(spec, disable_env_checker=True, **{**arguments, "frameskip": 1})
    try:
        screen = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=NOOPS, frame_skip=SKIP if frameskip == 1 else frameskip, screen_size=SCREEN
        )
    except gymnasium.error.DependencyNotInstalled:
        raise ImportError("images need OpenCV: pip install opencv-python-headless") from None
    return gymnasium.wrappers.FrameStackObservation(Fire(screen), STACK)
