"""Environments: autoreset masks, dones, returns, spaces, and the message of a step."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rolecall.config import UsageError
from rolecall.jobs.rl import envs
from rolecall.jobs.rl.envs import Envs, Recorder
from rolecall.jobs.rl.messages import Done, Trajectory, pack, unpack

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
    actions: ClassVar[list[Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.script = Script(seed)
        return np.array(self.script.reset(), np.float32), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
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


class OtherSpaces(gymnasium.Env[Any, Any]):
    """One with the spaces that it is given."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space, self.action_space = observation, action


class Broken(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        raise RuntimeError("the simulator has no licence")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    before = set(gymnasium.registry)
    gymnasium.register("Scripted-v0", Scripted, reward_threshold=12.5)
    gymnasium.register("ScriptedVector-v0", Scripted, vector_entry_point=ScriptedVector)
    gymnasium.register("SameStep-v0", Scripted, vector_entry_point=SameStepVector)
    gymnasium.register("Silent-v0", Scripted, vector_entry_point=SilentVector)
    gymnasium.register("OnlySameStep-v0", vector_entry_point=SameStepVector)
    gymnasium.register("Limited-v0", Scripted, max_episode_steps=2)
    gymnasium.register("Broken-v0", Broken)
    images, discrete = Box(0, 255, (4, 4, 3), np.uint8), Discrete(2)
    for name, observation, action in [
        ("Continuous-v0", images, Box(-1, 1, (1,))),
        ("Tabular-v0", discrete, discrete),
        ("Many-v0", images, gymnasium.spaces.MultiDiscrete([2, 2])),
        ("Words-v0", gymnasium.spaces.Dict(word=images), discrete),
    ]:
        gymnasium.register(name, OtherSpaces, kwargs={"observation": observation, "action": action})
    yield
    for name in set(gymnasium.registry) - before:
        del gymnasium.registry[name]


EVERY_WAY = pytest.mark.parametrize("env_id", ["Scripted-v0", "ScriptedVector-v0", "SameStep-v0", "Silent-v0"])
pytestmark = pytest.mark.filterwarnings("ignore:.*AutoresetMode metadata")


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


def roll(group: Envs, steps: int) -> Trajectory:
    recorder = Recorder(7)
    recorder.see(group.observations, group.rewards, group.dones)
    for step in range(steps):
        actions = np.full(len(group.dones), step % int(group.spaces[1].n), np.int64)
        recorder.choose(actions)
        group.step(actions)
        recorder.see(group.observations, group.rewards, group.dones)
    return recorder.trajectory()


@EVERY_WAY
@pytest.mark.parametrize("split", [0, 1, 3, 4, 11])
def test_a_trajectory_is_what_happened(env_id: str, split: int) -> None:
    """In one rollout or in two, whether or not an episode dones where the first stops."""
    steps, group = 12, Envs(env_id, 3, 0)
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
def test_the_step_after_an_end_is_no_experience_and_pays_nothing(env_id: str) -> None:
    trajectory = roll(Envs(env_id, 3, 0), 30)
    ended = trajectory.dones[:-1] != Done.CONTINUES
    assert ended.any()
    assert np.array_equal(~trajectory.experience[1:], ended)
    assert trajectory.experience[0].all()
    assert not trajectory.rewards[~trajectory.experience].any()
    assert (trajectory.rewards[trajectory.experience] > 0).all()
    assert not trajectory.dones[~trajectory.experience].any()


@EVERY_WAY
def test_returns_are_of_whole_episodes_across_rollouts(env_id: str) -> None:
    group = Envs(env_id, 3, 0)
    taken = []
    for length in (1, 2, 3, 1, 5):
        roll(group, length)
        taken.append(sorted(group.take_returns()))
    expected: list[list[float]] = [[] for _ in taken]
    bounds = np.cumsum((1, 2, 3, 1, 5))
    for number in range(3):
        total = 0.0
        for step, (_, reward, end, _) in enumerate(rows_of(number, 12)):
            total += reward
            if end != Done.CONTINUES:
                expected[int(np.searchsorted(bounds, step, side="right"))].append(total)
                total = 0.0
    assert taken == [sorted(part) for part in expected]
    assert any(len(part) > 1 for part in taken)
    assert group.take_returns() == []


def test_a_vector_implementation_is_used_only_where_it_resets_in_the_next_step() -> None:
    assert isinstance(envs.make("ScriptedVector-v0", 2).unwrapped, ScriptedVector)
    for name in ("Scripted-v0", "SameStep-v0", "Silent-v0"):
        group = envs.make(name, 2)
        assert isinstance(group, gymnasium.vector.SyncVectorEnv)
        assert group.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        assert group.num_envs == 2


def test_the_time_limit_truncates() -> None:
    trajectory = roll(Envs("Limited-v0", 1, 0), 3)
    assert trajectory.dones[:, 0].tolist() == [Done.CONTINUES, Done.TRUNCATED, Done.CONTINUES]
    assert trajectory.experience[:, 0].tolist() == [True, True, False]


def test_actions_count_from_the_spaces_start() -> None:
    Scripted.actions.clear()
    group = Envs("Scripted-v0", 1, 2)
    for action in (0, 2, 1):
        group.step(np.array([action]))
    assert Scripted.actions == [START, START + 2, START + 1]
    assert all(Scripted.action_space.contains(action) for action in Scripted.actions)
    assert group.spaces == (OBSERVATIONS, Discrete(3, start=START))


def test_shapes_and_types() -> None:
    trajectory = roll(Envs("Scripted-v0", 3, 0), 5)
    shapes = [column.shape for column in trajectory.arrays]
    assert shapes == [(6, 3, 2), (5, 3), (5, 3), (5, 3), (5, 3)]
    assert [column.dtype for column in trajectory.arrays] == [np.float32, np.int64, np.float32, np.uint8, np.bool_]
    assert trajectory.version == 7
    assert trajectory.actions[:, 0].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("seen", "chosen"), [(0, 0), (1, 0), (1, 1), (2, 0), (3, 1), (2, 2)])
