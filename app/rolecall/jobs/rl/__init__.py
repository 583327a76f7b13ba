"""Reinforcement learning: an agent (rank 0) learns from observers that step gymnasium environments.

After "Implementing batch RPC processing using asynchronous executions" and "Getting started with distributed RPC
framework" of the PyTorch tutorials; what differs and why is in docs/rl.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolecall import FromUser, Job, Role, Seconds, Settings
from rolecall.jobs.rl.metrics import METRICS


class RlSettings(Settings):
    """The variables of `rl`. What is None has a default that depends on the spaces: see `defaults`."""

    algorithm: Literal["ppo", "reinforce"] = Field(
        "ppo", description="how it learns: PPO, or the tutorial's policy gradient from whole discounted returns"
    )
    solved_by: Literal["episodes", "running", "never"] = Field(
        "episodes",
        description="what is to reach the environment's threshold: the mean return of the last 100 episodes, or the "
        "tutorial's running reward; never: train to the end",
    )
    observers: int = Field(2, ge=1, le=1024, description="observers that a start waits for")
    min_observers: int = Field(1, ge=1, le=1024, description="fewest observers to train with")
    max_observers: int = Field(64, ge=1, le=1024, description="most observers to train with")
    env_id: Annotated[str, FromUser(unless="[^:]*")] = Field(
        "CartPole-v1", min_length=1, description="gymnasium environment, `module:Id` to import first"
    )
    envs: Literal["gymnasium", "envpool"] = Field(
        "gymnasium", description="library that makes the environments; envpool, in C++, is installed apart"
    )
    wrappers: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:function called with each environment; returns it wrapped; empty: images are made "
        "grey, 84 x 84 and stacked by four",
    )
    env_timeout: Seconds = Field(
        60.0, description="deadline of one step of an observer's environments, after which the observer is replaced"
    )
    num_envs: int | None = Field(
        None, ge=1, le=65536, description="environments that one observer steps together; empty: by the spaces"
    )
    inference: Literal["agent", "observer"] = Field(
        "agent", description="where actions are computed: at the agent, in batches, or at the observers"
    )
    pipeline: bool = Field(
        False, description="observers go on while the agent learns: the policy that acts is one version old"
    )
    rollout_steps: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="steps of each environment in an iteration (with ALGORITHM=reinforce, at least: it goes on until "
        "an episode ends); empty: by the spaces",
    )
    rollout_timeout: Seconds = Field(120.0, description="deadline of one observer's rollout")
    max_iterations: int = Field(1000, ge=1, le=100_000_000, description="iterations after which the job ends unsolved")
    max_steps: int = Field(
        0, ge=0, description="environment steps after which the job ends unsolved; 0: MAX_ITERATIONS alone"
    )
    gamma: float | None = Field(None, ge=0, le=1, description="discount of the return, per step; empty: by the spaces")
    gae_lambda: float | None = Field(
        None, ge=0, le=1, description="decay of the advantage's later terms (GAE); empty: by the spaces"
    )
    lr: float | None = Field(None, gt=0, le=10, description="Adam's learning rate; empty: by the spaces")
    lr_schedule: Literal["constant", "linear", "adaptive"] | None = Field(
        None,
        description="linear: LR and CLIP_RATIO fall to 0 until MAX_STEPS or MAX_ITERATIONS; adaptive: from LR on, the "
        "learning rate keeps the KL divergence of a pass near TARGET_KL, below a bound that falls to 0 in the last "
        "half; empty: by the spaces",
    )
    epochs: int | None = Field(
        None, ge=1, le=1000, description="passes over an iteration's samples; empty: by the spaces"
    )
    minibatches: int | None = Field(
        None, ge=1, le=1024, description="optimizer steps of a pass, each on its share of it; empty: by the spaces"
    )
    clip_ratio: float | None = Field(
        None, gt=0, le=100, description="bound on the policy's change within an iteration; empty: by the spaces"
    )
    target_kl: float | None = Field(
        None,
        ge=0,
        le=100,
        description="KL divergence from the policy that acted, in nats: four times as much ends an iteration's passes; "
        "0: none does; empty: by the spaces",
    )
    entropy_coef: float | None = Field(
        None, ge=0, le=10, description="weight of the entropy bonus in the loss; empty: by the spaces"
    )
    max_grad_norm: float | None = Field(
        None, gt=0, le=1e9, description="global norm that gradients are clipped to; empty: by the spaces"
    )
    normalize: bool | None = Field(
        None, description="observations are normalised by running statistics of all observers; empty: by the spaces"
    )
    exploration: Literal["gaussian", "sde"] | None = Field(
        None,
        description="noise of Box actions: anew at each step, or a function of the state for a rollout (gSDE); empty: "
        "by the spaces",
    )
    memory: Literal["none", "lstm", "gru"] = Field("none", description="recurrent layer of the default policy")
    sequence_steps: int = Field(
        16, ge=1, le=100_000, description="steps through which gradients flow back in a recurrent policy"
    )
    hidden_size: int | None = Field(
        None, ge=1, le=65536, description="width of the default policy's layers; empty: by the spaces"
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the default policy's dropout; above 0 the policy that learns is not the one acting",
    )
    policy: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:factory called with the observation and the action space; returns a torch module "
        "from observations to the parameters of the actions' distribution, or to (parameters, value); empty: the "
        "default policy",
    )


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
    export="rolecall.jobs.rl.export:export",
    metrics=METRICS,
    score="return",
    unit="steps",
    pinned=(
        "algorithm", "env_id", "wrappers", "policy", "memory", "dropout", "hidden_size", "normalize", "exploration",
    ),
    layout=2,
)  # fmt: skip
