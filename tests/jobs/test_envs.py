"""Environments: which are made and how, autoreset masks, dones, episodes and pictures."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode

from rolecall.errors import UsageError
from rolecall.jobs.rl import RlSettings, envs
from rolecall.jobs.rl.envs import Singles
from rolecall.jobs.rl.messages import Done
from rolecall.jobs.rl.stepping import Envs

BOTH = 3  # an environment may say that it terminated and was truncated
# environment -> its episodes, over and over: how many steps, and how they end
SCRIPTS = (
    ((3, Done.TERMINATED), (2, Done.TRUNCATED), (1, BOTH)),
    ((1, Done.TERMINATED),),
    ((4, Done.TRUNCATED), (1, Done.TRUNCATED)),
)
OBSERVATIONS = Box(-1e6, 1e6, (2,), np.float32)
START = 5


class Script:
    """Plays the episodes of one environment: it shows (episode, step) and pays 100 * episode + step + 1."""

    def __init__(self, number: int) -> None:
        self.episodes = SCRIPTS[number % len(SCRIPTS)]
        self.episode, self.at = -1, 0

    def reset(self) -> tuple[int, int]:
        self.episode, self.at = self.episode + 1, 0
        return self.episode, 0

    def step(self) -> tuple[tuple[int, int], float, int]:
        reward = 100.0 * self.episode + self.at + 1
        self.at += 1
        length, end = self.episodes[self.episode % len(self.episodes)]
        assert self.at <= length, "stepped beyond the episode's end"
        return (self.episode, self.at), reward, end if self.at == length else Done.CONTINUES


class Scripted(gymnasium.Env[Any, Any]):
    """One environment; the seed of its first reset is its number."""

    observation_space = OBSERVATIONS
    action_space = Discrete(3, start=START)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.script = Script(seed)
        return np.array(self.script.reset(), np.float32), {}

    def step(self, action: Any) -> Any:
        shown, reward, end = self.script.step()
        return np.array(shown, np.float32), reward, end in (Done.TERMINATED, BOTH), end in (Done.TRUNCATED, BOTH), {}


class ScriptedVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The same as a vector implementation, as unhelpful as it may be: it hands out its own buffer, and the step that
    resets pays something.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = OBSERVATIONS
    single_action_space = Discrete(3, start=START)

    def __init__(self, num_envs: int, **_: Any) -> None:
        self.num_envs = num_envs
        self.observation_space = gymnasium.vector.utils.batch_space(OBSERVATIONS, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.buffer = np.zeros((num_envs, 2), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.scripts = [Script(seed + number) for number in range(self.num_envs)]
        self.over = [False] * self.num_envs
        self.buffer[:] = [script.reset() for script in self.scripts]
        return self.buffer, {}

    def step(self, actions: Any) -> Any:
        rewards, dones = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        for number, script in enumerate(self.scripts):
            if self.over[number]:
                self.buffer[number], rewards[number] = script.reset(), 77
            else:
                self.buffer[number], rewards[number], dones[number] = script.step()
            self.over[number] = dones[number] != Done.CONTINUES
        return self.buffer, rewards, np.isin(dones, [Done.TERMINATED, BOTH]), np.isin(dones, [Done.TRUNCATED, BOTH]), {}


class SameStepVector(ScriptedVector):
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: Any) -> Any:
        raise AssertionError("a vector implementation that resets in the same step must not be used")


class SilentVector(SameStepVector):
    metadata: ClassVar[dict[str, Any]] = {}


class Growing(gymnasium.Env[Any, Any]):
    """Each one has larger observations or more actions than the one before."""

    differ, count, open = "", 0, 0

    def __init__(self) -> None:
        Growing.count += 1
        Growing.open += 1
        self.observation_space = Box(-1, 1, (Growing.count if Growing.differ == "observations" else 1,))
        self.action_space = Discrete(Growing.count if Growing.differ == "actions" else 2)

    def close(self) -> None:
        Growing.open -= 1


class Broken(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        raise RuntimeError("the simulator has no licence")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    before = set(gymnasium.registry)
    gymnasium.register("Scripted-v0", Scripted, reward_threshold=12.5)
    gymnasium.register("ScriptedVector-v0", Scripted, vector_entry_point=ScriptedVector)
    wrapper = gymnasium.wrappers.OrderEnforcing.wrapper_spec()
    gymnasium.register("Wrapped-v0", Scripted, vector_entry_point=ScriptedVector, additional_wrappers=(wrapper,))
    gymnasium.register("SameStep-v0", Scripted, vector_entry_point=SameStepVector)
    gymnasium.register("Silent-v0", Scripted, vector_entry_point=SilentVector)
    gymnasium.register("OnlySameStep-v0", vector_entry_point=SameStepVector)
    gymnasium.register("Unmade-v0", Broken)
    gymnasium.register("Pictures-v0", Pictures)
    gymnasium.register("Growing-v0", Growing)
    own = set(gymnasium.registry) - before
    yield
    for name in own:
        del gymnasium.registry[name]


EVERY_WAY = pytest.mark.parametrize(
    "env_id", ["Scripted-v0", "ScriptedVector-v0", "Wrapped-v0", "SameStep-v0", "Silent-v0"]
)
pytestmark = pytest.mark.filterwarnings("ignore:.*AutoresetMode metadata")


def setup(env_id: str, **others: Any) -> RlSettings:
    return RlSettings(env_id=env_id, **others)


def group_of(env_id: str, count: int, seed: int = 0, **others: Any) -> Envs:
    return Envs(setup(env_id, **others), count, seed)


class Rolled(NamedTuple):
    """observations [T+1, n, ...], rewards, dones and experience [T, n]."""

    observations: Any
    rewards: Any
    dones: Any
    experience: Any


def rows_of(number: int, steps: int) -> list[tuple[tuple[int, int], float, int, bool]]:
    """What environment `number` shows after each step, its reward and end, and whether the step was experience."""
    script = Script(number)
    script.reset()
    rows: list[tuple[tuple[int, int], float, int, bool]] = []
    over = False
    for _ in range(steps):
        if over:
            rows.append((script.reset(), 0.0, Done.CONTINUES, False))
            over = False
        else:
            shown, reward, end = script.step()
            rows.append((shown, reward, Done.TERMINATED if end == BOTH else end, True))
            over = end != Done.CONTINUES
    return rows


def roll(group: Envs, steps: int) -> Rolled:
    seen = [(group.observations, group.rewards, group.dones)]
    for step in range(steps):
        group.step(np.full(len(group.dones), step % 2, np.int64))
        seen.append((group.observations, group.rewards, group.dones))
    observations, rewards, dones = (np.stack(column) for column in zip(*seen, strict=True))
    return Rolled(observations, rewards[1:], dones[1:], dones[:-1] == Done.CONTINUES)


@EVERY_WAY
@pytest.mark.parametrize("split", [0, 1, 3, 4, 11])
def test_a_trajectory_is_what_happened(env_id: str, split: int) -> None:
    """In one rollout or in two, whether or not an episode dones where the first stops."""
    steps, group = 12, group_of(env_id, 3)
    parts = [roll(group, length) for length in (split, steps - split) if length]
    expected = [rows_of(number, steps) for number in range(3)]
    for column, name in enumerate(("observations", "rewards", "dones", "experience")):
        wanted = np.array([[row[column] for row in rows] for rows in expected]).swapaxes(0, 1)
        shown = [getattr(part, name)[1:] if column == 0 else getattr(part, name) for part in parts]
        np.testing.assert_array_equal(np.concatenate(shown), wanted, err_msg=name)
    np.testing.assert_array_equal(parts[0].observations[0], [[0, 0]] * 3)
    for earlier, later in itertools.pairwise(parts):
        np.testing.assert_array_equal(earlier.observations[-1], later.observations[0])


@EVERY_WAY
def test_episodes_are_whole_across_rollouts(env_id: str) -> None:
    group = group_of(env_id, 3)
    taken = []
    for length in (1, 2, 3, 1, 5):
        roll(group, length)
        taken.append(sorted(group.take_episodes()))
    expected: list[list[tuple[float, int]]] = [[] for _ in taken]
    bounds = np.cumsum((1, 2, 3, 1, 5))
    for number in range(3):
        total, steps = 0.0, 0
        for step, (_, reward, end, experience) in enumerate(rows_of(number, 12)):
            total, steps = total + reward, steps + experience
            if end != Done.CONTINUES:
                expected[int(np.searchsorted(bounds, step, side="right"))].append((total, steps))
                total, steps = 0.0, 0
    assert taken == [sorted(part) for part in expected]
    assert any(len(part) > 1 for part in taken)
    assert group.take_episodes() == []


@EVERY_WAY
def test_arrays_of_earlier_steps_do_not_change(env_id: str) -> None:
    group = group_of(env_id, 3)
    seen = []
    for _ in range(6):
        seen.append([(array, array.copy()) for array in (group.observations, group.rewards, group.dones)])
        group.step(np.zeros(3, np.int64))
    assert all(np.array_equal(array, before) for step in seen for array, before in step)


def test_a_vector_implementation_is_used_only_if_it_resets_in_the_next_step() -> None:
    assert isinstance(envs.make(setup("ScriptedVector-v0"), 2)[0].unwrapped, ScriptedVector)
    for name in ("Scripted-v0", "SameStep-v0", "Silent-v0"):
        group, _ = envs.make(setup(name), 2)
        assert isinstance(group, Singles)
        assert group.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        assert group.num_envs == 2


@pytest.mark.parametrize("shown", [Box(0, 255, (120, 100, 3), np.uint8), Dict(word=Discrete(2))], ids=str)
def test_a_vector_implementation_is_used_only_if_its_observations_need_no_change(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedVector, "single_observation_space", shown)
    assert isinstance(envs.make(setup("ScriptedVector-v0"), 2)[0], Singles)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_seed_makes_the_same_episodes(env_id: str) -> None:
    def run(seed: int) -> Any:
        group = group_of(env_id, 4, seed)
        shape, dtype = group.spaces.action_shape, group.spaces.action_dtype
        shown = [group.observations]
        for _ in range(40):
            group.step(np.ones((4, *shape), dtype))
            shown.append(group.observations)
        return np.stack(shown)

    first, again, other = run(3), run(3), run(4)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[:, 0], first[:, 1])


@pytest.mark.parametrize(
    ("count", "inference", "sizes"),
    [(1, "agent", [1]), (2, "agent", [1, 1]), (5, "agent", [3, 2]), (64, "agent", [32, 32]), (64, "observer", [64])],
)
def test_groups(count: int, inference: str, sizes: list[int]) -> None:
    assert envs.group_sizes(count, inference) == sizes


# ---- which environments


@pytest.mark.parametrize(
    "env_id",
    [
        "NoSuchThing-v0",
        "Scripted-v99",
        "no such id",
        "no_such_module:Scripted-v0",
        ":",
        ":Scripted-v0",
        "a:b:c",
        ".relative:Scripted-v0",
        "OnlySameStep-v0",
        "Unmade-v0",
        "raises_when_imported:X-v0",
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(
    env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_when_imported.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = {"Unmade-v0": "the simulator has no licence", "raises_when_imported:X-v0": "undefined_name"}
    with pytest.raises(UsageError, match=reason.get(env_id, "")) as refusal:
        envs.make(setup(env_id), 2)
    assert f"ENV_ID={env_id}:" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("space", ["observations", "actions"])
def test_environments_of_different_spaces_are_refused(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    monkeypatch.setattr(Growing, "differ", space)
    monkeypatch.setattr(Growing, "count", 0)
    monkeypatch.setattr(Growing, "open", 0)
    with pytest.raises(UsageError, match=r"^ENV_ID=Growing-v0: makes environments of different spaces, (Box|Discrete)"):
        envs.make(setup("Growing-v0"), 3)
    assert not Growing.open, "they are closed"


def test_a_module_to_import_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import gymnasium
        gymnasium.register("Imported-v0", "gymnasium.envs.classic_control:CartPoleEnv", reward_threshold=3)
    """
    (tmp_path / "registers_an_environment.py").write_text(textwrap.dedent(source))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="ENV_ID=Imported-v0"):
        envs.make(setup("Imported-v0"), 2)
    group = group_of("registers_an_environment:Imported-v0", 2)
    group.step(np.zeros(2, np.int64))
    assert group.observations.shape == (2, 4)
    assert envs.describe(setup("registers_an_environment:Imported-v0")).threshold == 3


