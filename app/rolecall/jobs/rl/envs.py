"""Makes vectors of environments in gymnasium's next-step autoreset mode, with observations as they are sent.

In this mode, the step after the end of an episode resets: its action is ignored, its reward is 0, and it is no
experience.

Shapes: n are the environments of a group, ... an observation's own shape.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, atari
from rolecall.jobs.rl.messages import Array
from rolecall.jobs.rl.spaces import Spaces, is_image, read, shown

# of a rollout that waits for the end of an episode: most episodes are far shorter, but some have no end
MAX_ROLLOUT_STEPS = 20_000
Env = gymnasium.Env[Any, Any]
VectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]


class Description(NamedTuple):
    """The spaces of an environment, the return at which it counts as solved, if it has one, and the maximum steps of an
    episode, 0 if they are not bounded.
    """

    spaces: Spaces
    threshold: float | None
    longest: int


class WrongAnswerError(ValueError):
    """An environment returned a value that is not in its spaces; the text describes the value."""


def checked(seen: Any, shape: tuple[int, ...], dtype: Any, name: str) -> Array:
    """`seen`, which errors call `name`, as an array. Raises WrongAnswerError if it has another shape, or a dtype that
    `dtype` cannot hold.
    """
    array: Any = seen if isinstance(seen, np.ndarray | np.generic) else np.asarray(seen, dtype)
    if array.shape != shape:
        raise WrongAnswerError(f"{name} of shape {array.shape}, not {shape}")
    if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise WrongAnswerError(f"{name} of dtype {array.dtype}, not {dtype}")
    return array  # type: ignore[no-any-return]


class Singles(gymnasium.vector.SyncVectorEnv):
    """Environments stepped one after the other, with observations of `space`. `at` is the number of the current one.

    Errors of an environment pass. WrongAnswerError is raised for an observation that `space` cannot hold.
    """

    def __init__(self, envs: Sequence[Env], space: Box) -> None:
        self.at = 0
        numbered = [functools.partial(_Numbered, self, number, env, space) for number, env in enumerate(envs)]
        super().__init__(numbered, copy=False)
        self.spec = envs[0].spec


class _Numbered(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment `number` of a group, with observations of `space`; those of other spaces are flattened."""

    def __init__(self, group: Singles, number: int, env: Env, space: Box) -> None:
        super().__init__(env if isinstance(env.observation_space, Box) else gymnasium.wrappers.FlattenObservation(env))
        self.group, self.number, self.observation_space = group, number, space
        self._shape, self._dtype = space.shape, space.dtype

    def reset(self, **arguments: Any) -> tuple[Array, dict[str, Any]]:
        """See `gymnasium.Env.reset`."""
        self.group.at = self.number
        return checked(self.env.reset(**arguments)[0], self._shape, self._dtype, "an observation"), {}

    def step(self, action: Any) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; without the infos, whose collection takes long."""
        self.group.at = self.number
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return checked(observation, self._shape, self._dtype, "an observation"), reward, terminated, truncated, {}


def make(settings: RlSettings, num_envs: int, render: bool = False) -> tuple[VectorEnv, Spaces]:
    """`num_envs` environments that are stepped together, and their spaces.

    The environment's own vector implementation is used if it resets in the next step and its observations need no
    change. With `render`, they are `Singles` that render RGB pictures, [height, width, 3] uint8.

    Raises UsageError for an id that does not exist, environments that cannot be made or differ in their spaces, and
    spaces without a policy.
    """
    name = f"ENV_ID={settings.env_id}"
    with UsageError.wrap(f"{name}: cannot be made"):
        spec = spec_of(settings.env_id)
        if spec is not None and not settings.wrappers and not render:
            envs = atari.vector(spec, num_envs, settings.cpu_threads) or _vector(spec, num_envs)
            if envs is not None:
                return envs, read(envs.single_observation_space, envs.single_action_space, name)
        singles: list[Env] = []
        try:
            while len(singles) < num_envs:
                singles.append(env := _single(settings, spec or settings.env_id, render))
                for space in ("observation_space", "action_space"):  # `Singles` would have them all alike
                    seen, wanted = getattr(env, space), getattr(singles[0], space)
                    if seen != wanted:
                        text = f"makes environments of different spaces, {shown(seen)}, {shown(wanted)}"
                        raise UsageError(f"{name}: {text}")
            spaces = read(singles[0].observation_space, singles[0].action_space, name)
            return Singles(singles, spaces.observation), spaces
        except BaseException:
            for env in singles:
                env.close()
            raise


def describe(settings: RlSettings) -> Description:
    """Describes ENV_ID. Raises UsageError as `make` does."""
    envs, spaces = make(settings, 1)
    threshold, longest = (envs.spec.reward_threshold, envs.spec.max_episode_steps) if envs.spec else (None, None)
    envs.close()
    return Description(spaces, None if threshold is None else float(threshold), longest or 0)


def group_sizes(num_envs: int, inference: str) -> list[int]:
    """Environments in each group of an observer: two groups, so that one steps while the agent computes the actions of
    the other; one group if the observer computes them.
    """
    return [num_envs] if num_envs == 1 or inference == "observer" else [num_envs - num_envs // 2, num_envs // 2]


def spec_of(env_id: str) -> EnvSpec | None:
    """The registered environment `env_id`, perhaps of a module in the working directory; None if there is none."""
    module, colon, name = env_id.rpartition(":")
    if colon:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        importlib.import_module(module)
    elif name not in gymnasium.registry:
        atari.register(name)
    namespace, title, version = parse_env_id(name)
    if version is None and (latest := find_highest_version(namespace, title)) is not None:
        name = get_env_id(namespace, title, latest)
    return gymnasium.registry.get(name)


def _vector(spec: EnvSpec, num_envs: int) -> VectorEnv | None:
    """The environment's own vector implementation; None if it has none that can be used."""
    if spec.vector_entry_point is None or spec.additional_wrappers:  # make_vec refuses these
        return None
    envs = gymnasium.make_vec(spec, num_envs=num_envs)
    space = envs.single_observation_space
    if envs.metadata.get("autoreset_mode") == AutoresetMode.NEXT_STEP and isinstance(space, Box) and not _is_rgb(space):
        return envs
    envs.close()
    return None


