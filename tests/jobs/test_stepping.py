"""A group of environments: every kind of space, and what is said of one that breaks or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from rolecall import ProgramError
from rolecall.jobs.rl import RlSettings, stepping
from rolecall.jobs.rl.envs import Singles
from rolecall.jobs.rl.stepping import BrokenEnvError, Envs
from tests.integration.environments import Match

DEADLINE = 30.0  # seconds; a fail-safe, no measurement
VECTOR = Box(-1.0, 1.0, (2,), np.float32)


def setup(env_id: str, **others: Any) -> RlSettings:
    return RlSettings(env_id=env_id, **others)


# ---- every kind of space


@pytest.mark.parametrize("name", Match.shows)
def test_observations_are_those_of_the_environments(name: str) -> None:
    group = Envs(setup(f"Shows-{name}-v0"), 3, 7)
    space = group.spaces.observation
    mirrors = [gymnasium.make(f"Shows-{name}-v0") for _ in range(3)]
    shown = [mirror.reset(seed=7 + number)[0] for number, mirror in enumerate(mirrors)]
    for step in range(7):
        assert (group.observations.shape, group.observations.dtype) == ((3, *space.shape), space.dtype)
        for number, (observation, mirror) in enumerate(zip(shown, mirrors, strict=True)):
            assert group.observations[number] in space
            if name != "rgb":
                flat = observation
                if not isinstance(mirror.observation_space, Box):
                    flat = gymnasium.spaces.flatten(mirror.observation_space, observation)
                assert np.array_equal(group.observations[number], np.asarray(flat).astype(space.dtype))
        group.step(np.full(3, step % 2))
        for number, mirror in enumerate(mirrors):
            shown[number] = mirror.reset()[0] if step % 5 == 4 else mirror.step(3 + step % 2)[0]


@pytest.mark.parametrize("name", Match.acts)
def test_actions_become_those_of_the_environments(name: str) -> None:
    """Each is in the environment's space, or it raises; those of a policy from 0 on, or from -1 to 1, reach both ends
    of it: what they pay adds up to 1.
    """
    low, high = (Envs(setup(f"Acts-{name}-v0"), 4, 7) for _ in range(2))
    shape, dtype = low.spaces.action_shape, low.spaces.action_dtype
    least = -1 if low.spaces.continuous else 0
    for _ in range(4):
        low.step(np.full((4, *shape), least, dtype))
        high.step(np.full((4, *shape), 1, dtype))
        assert np.array_equal(low.observations, high.observations)
        assert (low.rewards + high.rewards == 1).all()
        assert set(low.rewards.tolist()) <= {0.0, 1.0}
    if name != "discrete":
        half = Envs(setup(f"Acts-{name}-v0"), 4, 7)
        actions = np.full((4, *shape), least, dtype)
        actions[:, 0] = 1
        half.step(actions)
        assert ((half.rewards > 0.1) & (half.rewards < 0.9)).all()


# ---- environments that break


class Vector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector implementation whose step returns `answer`: observations, rewards, terminated, truncated."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = VECTOR
    single_action_space = Discrete(2)
    good = (np.zeros((4, 2), np.float32), np.ones(4), np.zeros(4, bool), np.zeros(4, bool))
    answer: ClassVar[Any] = good

    def __init__(self, num_envs: int, **_: Any) -> None:
        self.num_envs = num_envs

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return *self.answer, {}


class Unready(gymnasium.Env[Any, Any]):
    """Cannot be reset: never, or once its first episode has ended."""

    observation_space, action_space = VECTOR, Discrete(2)

    def __init__(self, resets: int) -> None:
        self.resets = resets

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets -= 1
        if self.resets < 0:
            raise OSError("no simulator at port 1234")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Waits(gymnasium.Env[Any, Any]):
    """Waits in `step`, or in `reset`, for `go`."""

    observation_space, action_space = VECTOR, Discrete(2)
    waiting: ClassVar[str] = ""
    inside, go = threading.Event(), threading.Event()

    def wait(self, where: str) -> None:
        if self.waiting == where:
            self.inside.set()
            assert self.go.wait(DEADLINE)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.wait("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.wait("step")
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    before = set(gymnasium.registry)
    gymnasium.register("Vector-v0", vector_entry_point=Vector)
    gymnasium.register("Never-v0", Unready, kwargs={"resets": 0})
    gymnasium.register("Once-v0", Unready, kwargs={"resets": 1})
    gymnasium.register("Waits-v0", Waits)
    own = set(gymnasium.registry) - before
    yield
    for name in own:
        del gymnasium.registry[name]


def until_it_breaks(group: Envs, steps: int = 60) -> BrokenEnvError:
    def run() -> None:
        for _ in range(steps):
            group.step(np.zeros(len(group.dones), np.int64))

    with pytest.raises(BrokenEnvError) as broken:
        run()
    assert isinstance(broken.value, ProgramError)  # whose text is all that the user reads
    assert "\n" not in str(broken.value)
    return broken.value


WHERE = "environment 12, step 2 of episode 8, seed 102"


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("crash", "raised ValueError: the simulator fell over"),
        ("exit", "raised SystemExit: the simulator has enough"),
        ("nan", "returned an observation that is not finite"),
        ("reward", "returned a reward of inf"),
        ("shape", "returned an observation of shape (3,), not (2,)"),
        ("dtype", "returned an observation of dtype <U5, not float32"),
    ],
)
def test_one_that_breaks_is_named(way: str, what: str) -> None:
    group = Envs(setup(f"Breaks-{way}-v0"), 5, 100, first=10)
    assert isinstance(group._envs, Singles)
    for number in (0, 1, 3, 4):
        group._envs.envs[number].unwrapped.at = 1000  # type: ignore[attr-defined]
    broken = until_it_breaks(group)
    assert str(broken) == f"ENV_ID=Breaks-{way}-v0: {WHERE}: {what}"
    assert (type(broken.__cause__) in (ValueError, SystemExit)) is (way in ("crash", "exit"))  # its traceback


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_rewards_are_finite_as_they_are_learned_from(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.array([1.0, 1.0, value, 1.0])
    monkeypatch.setattr(Vector, "answer", (Vector.good[0], rewards, *Vector.good[2:]))
    with np.errstate(over="ignore"):
        broken = until_it_breaks(Envs(setup("Vector-v0"), 4, 5, first=4), 1)
    where = "environment 6, step 1 of episode 1, the group's seed 5"
    assert str(broken) == f"ENV_ID=Vector-v0: {where}: returned a reward of {value}"


GOOD = Vector.good
NAN = np.array([[0, 0], [0, np.nan], [0, 0], [np.inf, 0]], np.float32)


@pytest.mark.parametrize(
    ("answer", "where", "what"),
    [
        ((NAN, *GOOD[1:]), "environment 1, step 3 of episode 1", "returned an observation that is not finite"),
        ((NAN[:3], *GOOD[1:]), "", "returned observations of shape (3, 2), not (4, 2)"),
        ((NAN.astype("S3"), *GOOD[1:]), "", "returned observations of dtype |S3, not float32"),
        ((GOOD[0], np.ones((4, 1)), *GOOD[2:]), "", "returned rewards of shape (4, 1) and ends of (4,), not (4,)"),
        ((*GOOD[:2], True, False), "", "returned rewards of shape (4,) and ends of (), not (4,)"),
        (ZeroDivisionError(), "", "raised ZeroDivisionError"),
        (RuntimeError("x" * 1000), "", f"raised RuntimeError: {'x' * stepping.MAX_ERROR_LENGTH}"),
    ],
)
def test_of_a_vector_implementation_what_is_known_is_named(
    answer: Any, where: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Envs(setup("Vector-v0"), 4, 5)
    group.step(np.zeros(4, np.int64))
    group.step(np.zeros(4, np.int64))
    monkeypatch.setattr(Vector, "answer", answer)
    where = where or "environments 0 to 3, step 3 since their reset"
    assert str(until_it_breaks(group, 1)) == f"ENV_ID=Vector-v0: {where}, the group's seed 5: {what}"


def test_a_reset_that_fails_is_named() -> None:
    what = "raised OSError: no simulator at port 1234"
    with pytest.raises(BrokenEnvError) as broken:
        Envs(setup("Never-v0"), 2, 9, first=3)
    assert str(broken.value) == f"ENV_ID=Never-v0: environment 3, reset for episode 1, seed 9: {what}"
    broken_later = until_it_breaks(Envs(setup("Once-v0"), 2, 9, first=3), 2)
    assert str(broken_later) == f"ENV_ID=Once-v0: environment 3, reset for episode 2, seed 9: {what}"


def test_the_step_that_resets_may_pay_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Envs(setup("Vector-v0"), 4, 5)
    over = np.array([False, True, False, True])
    monkeypatch.setattr(Vector, "answer", (*GOOD[:2], over, np.zeros(4, bool)))
    group.step(np.zeros(4, np.int64))
    monkeypatch.setattr(Vector, "answer", (GOOD[0], np.array([2.0, np.nan, 3.0, np.inf]), *GOOD[2:]))
    group.step(np.zeros(4, np.int64))
    assert group.rewards.tolist() == [2, 0, 3, 0]


def test_a_reset_ends_the_episodes_and_counts_them_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an environment whose episode the last step ended."""
    group, over = Envs(setup("Vector-v0"), 4, 5), np.array([False, True, False, True])
    monkeypatch.setattr(Vector, "answer", (*GOOD[:2], over, np.zeros(4, bool)))
    group.step(np.zeros(4, np.int64))
    assert len(group.take_episodes()) == 2
    group.reset()
    assert not group.dones.any()
    monkeypatch.setattr(Vector, "answer", (GOOD[0], np.full(4, 3.0), ~over, np.zeros(4, bool)))
    group.step(np.zeros(4, np.int64))
    assert group.rewards.tolist() == [3] * 4
    assert group.take_episodes() == [(3.0, 1)] * 2


