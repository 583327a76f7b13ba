"""examples/grpo.py on Ray: its model, sums and loss; actors in place of roles, and this process between them.

Ray restarts every actor (`max_restarts`), and makes its call again (`max_task_retries`), as the page on actors' fault
tolerance shows. Of reward workers, another one is asked. The learner's constructor loads the checkpoint that its last
process has written. If this process dies, the run ends.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from pathlib import Path

import ray
import torch
from grpo import Batch, Grpo, accuracy, build, example_loss, reward_loss, solve, sums
from ray.exceptions import RayActorError
from torch import Tensor, nn

from bench import llm_events
from rolecall import config


@ray.remote(max_restarts=-1)
class Reward:
    """Checks answers."""

    def __init__(self, number: int) -> None:
        llm_events.active("reward", number)

    def check(self, prompts: list[str], answers: list[str]) -> list[float]:
        return [float(answer == solve(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Generator:
    """Samples batches."""

    def __init__(self, settings: Grpo, number: int) -> None:
        torch.set_num_threads(1)
        self.settings, self.policy = settings, build(settings, sampling=True)
        self.sums, self.version = sums(settings.digits)[0], -1
        llm_events.made("generator", number)
        llm_events.active("generator", number)

    def sample(self, version: int, weights: dict[str, Tensor]) -> Batch:
        settings = self.settings
        if version != self.version:
            self.policy.load_state_dict(weights)
            self.version = version
        asked = random.choices(self.sums, k=max(1, settings.groups // settings.generators))
        prompts, answers, logprobs = self.policy.sample(asked, settings.group, settings.digits + 2)
        texts, repeated = self.policy.decode(answers), [prompt for prompt in asked for _ in range(settings.group)]
        rewards = torch.tensor(self.check(repeated, texts)).view(-1, settings.group)
        return Batch(prompts=prompts, answers=answers, logprobs=logprobs, rewards=rewards, version=version)

    def check(self, prompts: list[str], texts: list[str]) -> list[float]:
        while True:
            reward = ray.get_actor(f"reward-{random.randrange(self.settings.rewards)}")
            try:
                return ray.get(reward.check.remote(prompts, texts))
            except RayActorError:  # it is being restarted: another one is asked
                time.sleep(0.05)


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Learner:
    """The policy and its optimizer."""

    def __init__(self, settings: Grpo) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings, self.policy, self.sums = settings, build(settings), sums(settings.digits)[0]
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), betas=(0.9, 0.95))
        self.counts = {"step": 0, "tokens": 0}
        self.path, self.saved = settings.checkpoint_dir / "learner.pt", time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            state = torch.load(self.path)
            self.policy.load_state_dict(state["policy"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.counts = state["counts"]
        llm_events.active("learner", 0)

    def teach(self) -> tuple[int, dict[str, Tensor]]:
        settings = self.settings
        while self.counts["step"] < settings.taught:
            loss = example_loss(self.policy, random.choices(self.sums, k=settings.groups * settings.group))
            self.step(loss, settings.lr * min(1, self.counts["step"] / 20))
        return self.counts["step"], self.policy.state_dict()

    def learn(self, *batches: Batch) -> tuple[int, dict[str, Tensor]]:
        losses = [reward_loss(self.policy, batch) for batch in batches]
        self.counts["tokens"] += sum(batch["answers"].numel() for batch in batches)
        self.step(torch.stack(losses).mean(), self.settings.reward_lr)
        llm_events.updated(self.counts["step"], self.counts["tokens"])
        return self.counts["step"], self.policy.state_dict()

    def step(self, loss: Tensor, rate: float) -> None:
        counts = self.counts
        counts["step"] += 1
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        if counts["step"] % 10 == 0:
            llm_events.scored(counts["step"], accuracy(self.policy, self.settings.digits))
        if time.monotonic() - self.saved >= self.settings.checkpoint_interval:
            self.save()

    def save(self) -> None:
        self.saved, temporary = time.monotonic(), Path(f"{self.path}.new")
        state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict(), "counts": self.counts}
        torch.save(state, temporary)
        temporary.replace(self.path)


def main() -> None:
    settings = config.load(Grpo)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rewards = [Reward.options(name=f"reward-{number}").remote(number) for number in range(settings.rewards)]
    ray.get([reward.__ray_ready__.remote() for reward in rewards])
    generators = [Generator.remote(settings, number) for number in range(settings.generators)]
    learner = Learner.remote(settings)
    first, weights = learner.teach.options(num_returns=2).remote()
    version, update = ray.get(first), None
    idle, sampling, batches = deque(generators), {}, deque()  # which generator samples what, and with which version
    while version < settings.updates:
        while idle and len(batches) + len(sampling) < settings.buffer + settings.generators:
            generator = idle.popleft()
            sampling[generator.sample.remote(version, weights)] = generator, version
        while batches and version - batches[0][1] > settings.staleness:
            batches.popleft()
        if update is None and len(batches) >= settings.generators:
            taken = [batches.popleft()[0] for _ in range(settings.generators)]
            update, updated = learner.learn.options(num_returns=2).remote(*taken)
        [done], _ = ray.wait([*sampling, *([update] if update else [])])
        if done == update:
            version, weights, update = ray.get(done), updated, None
        else:
            generator, sampled = sampling.pop(done)
            idle.append(generator)
            batches.append((done, sampled))


if __name__ == "__main__":
    main()
