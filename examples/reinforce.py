"""REINFORCE on CartPole, with the environments on other ranks than the policy.

Rank 0 is the agent: it has the policy, and the only optimizer. Every other rank is an observer: it has an environment,
and asks the agent for each action. What to learn from it:

- `rpc.remote` makes an object on another rank and returns an RRef, a reference that can be sent to further ranks;
- calls go both ways at the same time: the agent waits for episodes while it answers the observers' questions;
- a call runs in a thread of the rank that is called, so what several ranks call needs a lock.

It needs gymnasium. `python reinforce.py` runs three ranks on this machine. With CHECKPOINT_DIR set, an interrupted
training continues.
"""

import os
import threading
from pathlib import Path

import gymnasium
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

EPISODES = int(os.environ.get("EPISODES", "60"))  # of each observer
FOLDER = os.environ.get("CHECKPOINT_DIR")
GAMMA = 0.99


class Observer:
    """An environment, on a rank of its own."""

    def __init__(self):
        self.name = rpc.get_worker_info().name
        self.environment = gymnasium.make("CartPole-v1", max_episode_steps=200)

    def play(self, agent, seed):
        """One episode. `agent` is an RRef: each action is a call to the rank that owns it. Returns the rewards."""
        observation, _ = self.environment.reset(seed=seed)
        rewards, over = [], False
        while not over:
            action = agent.rpc_sync().act(self.name, torch.from_numpy(observation))
            observation, reward, terminated, truncated, _ = self.environment.step(action)
            rewards.append(float(reward))
            over = terminated or truncated
        return rewards


class Agent:
    """The policy, which acts for all observers and learns from their episodes."""

    def __init__(self, observers):
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)
        self.observers = {name: rpc.remote(name, Observer) for name in observers}
        self.log_probabilities = {name: [] for name in observers}
        self.lock = threading.Lock()
        self.episode, self.running_return = 0, 10.0
        self.load()

    def act(self, name, observation):
        """The action for the observer `name`; its probability is kept for the update."""
        with self.lock:
            distribution = torch.distributions.Categorical(logits=self.policy(observation))
            action = distribution.sample()
            self.log_probabilities[name].append(distribution.log_prob(action))
        return int(action)

    def train(self):
        """An episode of each observer, all at once, and one update of the policy."""
        this = rpc.RRef(self)
        calls = {name: each.rpc_async().play(this, self.episode) for name, each in self.observers.items()}
        losses, returns = [], []
        for name, call in calls.items():
            rewards = call.wait()
            returns.append(sum(rewards))
            log_probabilities, self.log_probabilities[name] = torch.stack(self.log_probabilities[name]), []
            losses.append(-(log_probabilities * advantages(rewards)).sum())
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        self.optimizer.step()
        self.episode += 1
        self.running_return += 0.05 * (sum(returns) / len(returns) - self.running_return)

    def save(self):
        """Writes a checkpoint; under another name first, so that it is never half written."""
        if FOLDER:
            state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(),
                     "episode": self.episode, "running_return": self.running_return}  # fmt: skip
            torch.save(state, Path(FOLDER, "reinforce.new"))
            Path(FOLDER, "reinforce.new").replace(Path(FOLDER, "reinforce.pt"))

    def load(self):
        """Continues from the checkpoint, if there is one."""
        if FOLDER and Path(FOLDER, "reinforce.pt").exists():
            state = torch.load(Path(FOLDER, "reinforce.pt"), weights_only=True)
            self.policy.load_state_dict(state["policy"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.episode, self.running_return = state["episode"], state["running_return"]
            print(f"resumed at episode {self.episode}")


def advantages(rewards):
    """The discounted return after each step, with mean 0 and deviation 1."""
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + GAMMA * total
        returns.insert(0, total)
    values = torch.tensor(returns)
    return (values - values.mean()) / (values.std() + 1e-6)


def run_worker(rank, world_size):
    """One rank. Observers only serve calls, until `rpc.shutdown`, which waits for all ranks."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    rpc.init_rpc(f"observer{rank}" if rank else "agent", rank=rank, world_size=world_size)
    if rank == 0:
        agent = Agent([f"observer{other}" for other in range(1, world_size)])
        while agent.episode < EPISODES:
            agent.train()
            if agent.episode % 10 == 0 or agent.episode == EPISODES:
                agent.save()
                print(f"episode {agent.episode}  running return {agent.running_return:.1f}")
        print("done")
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3)