def test_a_recorder_with_a_gap_makes_no_trajectory(seen: int, chosen: int) -> None:
    recorder = Recorder(0)
    for _ in range(seen):
        recorder.see(np.zeros((1, 2)), np.zeros(1), np.zeros(1, np.uint8))
    for _ in range(chosen):
        recorder.choose(np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=f"{seen} observations for {chosen} actions"):
        recorder.trajectory()


def test_the_same_seed_makes_the_same_episodes() -> None:
    def run(seed: int) -> Trajectory:
        return roll(Envs("CartPole-v1", 4, seed), 40)

    first, again, other = run(3), run(3), run(4)
    assert np.array_equal(first.observations, again.observations)
    assert not np.array_equal(first.observations, other.observations)
    assert not np.array_equal(first.observations[:, 0], first.observations[:, 1])


# ---- which environments


@pytest.mark.parametrize(
    "env_id",
    ["NoSuchThing-v0", "Scripted-v99", "no such id", "no_such_module:Scripted-v0", ":", ":Scripted-v0", "a:b:c",
     ".relative:Scripted-v0", "Broken-v0", "OnlySameStep-v0"],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(env_id: str) -> None:
    with pytest.raises(UsageError) as refusal:
        envs.make(env_id, 2)
    assert f"ENV_ID={env_id}:" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_reason_of_an_environment_that_raises_is_shown() -> None:
    with pytest.raises(UsageError, match=r"ENV_ID=Broken-v0.*the simulator has no licence"):
        envs.make("Broken-v0", 2)


@pytest.mark.parametrize("env_id", ["Continuous-v0", "Tabular-v0", "Many-v0", "Words-v0"])
def test_other_spaces_are_refused(env_id: str) -> None:
    with pytest.raises(UsageError, match=f"ENV_ID={env_id}: needs a Box observation and a Discrete action space, has"):
        envs.make(env_id, 2)


def test_a_module_to_import_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import gymnasium
        gymnasium.register("Imported-v0", "gymnasium.envs.classic_control:CartPoleEnv", reward_threshold=3)
    """
    (tmp_path / "registers_an_environment.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="ENV_ID=Imported-v0"):
        envs.make("Imported-v0", 2)
    group = Envs("registers_an_environment:Imported-v0", 2, 0)
    group.step(np.zeros(2, np.int64))
    assert group.observations.shape == (2, 4)
    assert envs.describe("registers_an_environment:Imported-v0").threshold == 3


def test_a_module_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_when_imported.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"ENV_ID=raises_when_imported:X-v0.*undefined_name"):
        envs.make("raises_when_imported:X-v0", 1)


def test_the_threshold_where_there_is_one() -> None:
    assert envs.describe("Scripted-v0").threshold == 12.5
    assert envs.describe("ScriptedVector-v0").threshold is None
    assert envs.describe("CartPole-v1").threshold == 475


# ---- the message of a step

DTYPES = st.sampled_from([np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64])
SHAPES = st.one_of(st.just(()), hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5))


@given(st.data(), DTYPES, SHAPES, st.integers(1, 6))
@settings(deadline=None, max_examples=200)
def test_unpack_is_the_inverse_of_pack(data: st.DataObject, dtype: Any, shape: tuple[int, ...], count: int) -> None:
    observations = data.draw(hnp.arrays(dtype, (count, *shape)))
    rewards = data.draw(hnp.arrays(np.float32, count))
    dones = data.draw(hnp.arrays(np.uint8, count, elements=st.integers(0, 2)))
    got = unpack(pack(observations, rewards, dones), shape, dtype)
    for received, sent in zip(got, (observations, rewards, dones), strict=True):
        assert (received.shape, received.dtype) == (sent.shape, sent.dtype)
        assert received.tobytes() == sent.tobytes()  # to the bit, NaN too
        assert not received.flags.writeable


def test_observations_in_another_order_in_memory() -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(5, 4, 3, 2).T
    received, *_ = unpack(pack(images, np.zeros(2, np.float32), np.zeros(2, np.uint8)), (3, 4, 5), np.uint8)
    assert np.array_equal(received, images)


@given(DTYPES, SHAPES, st.integers(1, 6), st.integers(1, 10_000))
@settings(deadline=None)
def test_a_message_of_another_length_is_refused(dtype: Any, shape: tuple[int, ...], count: int, extra: int) -> None:
    message = pack(np.zeros((count, *shape), dtype), np.zeros(count, np.float32), np.zeros(count, np.uint8))
    assume(extra % (len(message) // count))  # else it is a message of more environments
    with pytest.raises(ValueError, match="no whole number of observations"):
        unpack(message + bytes(extra), shape, dtype)
    with pytest.raises(ValueError, match="no whole number of observations"):
        unpack(message[:-1], shape, dtype)