def test_threshold_of_an_environment() -> None:
    assert envs.describe(setup("Scripted-v0")).threshold == 12.5
    assert envs.describe(setup("ScriptedVector-v0")).threshold is None
    assert envs.describe(setup("CartPole-v1")).threshold == 475


# ---- wrappers


def doubled(env: Any) -> Any:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)


def no_environment(env: Any) -> Any:
    return env.observation_space


def raising(env: Any) -> Any:
    raise ValueError("no wrapper today")


@pytest.mark.parametrize("env_id", ["Scripted-v0", "ScriptedVector-v0"])
def test_the_users_wrappers_are_around_each_environment(env_id: str) -> None:
    plain = roll(group_of("Scripted-v0", 3), 8)
    wrapped = roll(group_of(env_id, 3, wrappers=f"{__name__}:doubled"), 8)
    assert plain.rewards.any()
    assert np.array_equal(wrapped.rewards, 2 * plain.rewards)
    assert np.array_equal(wrapped.observations, plain.observations)


@pytest.mark.parametrize(
    ("wrappers", "problem"),
    [
        ("no_environment", "returns a Box, not an environment"),
        ("raising", r"raised an error \(ValueError: no wrapper today\)"),
        ("nothing", "cannot be imported"),
        ("OBSERVATIONS", "is not callable"),
    ],
)
def test_wrappers_that_are_none_are_refused(wrappers: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"^WRAPPERS={__name__}:{wrappers}: {problem}"):
        envs.make(setup("Scripted-v0", wrappers=f"{__name__}:{wrappers}"), 2)


