"""`rolecall eval rl`: fresh episodes under a saved policy, their statistics, and a video of the first one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from PIL import Image
from torch import Tensor, nn

from rolecall import ProgramError, UsageError, __main__
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.errors import FAILED
from rolecall.jobs import rl
from rolecall.jobs.rl import RlSettings, envs, evaluate, model, processes
from rolecall.jobs.rl.evaluate import GROUP_SIZE
from rolecall.jobs.rl.stepping import BrokenEnvError

HERE = "tests.jobs.test_rl_evaluate"
SIZE, EVEN = (33, 51), (52, 34)  # of pictures: height and width, both odd; of the video: width and height
LENGTH = 6


class Counted(gymnasium.Env[Any, Any]):
    """Pays an action that is the step's number modulo 2, and shows nothing of it but 3. Its pictures get brighter.

    The first episode of each environment has LENGTH steps, the others 1.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = Box(-10.0, 10.0, (1,), np.float32)
    action_space = Discrete(2)
    count = 0  # of environments
    seeds: ClassVar[list[int]] = []

    def __init__(self, render_mode: str | None = None, broken: bool = False) -> None:
        self.render_mode, self.broken = render_mode, broken
        self.length = self.steps = 0
        Counted.count += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            Counted.seeds.append(seed)
        self.length, self.steps = 1 if self.length else LENGTH, 0
        return np.array([3.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.broken and self.steps == 3:
            raise OSError("the wheel came off")
        reward = float(action == self.steps % 2)
        self.steps += 1
        return np.array([3.0], np.float32), reward, self.steps >= self.length, False, {}

    def render(self) -> Any:
        return np.full((*SIZE, 3), 40 * self.steps, np.uint8)


class Uneven(Counted):
    """Episodes of 2, 3 and 4 steps, in environments side by side."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        answer = super().reset(seed=seed)
        self.length = self.length if seed is None else 2 + seed % 3
        return answer


class Endless(Counted):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


class Paying(Counted):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float(action), *rest  # type: ignore[return-value]


class Meeting(Counted):
    """Is reset once another process has got there too."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        Path(f"at-{os.getpid()}").touch()
        deadline = time.monotonic() + 30
        while len(list(Path().glob("at-*"))) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("nobody else is here")
            time.sleep(0.01)
        return super().reset(seed=seed)


class Stuck(Counted):
    """Does not return from a step, after `first` has been called."""

    def first(self) -> None:
        pass

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.first()
        time.sleep(60)
        raise AssertionError("nobody has stopped it")


class Killed(Stuck):
    def first(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Interrupting(Stuck):
    def first(self) -> None:
        os.kill(os.getppid(), signal.SIGINT)


class Shared(Counted):
    """Pays what is drawn from the generators that a process has for everyone."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self.pay = random.randrange(10**4) + np.random.randint(10**4) * 10**-4
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([3.0], np.float32), self.pay, True, False, {}


class Invisible(Counted):
    metadata: ClassVar = {"render_modes": []}

    def render(self) -> Any:
        raise NotImplementedError


gymnasium.register("Counted-v0", Counted)
gymnasium.register("Uneven-v0", Uneven)
gymnasium.register("Endless-v1", Endless)
gymnasium.register("Paying-v0", Paying)
gymnasium.register("Meeting-v0", Meeting)
gymnasium.register("Stuck-v0", Stuck)
gymnasium.register("Killed-v0", Killed)
gymnasium.register("Interrupting-v0", Interrupting)
gymnasium.register("Invisible-v0", Invisible)
gymnasium.register("Shared-v0", Shared)
gymnasium.register("Wheel-v0", Counted, kwargs={"broken": True})


class Remembering(nn.Module):
    """The right action at each step, by the number of steps that it carries; `lean` is how sure of it it is."""

    state_size = 1

    def __init__(self, lean: float) -> None:
        super().__init__()
        self.lean = nn.Parameter(torch.tensor(lean))

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        odd = state % 2
        return torch.cat((1 - odd, odd), 1) * self.lean, state + 1


class Seeing(nn.Module):
    """Action 1 where what it sees is above 0."""

    def forward(self, observations: Tensor) -> Tensor:
        return torch.cat((-observations, observations), 1)


class Failing(nn.Module):
    """Passes the check with two observations."""

    def forward(self, observations: Tensor) -> Tensor:
        if len(observations) != 2:
            raise OSError("out of paper")
        return torch.zeros(2, 2)


def failing(observation: Any, action: Any) -> nn.Module:
    return Failing()


def remembering(observation: Any, action: Any) -> nn.Module:
    return Remembering(0.5)


def seeing(observation: Any, action: Any) -> nn.Module:
    return Seeing()


def shorter(env: Any) -> Any:
    return gymnasium.wrappers.TimeLimit(env, 2)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a directory of its own, without settings in the environment."""
    for name in RlSettings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Counted, "count", 0)
    Counted.seeds.clear()


def setup(env: str = "Counted-v0", policy: str = "remembering", **others: Any) -> RlSettings:
    given = {"env_id": env, "policy": f"{HERE}:{policy}" if policy else "", "normalize": False, "seed": 5, "threads": 1}
    return RlSettings(**{**given, **others})


def state_of(settings: RlSettings) -> dict[str, Any]:
    """What a checkpoint holds of a policy that has learned nothing."""
    return {"learner": {"model": model.build(settings, envs.describe(settings).spaces).state_dict()}}


def evaluated(settings: RlSettings, state: dict[str, Any] | None = None, **options: Any) -> dict[str, float]:
    return evaluate.evaluate(settings, state or state_of(settings), **options)


# ---- episodes


def test_the_most_probable_actions_of_a_policy_that_remembers() -> None:
    result = evaluated(setup(), episodes=7)
    assert result == {
        "episodes": 7,
        "mean_return": LENGTH,
        "std_return": 0.0,
        "min_return": LENGTH,
        "max_return": LENGTH,
        "mean_length": LENGTH,
        "unfinished_episodes": 0,
    }


def test_what_follows_an_episode_does_not_count() -> None:
    result = evaluated(setup("Uneven-v0"), episodes=3)
    assert (result["min_return"], result["mean_return"], result["max_return"]) == (2, 3, 4)
    assert result["std_return"] == pytest.approx((2 / 3) ** 0.5)
    assert result["mean_length"] == 3


def test_sampled_ones_vary_and_can_be_repeated() -> None:
    result = evaluated(setup(), episodes=50, deterministic=False)
    # each action is right with a probability of 0.62
    assert result["mean_return"] == pytest.approx(0.62 * LENGTH, abs=0.8)
    assert result["min_return"] < result["mean_return"] < result["max_return"]
    assert result["std_return"] > 0.5
    assert evaluated(setup(), episodes=50, deterministic=False) == result


@pytest.mark.parametrize("episodes", [1, GROUP_SIZE, 2 * GROUP_SIZE + 3])
def test_each_episode_has_an_environment_and_a_seed_of_its_own(episodes: int) -> None:
    """In those that follow in the same one, which are shorter here, nobody looks."""
    result = evaluated(setup(), episodes=episodes)
    assert (result["episodes"], result["mean_length"]) == (episodes, LENGTH)
    assert len(Counted.seeds) == len(set(Counted.seeds)) == episodes
    assert Counted.count <= episodes + 2  # those that only say what their spaces are


def test_unfinished_episodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MAX_EPISODE_STEPS", 9)
    result = evaluated(setup("Endless-v1"), episodes=4)
    assert (result["unfinished_episodes"], result["mean_return"], result["mean_length"]) == (4, 9, 9)


@pytest.mark.parametrize(("mean", "paid"), [(0.0, LENGTH), (5.0, 0)])
def test_observations_are_normalised_by_the_checkpoints_statistics(mean: float, paid: int) -> None:
    settings = setup("Paying-v0", "seeing", normalize=True)
    state = state_of(settings)
    state["learner"]["model"]["normalizer.mean"].fill_(mean)
    assert evaluated(settings, state, episodes=3)["mean_return"] == paid


@pytest.mark.parametrize("state", [{}, {"learner": {}}, {"learner": 3}])
def test_what_holds_no_policy_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^the checkpoint holds no policy of rl \("):
        evaluated(setup(), {**state, "samples": 0})


def test_a_policy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^the checkpoint's policy does not fit this program"):
        evaluated(setup(policy="", hidden_size=8), state_of(setup(policy="", hidden_size=16)))


# ---- several processes


@pytest.mark.parametrize(
    ("env", "others", "deterministic"),
    [
        ("CartPole-v1", {"memory": "lstm"}, False),  # the environments share a generator
        ("Pendulum-v1", {"memory": "lstm", "exploration": "sde", "wrappers": f"{HERE}:shorter"}, False),
        ("Pendulum-v1", {"wrappers": f"{HERE}:shorter"}, True),
    ],
)
def test_every_kind_of_policy_has_the_same_results_with_any_number_of_environments(
    env: str, others: dict[str, Any], deterministic: bool
) -> None:
    settings = RlSettings(env_id=env, threads=1, **others)
    state = state_of(settings)
    alone, *several = (
        evaluated(settings, state, episodes=2 * GROUP_SIZE + 3, envs=count, deterministic=deterministic)
        for count in (None, 2 * GROUP_SIZE, 2 * GROUP_SIZE + 1)
    )
    assert several == [alone, alone]
    assert (alone["std_return"] > 0, alone["unfinished_episodes"]) == (True, 0)


def test_groups_do_not_share_the_state_of_a_processs_generators() -> None:
    """Those of forks would be their parent's."""
    settings = setup("Shared-v0", threads=1)
    one, alone, several = (
        evaluated(settings, episodes=count, envs=envs)
        for count, envs in ((GROUP_SIZE, 1), (2 * GROUP_SIZE, 1), (2 * GROUP_SIZE, 2 * GROUP_SIZE))
    )
    assert several == alone
    assert several["mean_return"] != one["mean_return"]


@pytest.mark.parametrize("options", [{"envs": GROUP_SIZE + 1}, {}])
def test_groups_are_stepped_at_once(options: dict[str, int]) -> None:
    result = evaluated(setup("Meeting-v0", threads=2), episodes=3 * GROUP_SIZE, **options)
    assert result["mean_length"] == LENGTH


@pytest.mark.parametrize(
    ("env", "others", "error", "line"),
    [
        ("Wheel-v0", {}, BrokenEnvError, r"ENV_ID=Wheel-v0: environment \d+, step 4 .*OSError: the wheel came off$"),
        ("Stuck-v0", {"env_timeout": 0.5}, BrokenEnvError, r"ENV_ID=Stuck-v0: .* has not returned within ENV_TIMEOUT="),
        ("Killed-v0", {}, BrokenEnvError, r"a process that plays episodes was killed by SIGKILL; if memory "),
        ("Nowhere-v0", {}, UsageError, "ENV_ID=Nowhere-v0: cannot be made "),
        ("Counted-v0", {"policy": "failing"}, ProgramError, r".*test_rl_evaluate.py:\d+: OSError: out of paper$"),
    ],
)
def test_an_error_in_a_process_is_one_line_and_ends_the_others(
    capfd: pytest.CaptureFixture[str], env: str, others: dict[str, Any], error: type[Exception], line: str
) -> None:
    state = state_of(setup(policy=others.get("policy", "remembering")))
    with pytest.raises(error, match=f"^{line}"):
        evaluated(setup(env, **others), state, episodes=3 * GROUP_SIZE, envs=2 * GROUP_SIZE)
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts this process, also if a shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluated(setup("Interrupting-v0"), episodes=3 * GROUP_SIZE, envs=2 * GROUP_SIZE)
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def test_a_gpu_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(UsageError, match=r"^--envs: the policy runs on cuda, in one process; leave it out, or set "):
        evaluated(setup(), episodes=3, envs=20)


# ---- the video


def brightness(path: Path) -> list[int]:
    """The brightness of each picture in the middle, in steps of the environment."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            assert image.size == EVEN
            pictures = []
            for number in range(image.n_frames):
                image.seek(number)
                pictures.append(np.asarray(image.convert("RGB")))
                assert image.info["duration"] == 50
    else:
        reader = imageio_ffmpeg.read_frames(str(path))
        about = next(reader)
        assert (about["size"], about["fps"]) == (EVEN, 20.0)
        pictures = [np.frombuffer(frame, np.uint8).reshape(*EVEN[::-1], 3) for frame in reader]
    return [round(float(picture[10, 10].mean()) / 40) for picture in pictures]


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "A.GIF"])
def test_the_first_episode_is_shown_from_its_reset_to_its_end(tmp_path: Path, name: str) -> None:
    if name.isupper():
        evaluated(setup(), episodes=1, video=Path(name))
        assert (tmp_path / name).read_bytes().startswith(b"GIF89a")
    else:
        evaluated(setup(), episodes=1, video=tmp_path / name)
        assert brightness(tmp_path / name) == list(range(LENGTH + 1))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_it_is_one_of_the_episodes_that_are_counted(tmp_path: Path) -> None:
    without = evaluated(setup(), episodes=3)
    seeds = list(Counted.seeds)
    Counted.seeds.clear()
    assert evaluated(setup(), episodes=3, video=tmp_path / "a.gif") == without
    assert Counted.seeds == seeds


def test_where_the_episode_breaks_there_is_no_video(tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_text("another")
    with pytest.raises(BrokenEnvError):
        evaluated(setup("Wheel-v0"), video=tmp_path / "a.gif")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.gif", "another")]


def test_an_environment_that_shows_nothing_is_one_line(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    settings = setup("Invisible-v0")
    line = r"^--video: ENV_ID=Invisible-v0: cannot be rendered \(NotImplementedError"
    with pytest.raises(UsageError, match=line):
        evaluated(settings, video=tmp_path / "a.gif")
    assert [str(warning.message) for warning in recwarn if "render" in str(warning.message)] == []
    assert list(tmp_path.iterdir()) == []
    assert evaluated(settings, episodes=2)["mean_return"] == LENGTH


def test_without_imageio_ffmpeg_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError) as refused:
        evaluated(setup(), video=tmp_path / "a.gif")
    problem = "--video: needs imageio_ffmpeg, which is not installed"
    assert str(refused.value) == f"{problem}; pip install 'rolecall[video]'"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.avi", "--video: a.avi is no video; the name must end in .mp4 or .gif"),
        ("a", "--video: a is no video; the name must end in .mp4 or .gif"),
        ("nowhere/a.gif", "--video: nowhere is no folder; create it"),
    ],
)
def test_a_bad_video_path_is_refused_before_the_first_episode(name: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        evaluated(setup(), video=Path(name))
    assert str(refused.value) == line
    assert Counted.seeds == []


# ---- the command

NAMED = ["--policy", f"{__name__}:remembering"]  # which the checkpoint names too


@pytest.fixture
def saved() -> Path:
    """A folder with a checkpoint, whose settings are not those of the environment."""
    settings = setup()
    pinned = {"env_id": settings.env_id, "policy": settings.policy, "normalize": False}
    about = {"settings": pinned, "layout": rl.JOB.layout}
    Path("run").mkdir()
    Checkpoints(Path("run"), "rl", 1).write(3, state_of(settings), about)
    return Path("run")


def test_the_command_takes_the_options(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--episodes", "4", "--video", "a.gif", "--json", "--deterministic", *NAMED]
    assert __main__.main(["eval", "rl", "--checkpoint", str(saved), *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    result = json.loads(output.out)
    assert (result["episodes"], result["mean_return"], result["unfinished_episodes"]) == (4, LENGTH, 0)
    assert type(result["episodes"]) is int
    assert len(brightness(Path("a.gif"))) == LENGTH + 1
    assert __main__.main(["eval", "rl", "--checkpoint", str(saved), "--no-deterministic", "--json", *NAMED]) == 0
    sampled = json.loads(capsys.readouterr().out)
    assert (sampled["episodes"], sampled["mean_return"] < LENGTH) == (100, True)


def test_a_broken_environment_is_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = saved.iterdir()
    path.unlink()
    settings = setup("Wheel-v0")
    about = {"settings": {"env_id": settings.env_id, "policy": settings.policy, "normalize": False}}
    Checkpoints(saved, "rl", 1).write(3, state_of(settings), {**about, "layout": rl.JOB.layout})
    assert __main__.main(["eval", "rl", "--checkpoint", str(saved), *NAMED]) == FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"rolecall: ENV_ID=Wheel-v0: environment \d+, step 4 .*: the wheel came off$", line)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_process_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread the system has take it."""
    start, started = processes._start, list[Any]()

    def interrupted(*arguments: Any) -> Any:
        started.append(start(*arguments))
        thread = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
        thread.start()
        thread.join()
        return started[-1]

    monkeypatch.setattr(processes, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(processes.play_each([range(1)], 1, lambda *_: time.sleep(60)))
    ((_, process),) = started
    assert not process.is_alive()


def test_sigterm_as_a_process_ends_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_handler, parent = signal.signal, os.getpid()

    def terminated(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler is signal.SIG_DFL and os.getpid() != parent:
            signal.raise_signal(signal.SIGTERM)  # just before its last line
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", terminated)
    assert [result for _, result in processes.play_each([range(1)], 1, lambda *_: "played")] == ["played"]
    assert capfd.readouterr() == ("", "")
