"""Reinforcement learning: an agent (rank 0) learns from observers that step gymnasium environments.

After "Implementing batch RPC processing using asynchronous executions" and "Getting started with distributed RPC
framework" of the PyTorch tutorials. docs/rl.md lists the differences.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolecall import FromUser, Job, Metric, Role, Seconds, Settings


class RlSettings(Settings):
    """The settings of `rl`. The default of a setting that is None depends on the spaces: see `defaults`."""

    algorithm: Literal["ppo", "reinforce", "sac", "dqn"] = Field(
        "ppo",
        description="ppo; reinforce: the tutorial's policy gradient with whole returns; from a replay buffer, sac for "
        "Box actions and dqn for Discrete ones",
    )
    solved_by: Literal["episodes", "running", "never"] = Field(
        "episodes",
        description="score compared with the environment's threshold: episodes: the mean return of the last 100; "
        "running: the tutorial's running reward; never: train to the end",
    )
    observers: int = Field(2, ge=1, le=1024, description="observers that the job waits for at its start")
    min_observers: int = Field(1, ge=1, le=1024, description="minimum number of observers")
    max_observers: int = Field(64, ge=1, le=1024, description="maximum number of observers")
    env_id: Annotated[str, FromUser(unless="[^:]*")] = Field(
        "CartPole-v1", min_length=1, description="gymnasium environment, `module:Id` to import first"
    )
    wrappers: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:function that wraps each environment; empty: images are converted to grey, scaled "
        "to 84 x 84 and stacked by four",
    )
    env_timeout: Seconds = Field(
        60.0, description="deadline of one step of the environments; an observer that exceeds it is replaced"
    )
    num_envs: int | None = Field(
        None, ge=1, le=65536, description="environments of an observer, stepped together; empty: by the spaces"
    )
    inference: Literal["agent", "observer"] = Field(
        "agent", description="rank that computes actions: the agent, in batches, or each observer"
    )
    pipeline: bool | None = Field(
        None,
        description="observers step while the agent learns: the acting policy is one version old; empty: by the spaces",
    )
    rollout_steps: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="steps of each environment in an iteration (with ALGORITHM=reinforce, at least: it goes on until "
        "an episode ends); empty: by the spaces, and fewer as long as all rewards are alike",
    )
    rollout_timeout: Seconds = Field(120.0, description="deadline of one observer's rollout")
    max_iterations: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="iterations after which the job ends unsolved; empty: none if MAX_STEPS is given, otherwise by the "
        "spaces",
    )
    max_steps: int = Field(
        0, ge=0, description="environment steps after which the job ends unsolved; 0: MAX_ITERATIONS alone"
    )
    gamma: float | None = Field(
        None, ge=0, le=1, description="discount of the return, per step; empty: by the spaces, perhaps growing"
    )
    gae_lambda: float | None = Field(
        None, ge=0, le=1, description="decay of the advantage's later terms (GAE); empty: by the spaces"
    )
    lr: float | None = Field(
        None, gt=0, le=10, description="Adam's learning rate, adaptive if TARGET_KL > 0; empty: by the spaces"
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
        description="KL divergence of a pass from the acting policy, in nats, that the learning rate adapts to; "
        "four times as much ends an iteration's passes; 0: constant learning rate, no limit; empty: by the spaces",
    )
    entropy_coef: float | None = Field(
        None, ge=0, le=10, description="weight of the entropy bonus in the loss; empty: by the spaces"
    )
    replay_size: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="steps in the replay buffer (sac, dqn); empty: by the spaces",
    )
    learning_starts: int | None = Field(
        None,
        ge=0,
        description="steps with random actions before the first update (sac, dqn); with dqn the share of random "
        "actions falls from 1 to 0.05 in the next ten times as many; empty: by the spaces, at most a tenth of "
        "MAX_STEPS",
    )
    updates_per_step: float | None = Field(
        None, gt=0, le=1000, description="optimizer steps for each environment step (sac, dqn); empty: by the spaces"
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="samples of an optimizer step (sac, dqn); empty: by the spaces",
    )
    n_step: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="rewards in a return before the critic's estimate, within a rollout (sac, dqn); empty: by the "
        "spaces",
    )
    normalize: bool | None = Field(
        None, description="normalise observations by running statistics of all observers; empty: by the spaces"
    )
    exploration: Literal["gaussian", "sde"] | None = Field(
        None,
        description="noise of Box actions: gaussian: independent at each step; sde: a function of the state, drawn for "
        "each rollout (gSDE); empty: by the spaces and the first episodes",
    )
    memory: Literal["none", "lstm"] = Field("none", description="recurrent layer of the default policy")
    hidden_size: int | None = Field(
        None, ge=1, le=65536, description="width of the default policy's layers; empty: by the spaces"
    )
    policy: Annotated[str, FromUser()] = Field(
        "",
        description="package.module:factory called with the observation and the action space; returns a torch module "
        "from observations to the parameters of the actions' distribution, or to (parameters, value); empty: the "
        "default policy",
    )


AGENT, OBSERVER = ("agent",), ("observer",)
BATCH_BUCKETS = tuple(2**power for power in range(14))

METRICS = (
    Metric("counter", "rl_env_steps_total", "Environment steps taken.", roles=OBSERVER),
    Metric("counter", "rl_episodes_total", "Episodes completed.", roles=OBSERVER),
    Metric("gauge", "rl_return_last", "Worst observer's mean episode return in the last iteration.", roles=AGENT),
    Metric("gauge", "rl_return_mean", "Mean return of the last 100 episodes of all observers.", roles=AGENT),
    Metric("gauge", "rl_return_running", "The tutorial's running reward.", roles=AGENT),
    Metric("gauge", "rl_episode_steps", "Mean length of the last 100 episodes.", roles=AGENT),
    Metric(
        "histogram",
        "rl_policy_age_versions",
        "Updates between the policy that acted and the one that learns from it.",
        buckets=(0, 1, 2, 4, 8),
        roles=AGENT,
    ),
    Metric("histogram", "rl_inference_batch_observations", "Observations in one forward pass.", buckets=BATCH_BUCKETS),
    Metric("histogram", "rl_inference_seconds", "Time of one forward pass, sampling included."),
    Metric("histogram", "rl_rollout_seconds", "Time of an iteration's rollouts.", buckets=Metric.DURATION, roles=AGENT),
    Metric("histogram", "rl_update_seconds", "Time of an iteration's update.", buckets=Metric.DURATION, roles=AGENT),
    Metric("gauge", "rl_policy_loss", "Policy loss of the last update.", roles=AGENT),
    Metric("gauge", "rl_baseline_loss", "Value loss of the last update.", roles=AGENT),
    Metric("gauge", "rl_policy_entropy_nats", "Mean entropy of the policy in the last update.", roles=AGENT),
    Metric(
        "gauge",
        "rl_kl_nats",
        "KL divergence of the policy from the one that acted, mean over the last update.",
        roles=AGENT,
    ),
    Metric(
        "gauge",
        "rl_clipped_ratio",
        "Share of the last update's samples whose probability ratio was beyond CLIP_RATIO.",
        roles=AGENT,
    ),
    Metric(
        "gauge",
        "rl_explained_variance_ratio",
        "Share of the returns' variance that the values explained before the last update.",
        roles=AGENT,
    ),
    Metric(
        "gauge",
        "rl_update_passes",
        "Passes over the last iteration's samples; 0 while the policy is held.",
        roles=AGENT,
    ),
)
PRELOAD = ("rolecall.jobs.rl.roles",)
JOB = Job(
    summary="reinforcement learning: an agent learns, observers step gymnasium environments",
    settings=RlSettings,
    roles=(
        Role("agent", "rolecall.jobs.rl.roles:Agent", preload=PRELOAD),
        Role(
            "observer",
            "rolecall.jobs.rl.roles:Observer",
            "OBSERVERS",
            "MIN_OBSERVERS",
            "MAX_OBSERVERS",
            preload=PRELOAD,
        ),
    ),
    check="rolecall.jobs.rl.model:check",
    evaluate="rolecall.jobs.rl.evaluate:evaluate",
    export="rolecall.jobs.rl.export:export",
    metrics=METRICS,
    score="return",
    unit="steps",
    pinned=(
        "algorithm",
        "env_id",
        "wrappers",
        "policy",
        "memory",
        "hidden_size",
        "normalize",
        "exploration",
        "replay_size",
    ),
    training_only=("replay",),
    layout=2,
)
