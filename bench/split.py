"""What `make bench-rl-quality` trains: environments that Rolecall's defaults are tuned on, and environments held out.

A held-out environment is never used to choose a default. All of them are evaluated once for each proposed change of
defaults, with a new BENCH_JSON, and whatever comes out is reported. One that influences a choice becomes a tuned one,
and another takes its place before the next evaluation. Both parts have vectors and images, discrete and continuous
actions, dense and sparse rewards, of the same six families: classic control, toy text, box2d, mujoco, minigrid, ale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bench.peers import report, zoo
from bench.peers.zoo import Algorithm


class Mean(NamedTuple):
    """A mean over seeds and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class Row:
    """What is trained, and for how many environment steps."""

    environment: str
    steps: int
    memory: bool = False
    solved: bool | None = None  # whether it is to reach CartPole's threshold, if that counts
    sampled: bool = False  # actions of the evaluation, otherwise the most probable ones
    episodes: int = report.EPISODES  # of the evaluation
    algorithm: Algorithm = "ppo"
    documented: Mean | None = None  # Rolecall's result in docs/rl.md, which a new one is compared with
    random: float | None = None  # held out, ppo: mean return of 100 episodes or more of uniformly random actions
    digits: int = 1  # decimals of the shown returns

    @property
    def deadline(self) -> float:
        """Seconds for a run, also on a machine that others keep busy."""
        return 600 + self.steps / 3


TUNED = {
    "CartPole-v1": Row("CartPole-v1", 100_000, documented=Mean(500.0, 0.0)),
    "Acrobot-v1": Row("Acrobot-v1", 200_000, documented=Mean(-77.8, 1.5)),
    "MountainCarContinuous-v0": Row("MountainCarContinuous-v0", 100_000, documented=Mean(93.3, 0.2)),
    "Pendulum-v1": Row("Pendulum-v1", 100_000, documented=Mean(-137.4, 3.4)),
    "LunarLander-v3": Row("LunarLander-v3", 1_000_000, documented=Mean(261.7, 2.9)),
    "LunarLanderContinuous-v3": Row("LunarLanderContinuous-v3", 1_000_000, documented=Mean(273.9, 2.7)),
    "masked": Row(zoo.MASKED, 100_000, solved=False),
    "masked-memory": Row(zoo.MASKED, 100_000, memory=True, solved=True, documented=Mean(499.2, 0.8)),
    "HalfCheetah-v5": Row("HalfCheetah-v5", 1_000_000, documented=Mean(6128.6, 148.7)),
    "Walker2d-v5": Row("Walker2d-v5", 1_000_000, documented=Mean(4080.1, 168.7)),
    "Boxing": Row(zoo.BOXING, 200_000, sampled=True, documented=Mean(1.9, 0.4)),  # steps of four frames each
    "Taxi-v4": Row("Taxi-v4", 200_000),
    "CliffWalking-v1": Row(zoo.CLIFF, 100_000),
    "MiniGrid-Empty-Random-6x6-v0": Row(zoo.EMPTY_ROOM, 100_000, sampled=True, digits=2),
    "Ant-v5": Row("Ant-v5", 500_000),
    "HalfCheetah-v5-sac": Row("HalfCheetah-v5", 300_000, algorithm="sac"),
    # held out before, until their results prompted a change of defaults
    "FrozenLake-v1": Row("FrozenLake-v1", 100_000, digits=2),
    "MiniGrid-DoorKey-5x5-v0": Row(zoo.DOOR_KEY, 100_000, sampled=True, digits=2),
    "Hopper-v5": Row("Hopper-v5", 1_000_000),
    "InvertedDoublePendulum-v5": Row("InvertedDoublePendulum-v5", 200_000),
}
HELD_OUT = {
    "MountainCar-v0": Row("MountainCar-v0", 300_000, random=-200.0),
    # an episode has one or two decisions and ends with -1, 0 or 1 by the cards: few episodes say nothing
    "Blackjack-v1": Row(zoo.BLACKJACK, 100_000, episodes=500, random=-0.393, digits=3),
    "BipedalWalker-v3": Row("BipedalWalker-v3", 1_000_000, random=-100.5),
    "InvertedPendulum-v5": Row("InvertedPendulum-v5", 200_000, random=5.1),
    "Swimmer-v5": Row("Swimmer-v5", 500_000, random=0.0),
    "Reacher-v5": Row("Reacher-v5", 200_000, random=-43.2),
    "MiniGrid-KeyCorridorS3R1-v0": Row(zoo.KEY_CORRIDOR, 300_000, sampled=True, random=0.019, digits=2),
    "Breakout": Row(zoo.BREAKOUT, 100_000, sampled=True, random=1.25),  # steps of four frames each
    "MountainCar-v0-dqn": Row("MountainCar-v0", 120_000, algorithm="dqn"),
}
ROWS = {**TUNED, **HELD_OUT}
GROUPS = {"tuned": TUNED, "held-out": HELD_OUT}