# ---- environments that hang


@pytest.fixture
def waits() -> Iterator[Callable[[str], None]]:
    Waits.inside.clear()
    Waits.go.clear()

    def set_where(where: str) -> None:
        Waits.waiting = where

    yield set_where
    Waits.waiting = ""
    Waits.go.set()


@pytest.mark.parametrize(("where", "told"), [("step", "step 2 of episode 1"), ("reset", "reset for episode 1")])
def test_one_that_hangs_is_named(waits: Callable[[str], None], where: str, told: str) -> None:
    lines: list[str] = []
    called = threading.Event()

    def on_hang(line: str) -> None:
        lines.append(line)
        called.set()

    def run() -> None:
        group = Envs(setup("Waits-v0", env_timeout=0.05), 2, 9, first=3, on_hang=on_hang)
        group.step(np.zeros(2, np.int64))
        waits("step")
        group.step(np.zeros(2, np.int64))
        group.close()

    if where == "reset":
        waits("reset")
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert called.wait(DEADLINE)
    finally:
        Waits.go.set()
        thread.join(DEADLINE)
    what = "has not returned within ENV_TIMEOUT=0.05 s"
    assert lines == [f"ENV_ID=Waits-v0: environment 3, {told}, seed 9: {what}"]


class Clock:
    """In place of `time`, for a watch that looks when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Looks:
    """In place of the event that ends a watch: each look is after the seconds that are given, and does what comes with
    them.
    """

    def __init__(self, clock: Clock, *looks: tuple[float, Callable[[], None]]) -> None:
        self.clock, self.looks, self.periods = clock, [*looks], list[float]()

    def wait(self, period: float) -> bool:
        self.periods.append(period)
        if not self.looks:
            return True
        seconds, happens = self.looks.pop(0)
        self.clock.now += seconds
        happens()
        return False


def watched(monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, str]) -> tuple[list[str], Looks]:
    """What a watch says of a group whose steps take at most 60 s: in each look a step begins, ends, or nothing."""
    group, lines, clock = Envs(setup("Vector-v0"), 4, 5), list[str](), Clock()
    monkeypatch.setattr(stepping, "time", clock)

    def begin() -> None:
        group._since = clock.now

    def end() -> None:
        group._since = float("inf")

    happens = {"begin": begin, "end": end, "": lambda: None}
    events = Looks(clock, *((seconds, happens[what]) for seconds, what in looks))
    stepping._watch(lambda: group, events, 60.0, lines.append)  # type: ignore[arg-type]
    return lines, events


def test_the_deadline_is_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(1.0, what) for _ in range(10) for what in ("begin", *[""] * 50, "end")]
    assert watched(monkeypatch, *steps)[0] == []
    lines, looks = watched(monkeypatch, (1.0, "begin"), *[(1.0, "")] * 100)
    assert len(lines) == 1
    assert len(looks.looks) == 100 - 61
    assert set(looks.periods) == {1.0}


def test_while_the_process_is_suspended_no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = watched(monkeypatch, (1.0, "begin"), *[(1.0, "")] * 50, (3600.0, ""), *[(1.0, "")] * 50, (1.0, "end"))
    assert lines == []
    lines, _ = watched(monkeypatch, (1.0, "begin"), (3600.0, ""), *[(1.0, "")] * 61)
    assert len(lines) == 1


def test_a_watch_ends_with_its_group() -> None:
    before = set(threading.enumerate())
    group = Envs(setup("Vector-v0", env_timeout=0.04), 4, 5)
    forgotten = Envs(setup("Vector-v0", env_timeout=0.04), 4, 5)
    watches = set(threading.enumerate()) - before
    assert len(watches) == 2
    group.close()
    del forgotten
    for watch in watches:
        watch.join(DEADLINE)
        assert not watch.is_alive()


def test_without_anything_else_the_process_ends(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    codes: list[int] = []
    monkeypatch.setattr(stepping.os, "_exit", codes.append)
    stepping.abandon("ENV_ID=X: hangs")
    assert codes == [stepping.HANG_EXIT_CODE]
    assert capfd.readouterr().err == "rolecall: ENV_ID=X: hangs\n"
