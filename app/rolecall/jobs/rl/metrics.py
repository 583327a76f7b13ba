"""The metrics of `rl`."""

from __future__ import annotations

from rolecall import Metric

COUNTS = tuple(2**power for power in range(14))

METRICS = (
    Metric("counter", "rl_env_steps_total", "Environment steps taken.", roles=("observer",)),
    Metric("counter", "rl_episodes_total", "Episodes completed.", roles=("observer",)),
    Metric("gauge", "rl_return_last", "Worst observer's mean episode return in the last iteration.", roles=("agent",)),
    Metric("gauge", "rl_return_mean", "Mean return of the last 100 episodes of all observers.", roles=("agent",)),
    Metric("gauge", "rl_return_running", "The tutorial's running reward.", roles=("agent",)),
    Metric("gauge", "rl_episode_steps", "Mean length of the last 100 episodes.", roles=("agent",)),
    Metric("gauge", "rl_policy_version", "Version of the policy in use, as its number of updates."),
    Metric(
        "histogram",
        "rl_policy_age_versions",
        "Updates of the policy between a rollout and the update that uses it.",
        buckets=(0, 1, 2, 4, 8),
        roles=("agent",),
    ),
    Metric("histogram", "rl_inference_batch_observations", "Observations in one forward pass.", buckets=COUNTS),
    Metric("histogram", "rl_inference_seconds", "Time of one forward pass, including sampling."),
    Metric(
        "histogram", "rl_rollout_seconds", "Time of an iteration's rollouts.", buckets=Metric.DURATION, roles=("agent",)
    ),
    Metric(
        "histogram", "rl_update_seconds", "Time of an iteration's update.", buckets=Metric.DURATION, roles=("agent",)
    ),
    Metric("gauge", "rl_policy_loss", "Policy loss of the last update.", roles=("agent",)),
    Metric("gauge", "rl_baseline_loss", "Value loss of the last update.", roles=("agent",)),
    Metric("gauge", "rl_policy_entropy_nats", "Mean entropy of the policy in the last update.", roles=("agent",)),
    Metric(
        "gauge",
        "rl_kl_nats",
        "Mean KL divergence between the policy of the rollouts and the updated one, in the last update.",
        roles=("agent",),
    ),
    Metric(
        "gauge",
        "rl_clipped_ratio",
        "Fraction of the last update's samples with a probability ratio beyond CLIP_RATIO.",
        roles=("agent",),
    ),
    Metric(
        "gauge",
        "rl_explained_variance_ratio",
        "Fraction of the returns' variance that the values explain, before the last update.",
        roles=("agent",),
    ),
    Metric(
        "gauge",
        "rl_update_passes",
        "Passes over the last iteration's samples; 0 while the policy is not updated.",
        roles=("agent",),
    ),
)
