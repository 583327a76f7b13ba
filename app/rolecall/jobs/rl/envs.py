"""Makes vectors of environments in gymnasium's next-step autoreset mode, with observations as they are sent.

In this mode, the step after the end of an episode resets: its action is ignored, its reward is 0, and it is no
experience.

Shapes: n are the environments of a group, ... an observation's own shape.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rolecall import UsageError
from rolecall.jobs.rl import RlSettings, atari
from rolecall.jobs.rl.messages import Array
from rolecall.jobs.rl.spaces import Spaces, is_image, read, shown

# of a rollout that waits for the end of an episode: most episodes are far shorter, but some have no end
MAX_ROLLOUT_STEPS = 20_000
WRITE_SECONDS = 1.0  # limit for a line to standard error, whose reader may be stopped
SCREEN_PIXELS = (84, 84)  # Mnih et al. 2015
STACKED_FRAMES = 4
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


class Singles(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Environments stepped one after the other, with observations of `space`. `at` is the number of the current one.

    Each step returns new arrays. Errors of an environment pass. WrongAnswerError is raised for an observation of
    another shape or of a dtype that `space` cannot hold.
    """

    def __init__(self, envs: list[Env], space: Box) -> None:
        first = envs[0]
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.spec, self.render_mode = len(envs), first.spec, first.render_mode
        self.single_observation_space, self.single_action_space = space, first.action_space
        self.observation_space = batch_space(space, len(envs))
        self.action_space = batch_space(first.action_space, len(envs))
        self.envs, self.at = envs, 0
        self._shape, self._dtype = space.shape, space.dtype
        self._over = np.zeros(len(envs), np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Resets environment number i with the seed `seed` + i."""
        observations = np.empty((self.num_envs, *self._shape), self._dtype)
        for number, env in enumerate(self.envs):
            self.at = number
            observation, _ = env.reset(seed=None if seed is None else seed + number, options=options)
            self._take(observations, number, observation)
        self._over[:] = False
        return observations, {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Takes actions [n, ...]. Returns observations [n, ...], rewards [n] float64, and which environments terminated
        and which were truncated [n] bool.
        """
        n, over = self.num_envs, self._over
        observations = np.empty((n, *self._shape), self._dtype)
        rewards = np.zeros(n)
        terminated, truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for number, env in enumerate(self.envs):
            self.at = number
            if over[number]:
                observation, _ = env.reset()
            else:
                observation, rewards[number], terminated[number], truncated[number], _ = env.step(actions[number])
            self._take(observations, number, observation)
        self._over = terminated | truncated
        return observations, rewards, terminated, truncated, {}

    def _take(self, observations: Array, number: int, observation: Any) -> None:
        if not isinstance(observation, np.ndarray | np.generic):
            observation = np.asarray(observation, self._dtype)
        if observation.shape != self._shape:
            raise WrongAnswerError(f"an observation of shape {observation.shape}, not {self._shape}")
        if observation.dtype != self._dtype and not np.can_cast(observation.dtype, self._dtype, "same_kind"):
            raise WrongAnswerError(f"an observation of dtype {observation.dtype}, not {self._dtype}")
        observations[number] = observation

    def render(self) -> Any:
        """The picture of the first environment."""
        return self.envs[0].render()

    def close_extras(self, **_: Any) -> None:
        """Closes the environments."""
        for env in self.envs:
            env.close()


def make(settings: RlSettings, num_envs: int, render: bool = False) -> tuple[VectorEnv, Spaces]:
    """`num_envs` environments that are stepped together, and their spaces.

    The environment's own vector implementation is used if it resets in the next step and its observations need no
    change. A line on standard error tells if they are not made after ENV_TIMEOUT, because some load for minutes. With
    `render`, the `render()` of the vector is an RGB picture of the first one, [height, width, 3] uint8.

    Raises UsageError for an id that does not exist, environments that cannot be made, and spaces without a policy.
    """
    line = f"rolecall: ENV_ID={settings.env_id}: is not made after {settings.env_timeout:g} s; still waiting\n"
    timer = threading.Timer(settings.env_timeout, sys.stderr.write, [line])
    timer.daemon = True
    timer.start()
    try:
        return _make(settings, num_envs, render)
    finally:
        timer.cancel()
        timer.join(WRITE_SECONDS)


def _make(settings: RlSettings, num_envs: int, render: bool) -> tuple[VectorEnv, Spaces]:
    name = f"ENV_ID={settings.env_id}"
    with UsageError.wrap(f"{name}: cannot be made"):
        spec = _spec_of(settings.env_id)
        if spec is not None and not settings.wrappers and not render:
            envs = atari.vector(spec, num_envs, settings.cpu_threads) or _vector(spec, num_envs)
            if envs is not None:
                return envs, read(envs.single_observation_space, envs.single_action_space, name)
        return _singles(settings, spec or settings.env_id, num_envs, render)


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


def _spec_of(env_id: str) -> EnvSpec | None:
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


def _singles(settings: RlSettings, spec: EnvSpec | str, num_envs: int, render: bool) -> tuple[VectorEnv, Spaces]:
    name = f"ENV_ID={settings.env_id}"
    first = _single(settings, spec, render)
    envs = [first]
    try:
        spaces = read(first.observation_space, first.action_space, name)
        wrap: Callable[[Env], Env] = _same
        if not isinstance(first.observation_space, Box):
            wrap = gymnasium.wrappers.FlattenObservation
        elif not settings.wrappers and _is_rgb(first.observation_space):
            wrap = _stacked
        envs[0] = wrap(first)
        if wrap is _stacked:
            spaces = read(envs[0].observation_space, first.action_space, name)
        while len(envs) < num_envs:
            envs.append(env := wrap(_single(settings, spec, render)))
            for seen, wanted in ((env.observation_space, envs[0].observation_space), (env.action_space, spaces.action)):
                if seen != wanted:
                    raise UsageError(f"{name}: makes environments of different spaces, {shown(seen)}, {shown(wanted)}")
    except BaseException:
        for env in envs:
            env.close()
        raise
    return Singles(envs, spaces.observation), spaces


def _single(settings: RlSettings, spec: EnvSpec | str, render: bool) -> Env:
    """One environment, with WRAPPERS."""
    mode: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    if render and not settings.wrappers and isinstance(spec, EnvSpec) and atari.fits(spec):
        return atari.single(spec, **mode)
    # `Envs` checks at every step what gymnasium's checker tests at the first
    env: Env = gymnasium.make(spec, disable_env_checker=True, **mode)
    if settings.wrappers:
        env = settings.build("wrappers", env)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"WRAPPERS={settings.wrappers}: returns a {type(env).__name__}, not an environment")
    return env


def _same(env: Env) -> Env:
    return env


def _is_rgb(space: Box) -> bool:
    rgb = is_image(space) and len(space.shape) == 3 and space.shape[2] == 3
    return rgb and bool((space.low == 0).all() and (space.high == 255).all())


def _stacked(env: Env) -> Env:
    """`env` with its newest pictures, small and grey: [STACKED_FRAMES, *SCREEN_PIXELS]."""
    wrappers = gymnasium.wrappers
    try:
        # resized first, because a large picture takes longer to convert to grey
        small = wrappers.ResizeObservation(env, SCREEN_PIXELS)
    except gymnasium.error.DependencyNotInstalled:
        raise ImportError("images need OpenCV: pip install opencv-python-headless") from None
    return wrappers.FrameStackObservation(wrappers.GrayscaleObservation(small), STACKED_FRAMES)
