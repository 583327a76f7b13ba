"""The metrics of `rl`."""

from __future__ import annotations

from rolecall import Metric

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
