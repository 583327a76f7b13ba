"""What `make bench-peers` has everybody train, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.peers.zoo import Algorithm

OURS = ("observer", "agent")  # Rolecall's ways of inference


@dataclass(frozen=True)
class Task:
    """What is trained, and by whom, for how many steps at most: a peer's schedules end with them."""

    environment: str
    steps: dict[str, int]
    threshold: float | None = None
    names: dict[str, str] = field(default_factory=dict)  # the environment's at a peer, where it is another
    algorithm: Algorithm = "ppo"
    settings: dict[str, Any] = field(default_factory=dict)  # Rolecall's, if not its defaults

    @property
    def off_policy(self) -> bool:
        """Whether updates are counted, not environment steps, of which each library makes as many."""
        return self.algorithm != "ppo"

    @property
    def variables(self) -> dict[str, Any]:
        """Rolecall's settings."""
        return {"ENV_ID": self.environment, "ALGORITHM": self.algorithm, **self.settings}


TASKS = {
    "CartPole-v1": Task(
        "CartPole-v1", {"observer": 1_000_000, "agent": 1_000_000, "sb3": 100_000,
                        "appo": 10_000_000, "rllib": 1_000_000}, 475.0,
    ),
    "Acrobot-v1": Task(
        "Acrobot-v1", {"observer": 1_000_000, "agent": 1_000_000, "sb3": 1_000_000,
                       "appo": 10_000_000, "rllib": 1_000_000}, -100.0,
    ),
    "Pendulum-v1": Task(
        "bench.peers.environments:SolvablePendulum-v1",
        {"observer": 1_000_000, "agent": 1_000_000, "sb3": 100_000, "appo": 1_000_000,
         "rllib": 1_000_000}, -200.0,
        dict.fromkeys(("sb3", "appo", "rllib"), "Pendulum-v1"),
    ),
    "HalfCheetah-v5": Task(
        "HalfCheetah-v5", {"observer": 60_000, "agent": 60_000, "sb3": 1_000_000}
    ),
    # with RL Zoo's networks and batches, so that an update is the same work
    "HalfCheetah-v5-sac": Task(
        "HalfCheetah-v5", dict.fromkeys((*OURS, "sb3"), 20_000), algorithm="sac",
        settings={"LEARNING_STARTS": 10_000, "UPDATES_PER_STEP": 1.0, "BATCH_SIZE": 256, "HIDDEN_SIZE": 256},
    ),
    "CartPole-v1-dqn": Task(
        "CartPole-v1", dict.fromkeys((*OURS, "sb3"), 50_000), algorithm="dqn",
        settings={"LEARNING_STARTS": 1_000, "UPDATES_PER_STEP": 0.5, "BATCH_SIZE": 64, "HIDDEN_SIZE": 256},
    ),
}  # fmt: skip