def _single(settings: RlSettings, spec: EnvSpec | str, render: bool) -> Env:
    """One environment, with WRAPPERS or those of RGB images."""
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    if render and not settings.wrappers and isinstance(spec, EnvSpec) and atari.fits(spec):
        return atari.single(spec, **mode)
    # `Envs` checks at every step what gymnasium's checker tests at the first
    env: Env = gymnasium.make(spec, disable_env_checker=True, **mode)
    if settings.wrappers:
        env = settings.build("wrappers", env)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"WRAPPERS={settings.wrappers}: returns a {type(env).__name__}, not an environment")
    elif isinstance(env.observation_space, Box) and _is_rgb(env.observation_space):
        env = _stacked(env)
    return env


def _is_rgb(space: Box) -> bool:
    rgb = is_image(space) and len(space.shape) == 3 and space.shape[2] == 3
    return rgb and bool((space.low == 0).all() and (space.high == 255).all())


def _stacked(env: Env) -> Env:
    """`env` with its newest pictures, small and grey: [STACKED_FRAMES, *SCREEN_PIXELS]."""
    wrappers = gymnasium.wrappers
    try:
        # resized first, because a large picture takes longer to convert to grey
        small = wrappers.ResizeObservation(env, (atari.SCREEN_PIXELS, atari.SCREEN_PIXELS))
    except gymnasium.error.DependencyNotInstalled:
        raise ImportError("images need OpenCV: pip install opencv-python-headless") from None
    return wrappers.FrameStackObservation(wrappers.GrayscaleObservation(small), atari.STACKED_FRAMES)
