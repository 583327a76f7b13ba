"""Evolution strategies."""

import torch

from rolecall import Context, Job, Role, Settings, remote


class Es(Settings):
    workers: int = 3
    updates: int = 100
    population: int = 16


class Worker:
    def __init__(self, context: Context[Es]) -> None:
        self.goal = torch.linspace(-1, 1, 8)

    @remote(idempotent=True)
    def evaluate(self, seed: int, center: torch.Tensor) -> float:
        return -(center + noise(seed) - self.goal).square().sum().item()


def noise(seed: int) -> torch.Tensor:
    return 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(seed))


def lead(context: Context[Es]) -> dict[str, float]:
    settings, state = context.settings, context.restore({"center": torch.zeros(8)})
    for step in context.steps(settings.updates):
        seeds = range(step * settings.population, (step + 1) * settings.population)
        rewards = torch.tensor(list(context.map(Worker.evaluate, seeds, state["center"])))
        weights = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        state["center"] += sum(weight * noise(seed) for weight, seed in zip(weights, seeds, strict=True)) / 4
        context.log(score=rewards.mean().item())
    return {"reward": rewards.mean().item()}


ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=Es, score="reward")
