"""Atari games: the Arcade Learning Environment steps them in C++, with the usual preprocessing (Mnih et al. 2015).

An observation is the last four frames, grey and of 84 x 84 pixels. An action is repeated for four frames, and the
maximum of the last two is kept. An episode starts with up to 30 no-ops and, if the game needs it, the fire button.
Rewards are not clipped, and the loss of a life does not end an episode.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from rolecall.jobs.support import require_packages

FRAME_SKIP = 4  # frames that an action is repeated for
SCREEN_PIXELS = 84  # of a side
STACKED_FRAMES = 4
MAX_NOOPS = 30  # at the start of an episode


def register(name: str) -> None:
    """Registers the games if ale-py is installed. Raises UsageError if it is not and `name` is a game."""
    if name.startswith("ALE/"):
        require_packages(f"ENV_ID={name}", ["ale_py"], "atari")
    if importlib.util.find_spec("ale_py"):
        importlib.import_module("ale_py")


def fits(spec: EnvSpec) -> bool:
    """Whether `spec` is a game, and the vector implementation takes its arguments."""
    return (
        spec.entry_point == "ale_py.env:AtariEnv"
        and set(spec.kwargs) <= set(inspect.signature(_vector_class()).parameters)
        and type(spec.kwargs.get("frameskip", FRAME_SKIP)) is int
        and spec.max_episode_steps is None
        and not spec.additional_wrappers
    )


def vector(spec: EnvSpec, num_envs: int, threads: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
    """`num_envs` games that `threads` threads step; None if `spec` does not fit."""
    if not fits(spec):
        return None
    envs = _vector_class()(
        num_envs=num_envs,
        num_threads=min(threads, num_envs),
        reward_clipping=False,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        img_height=SCREEN_PIXELS,
        img_width=SCREEN_PIXELS,
        stack_num=STACKED_FRAMES,
        noop_max=MAX_NOOPS,
        **{**spec.kwargs, "frameskip": _frame_skip(spec)},
    )
    envs.spec = spec
    return envs  # type: ignore[no-any-return]


def _vector_class() -> Any:
    return importlib.import_module("ale_py.vector_env").AtariVectorEnv


def _frame_skip(spec: EnvSpec) -> int:
    """Frames that an action is repeated for. Ids whose emulator repeats none get the usual number too."""
    frame_skip: int = spec.kwargs.get("frameskip", FRAME_SKIP)
    return FRAME_SKIP if frame_skip == 1 else frame_skip


class Fire(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses the fire button at the start of an episode, in games that have one."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`; makes one more step."""
        observation, info = self.env.reset(**arguments)
        meanings = self.get_wrapper_attr("get_action_meanings")()
        if len(meanings) > 1 and meanings[1] == "FIRE":
            observation, _, terminated, truncated, info = self.env.step(1)
            if terminated or truncated:
                observation, info = self.env.reset()
        return observation, info


def single(spec: EnvSpec, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """One game with the same preprocessing, which can be rendered. Raises ImportError if OpenCV is missing."""
    env = gymnasium.make(spec, disable_env_checker=True, **{**arguments, "frameskip": 1})
    try:
        screen = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=MAX_NOOPS, frame_skip=_frame_skip(spec), screen_size=SCREEN_PIXELS
        )
    except gymnasium.error.DependencyNotInstalled:
        raise ImportError("images need OpenCV: pip install opencv-python-headless") from None
    return gymnasium.wrappers.FrameStackObservation(Fire(screen), STACKED_FRAMES)
