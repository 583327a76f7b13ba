"""What Rolecall is measured against: reinforcement learning the way the PyTorch tutorial on distributed RPC does it.

One environment an observer, one remote call for each action and one more for each reward, no batching. After each
episode the agent learns by REINFORCE from the rewards of all observers, one after the other in one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import rpc

from bench import ranks

ENV_ID = "CartPole-v1"
OBSERVERS = 2
STEPS_OF_ALL = 10_000  # of an episode, at most, over all observers
GAMMA = 0.99


@dataclass(frozen=True)
class Result:
    """`seconds` run from the first step to the last update; `steps` are the environment steps in them."""

    solved: bool
    iterations: int
    steps: int
    seconds: float
    running_reward: float

    @property
    def steps_per_s(self) -> float:
        """Environment steps a second, learning included."""
        return self.steps / self.seconds


def solve(
    seed: int, deadline: float = 900.0, progress: Callable[[tuple[int, float]], None] = lambda news: None
) -> Result:
    """Train until CartPole-v1 counts as solved, or for `deadline` seconds.

    `progress` is called with (iteration, running reward) now and then.
    """
    names = ["agent", *(f"observer{number}" for number in range(OBSERVERS))]
    # processes that hang are ended later than training ends by itself
    result: Result = ranks.run(names, _train, names[1:], seed, deadline, deadline=deadline + 60, progress=progress)
    return result


def _train(tell: ranks.Tell, observers: list[str], seed: int, deadline: float) -> Result:
    torch.manual_seed(seed)
    agent = Agent(observers, seed)
    started = time.monotonic()
    while True:
        agent.run_episode(STEPS_OF_ALL // len(observers))
        agent.finish_episode()
        seconds = time.monotonic() - started
        if agent.iterations % 10 == 0:
            tell((agent.iterations, agent.running_reward))
        solved = agent.running_reward > agent.threshold
        if solved or seconds > deadline:
            return Result(solved, agent.iterations, agent.steps, seconds, agent.running_reward)


class Policy(nn.Module):
    """Probabilities of the two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 128)
        self.dropout = nn.Dropout(0.6)
        self.out = nn.Linear(128, 2)

    def forward(self, states: Tensor) -> Tensor:
        return torch.softmax(self.out(torch.relu(self.dropout(self.hidden(states)))), dim=1)


class Observer:
    """One environment; asks the agent for each action and tells it each reward."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.env = gymnasium.make(ENV_ID)
        self.env.reset(seed=seed)

    def run_episode(self, agent: rpc.RRef[Agent], steps: int) -> None:
        """One episode, of `steps` steps at most."""
        state, _ = self.env.reset()
        for _ in range(steps):
            action = _at_owner(agent, Agent.select_action, self.name, state).wait()
            state, reward, terminated, truncated, _ = self.env.step(action)
            _at_owner(agent, Agent.report_reward, self.name, float(reward)).wait()
            if terminated or truncated:
                break


class Agent:
    """The policy, and the rewards and the actions' log probabilities of the episode, by observer."""

    def __init__(self, observers: list[str], seed: int) -> None:
        self.me: rpc.RRef[Agent] = rpc.RRef(self)
        self.observers = [
            rpc.remote(name, Observer, args=(name, 1000 * seed + number)) for number, name in enumerate(observers)
        ]
        self.rewards: dict[str, list[float]] = {name: [] for name in observers}
        self.log_probabilities: dict[str, list[Tensor]] = {name: [] for name in observers}
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.iterations = self.steps = 0
        self.running_reward = 0.0
        threshold = gymnasium.spec(ENV_ID).reward_threshold
        assert threshold is not None
        self.threshold = threshold

    def run_episode(self, steps: int) -> None:
        """Have every observer run one episode, at the same time."""
        episodes = [_at_owner(observer, Observer.run_episode, self.me, steps) for observer in self.observers]
        torch.futures.wait_all(episodes)

    def select_action(self, observer: str, state: np.ndarray[Any, Any]) -> int:
        """Called by an observer: the action to take in `state`."""
        chances = torch.distributions.Categorical(self.policy(torch.from_numpy(state).float()[None]))
        action = chances.sample()
        self.log_probabilities[observer].append(chances.log_prob(action))
        return int(action.item())

    def report_reward(self, observer: str, reward: float) -> None:
        """Called by an observer: what its last action brought."""
        self.rewards[observer].append(reward)

    def finish_episode(self) -> None:
        """Learn from the episode of every observer; the returns run on from one observer's into the next one's."""
        rewards = [reward for name in self.rewards for reward in self.rewards[name]]
        log_probabilities = torch.cat([one for name in self.rewards for one in self.log_probabilities[name]])
        worst = min(sum(rewards) for rewards in self.rewards.values())
        self.running_reward = 0.05 * worst + 0.95 * self.running_reward
        returns, after = [], 0.0
        for reward in reversed(rewards):
            after = reward + GAMMA * after
            returns.append(after)
        targets = torch.tensor(returns[::-1])
        targets = (targets - targets.mean()) / (targets.std() + torch.finfo(targets.dtype).eps)
        self.optimizer.zero_grad()
        (-log_probabilities * targets).sum().backward()
        self.optimizer.step()
        self.iterations += 1
        self.steps += len(rewards)
        for name in self.rewards:
            self.rewards[name], self.log_probabilities[name] = [], []


def _at_owner(target: rpc.RRef[Any], method: Callable[..., Any], *args: Any) -> torch.futures.Future[Any]:
    """Call `method(*args)` on what the RRef stands for, where that lives."""
    return rpc.rpc_async(target.owner(), _call, args=(target, method, *args))


def _call(target: rpc.RRef[Any], method: Callable[..., Any], *args: Any) -> Any:
    return method(target.local_value(), *args)
