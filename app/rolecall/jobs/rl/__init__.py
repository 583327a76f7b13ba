"""Reinforcement learning: an agent (rank 0) learns from observers that step gymnasium environments.

After "Implementing batch RPC processing using asynchronous executions" and "Getting started with distributed RPC
framework" of the PyTorch tutorials; what differs and why is in docs/rl.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rolecall import Job, Role, Seconds, Settings
from rolecall.jobs.rl.metrics import METRICS


class RlSettings(Settings):
    """The variables of `rl`."""

    observers: int = Field(2, ge=1, le=1024, description="observers that a start waits for")
    min_observers: int = Field(1, ge=1, le=1024, description="fewest observers to train with")
    max_observers: int = Field(64, ge=1, le=1024, description="most observers to train with")
    env_id: str = Field(
        "CartPole-v1",
        min_length=1,
        description="gymnasium environment, `module:Id` to import first; Box observation and Discrete action space",
    )
    num_envs: int = Field(64, ge=1, le=65536, description="environments that one observer steps together")
    inference: Literal["agent", "observer"] = Field(
        "agent", description="where actions are computed: at the agent, in batches, or at the observers"
    )
    rollout_steps: int = Field(
        64,
        ge=1,
        le=100_000,
        description="fewest steps of each environment in an iteration; it goes on until an episode ends",
    )
    rollout_timeout: Seconds = Field(120.0, description="deadline of one observer's rollout")
    max_iterations: int = Field(1000, ge=1, le=100_000_000, description="iterations after which the job ends unsolved")
    gamma: float = Field(0.99, ge=0, le=1, description="discount of the return, per step")
    lr: float = Field(1e-2, gt=0, le=10, description="Adam's learning rate")
    hidden_size: int = Field(128, ge=1, le=65536, description="width of the default policy's hidden layer")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the default policy's dropout; above 0 the policy that learns is not the one acting",
    )
    policy: str = Field(
        "",
        description="package.module:factory called with the observation and the action space; returns a torch module "
        "from observations to logits, or to (logits, value); empty: the default policy",
    )
    minibatches: int = Field(4, ge=1, le=1024, description="optimizer steps an iteration, each on its share of it")
    clip_ratio: float = Field(0.2, gt=0, le=100, description="bound on the policy's change within an iteration")
    max_grad_norm: float = Field(0.5, gt=0, le=1e9, description="global norm that gradients are clipped to")


JOB = Job(
    summary="policy gradient: an agent learns, observers step gymnasium environments",
    settings=RlSettings,
    roles=(
        Role("agent", "rolecall.jobs.rl.agent:run", preload=("rolecall.jobs.rl.agent",)),
        Role(
            "observer",
            "rolecall.jobs.rl.observer:run",
            "OBSERVERS",
            "MIN_OBSERVERS",
            "MAX_OBSERVERS",
            preload=("rolecall.jobs.rl.observer",),
        ),
    ),
    check="rolecall.jobs.rl.model:check",
    evaluate="rolecall.jobs.rl.evaluate:evaluate",
    metrics=METRICS,
    score="return",
    unit="steps",
    pinned=("env_id", "policy", "hidden_size", "dropout"),
)