class Pictures(gymnasium.Env[Any, Any]):
    """Shows a picture of one colour, the brighter the later."""

    observation_space = Box(0, 255, (120, 100, 3), np.uint8)
    action_space = Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, shape: tuple[int, ...] = (120, 100, 3), render_mode: str | None = None) -> None:
        self.observation_space, self.render_mode = Box(0, 255, shape, np.uint8), render_mode

    def show(self) -> Any:
        return np.full(self.observation_space.shape, 20 * self.at, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = 1
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.show(), 1.0, self.at == 6, False, {}

    def render(self) -> Any:
        return np.full((8, 9, 3), self.at, np.uint8)


def test_pictures_are_stacked_small_and_grey() -> None:
    group = group_of("Pictures-v0", 2)
    assert group.spaces.image
    assert group.observations.shape == (2, 4, 84, 84)
    shown = [group.observations]
    for _ in range(6):
        group.step(np.zeros(2, np.int64))
        shown.append(group.observations)
    levels = np.stack(shown)[:, 0, :, 40, 40] / 20
    expected = [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [1, 1, 1, 1]]
    assert np.abs(levels - expected).max() < 0.1
    assert len(np.unique(levels)) > 4


@pytest.mark.parametrize("shape", [(84, 84), (4, 84, 84), (84, 84, 4), (84, 84, 1), (20, 20, 3)])
def test_other_pictures_stay_as_they_are(shape: tuple[int, ...]) -> None:
    gymnasium.registry["Pictures-v0"].kwargs["shape"] = shape
    try:
        group = group_of("Pictures-v0", 2)
    finally:
        del gymnasium.registry["Pictures-v0"].kwargs["shape"]
    assert group.observations.shape == (2, *shape)
    assert group.observations.dtype == np.uint8


def test_pictures_stay_as_they_are_if_the_user_wraps() -> None:
    group = group_of("Pictures-v0", 2, wrappers=f"{__name__}:doubled")
    assert group.observations.shape == (2, 120, 100, 3)


def test_what_pictures_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UsageError, match=r"^ENV_ID=Pictures-v0: .*pip install opencv-python-headless"):
        envs.make(setup("Pictures-v0"), 1)


def test_the_first_environment_is_rendered() -> None:
    group = Envs(setup("Pictures-v0"), 2, 0, render=True)
    group.step(np.zeros(2, np.int64))
    assert np.array_equal(group.picture(), np.full((8, 9, 3), 2, np.uint8))


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (None, r"renders no RGB picture, but object of shape \(\)"),
        (np.zeros((8, 9), np.uint8), r"renders no RGB picture, but uint8 of shape \(8, 9\)"),
        (np.zeros((8, 9, 3)), r"renders no RGB picture, but float64 of shape \(8, 9, 3\)"),
        (
            OSError("no display"),
            r"cannot be rendered \(OSError: no display\); if a package is missing, .*'rolecall\[video\]'",
        ),
    ],
)
def test_an_environment_that_draws_no_picture_is_named(
    frame: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(self: Any) -> Any:
        if isinstance(frame, Exception):
            raise frame
        return frame

    monkeypatch.setattr(Pictures, "render", render)
    group = Envs(setup("Pictures-v0"), 1, 0, render=True)
    with pytest.raises(UsageError, match=f"^ENV_ID=Pictures-v0: {problem}$"):
        group.picture()
