"""The limit for examples/grpo.py: one process that samples, checks and learns in turn."""

from __future__ import annotations

import random

import torch
from grpo import Batch, Grpo, accuracy, build, example_loss, reward_loss, solve, sums
from torch import nn

from bench import llm_events
from rolecall import config


def main() -> None:
    settings = config.load(Grpo)
    torch.manual_seed(settings.seed)
    policy, known = build(settings), sums(settings.digits)[0]
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95))
    tokens = 0
    for update in range(1, settings.updates + 1):
        taught = update > settings.taught
        if taught:
            asked = random.choices(known, k=settings.groups)
            prompts, answers, logprobs = policy.sample(asked, settings.group, settings.digits + 2)
            texts = policy.decode(answers)
            right = [text == solve(asked[row // settings.group]) for row, text in enumerate(texts)]
            rewards = torch.tensor(right).float().view(-1, settings.group)
            batch = Batch(prompts=prompts, answers=answers, logprobs=logprobs, rewards=rewards, version=update - 1)
            loss = reward_loss(policy, batch)
            tokens += answers.numel()
        else:
            loss = example_loss(policy, random.choices(known, k=settings.groups * settings.group))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = settings.reward_lr if taught else settings.lr * min(1, update / 20)
        optimizer.step()
        if taught:
            llm_events.updated(update, tokens)
        if update % 10 == 0:
            llm_events.scored(update, accuracy(policy, settings.digits))


if __name__ == "__main__":
    main()
