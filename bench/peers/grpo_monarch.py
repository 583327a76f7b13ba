"""examples/grpo.py on Monarch: its model, sums and loss; actors in place of roles, and a controller between them.

Each member is an actor in a process of its own. The controller owns them, and handles their failures (`__supervise__`),
as Monarch's guide to actors shows: a call of a member that has failed raises SupervisionError, and the controller
spawns another one. The learner's constructor loads the checkpoint that its last process has written. If the controller
dies, the run ends.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import torch
from grpo import Batch, Grpo, accuracy, build, example_loss, reward_loss, solve, sums
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, MeshFailure, endpoint, this_host
from torch import Tensor, nn

from bench import llm_events
from rolecall import config


class Reward(Actor):
    """Checks answers."""

    def __init__(self, number: int) -> None:
        llm_events.active("reward", number)

    @endpoint
    def check(self, prompts: list[str], answers: list[str]) -> list[float]:
        return [float(answer == solve(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


class Generator(Actor):
    """Samples batches."""

    def __init__(self, number: int, settings: Grpo) -> None:
        torch.set_num_threads(1)
        self.settings, self.policy = settings, build(settings, sampling=True)
        self.sums, self.version = sums(settings.digits)[0], -1
        llm_events.made("generator", number)
        llm_events.active("generator", number)

    @endpoint
    def sample(self, version: int, weights: dict[str, Tensor]) -> tuple[Batch, list[str], list[str]]:
        settings = self.settings
        if version != self.version:
            self.policy.load_state_dict(weights)
            self.version = version
        asked = random.choices(self.sums, k=max(1, settings.groups // settings.generators))
        prompts, answers, logprobs = self.policy.sample(asked, settings.group, settings.digits + 2)
        texts, repeated = self.policy.decode(answers), [prompt for prompt in asked for _ in range(settings.group)]
        unknown = torch.empty(0)  # the rewards
        batch = Batch(prompts=prompts, answers=answers, logprobs=logprobs, rewards=unknown, version=version)
        return batch, repeated, texts


class Learner(Actor):
    """The policy and its optimizer."""

    def __init__(self, number: int, settings: Grpo) -> None:
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
        llm_events.active("learner", number)

    @endpoint
    def teach(self) -> tuple[int, dict[str, Tensor]]:
        settings = self.settings
        while self.counts["step"] < settings.taught:
            loss = example_loss(self.policy, random.choices(self.sums, k=settings.groups * settings.group))
            self.step(loss, settings.lr * min(1, self.counts["step"] / 20))
        return self.counts["step"], self.policy.state_dict()

    @endpoint
    def learn(self, batches: list[Batch]) -> tuple[int, dict[str, Tensor]]:
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


class Controller(Actor):
    """Owns all others."""

    def __init__(self, settings: Grpo) -> None:
        self.settings, self.version, self.weights = settings, 0, dict[str, Tensor]()
        self.rewards = [self.make(Reward, number) for number in range(settings.rewards)]
        self.batches = asyncio.Queue[Batch](settings.buffer)

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True  # handled: the call that fails spawns the member anew

    def make(self, kind: type[Actor], *arguments: Any) -> Any:
        return this_host().spawn_procs(per_host={"procs": 1}).spawn(kind.__name__.lower(), kind, *arguments)

    @endpoint
    async def run(self) -> None:
        learner = self.make(Learner, 0, self.settings)
        self.version, self.weights = await learner.teach.call_one()
        generating = [asyncio.create_task(self.generate(number)) for number in range(self.settings.generators)]
        while self.version < self.settings.updates:
            taken = [await self.fresh() for _ in generating]
            try:
                self.version, self.weights = await learner.learn.call_one(taken)
            except SupervisionError:
                learner = self.make(Learner, 0, self.settings)
                self.version, self.weights = await learner.teach.call_one()
        for task in generating:
            task.cancel()

    async def generate(self, number: int) -> None:
        generator = self.make(Generator, number, self.settings)
        while True:
            try:
                batch, prompts, texts = await generator.sample.call_one(self.version, self.weights)
            except SupervisionError:
                generator = self.make(Generator, number, self.settings)
                continue
            batch["rewards"] = torch.tensor(await self.check(prompts, texts)).view(-1, self.settings.group)
            await self.batches.put(batch)

    async def check(self, prompts: list[str], texts: list[str]) -> list[float]:
        while True:
            number = random.randrange(len(self.rewards))
            reward = self.rewards[number]
            try:
                return await reward.check.call_one(prompts, texts)
            except SupervisionError:
                if self.rewards[number] is reward:  # not yet another one
                    self.rewards[number] = self.make(Reward, number)

    async def fresh(self) -> Batch:
        while True:
            batch = await self.batches.get()
            if self.version - batch["version"] <= self.settings.staleness:
                return batch


def main() -> None:
    settings = config.load(Grpo)
    this_host().spawn_procs(per_host={"procs": 1}).spawn("controller", Controller, settings).run.call_one().get()


if __name__ == "__main__":
    main()
