"""The agent, rank 0: requests the observers' rollouts, answers their calls for actions, and learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rolecall import Context
from rolecall.jobs.rl import RlSettings, calls, envs, model
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import Trajectory


def run(context: Context[RlSettings]) -> dict[str, Any]:
    """Trains until the running return passes the environment's threshold, or for MAX_ITERATIONS."""
    settings, metrics = context.settings, context.metrics
    env = envs.describe(settings.env_id)
    learner = Learner(model.build(settings, env.observation, env.action), settings, context.device, context.threads)
    score = Score(env.threshold)
    state = context.restore({"learner": learner, "score": score, "samples": 0})

    def observe(size: int, seconds: float) -> None:
        metrics.rl_inference_batch_observations.observe(size)
        metrics.rl_inference_seconds.observe(seconds)

    actor = model.Actor(learner.model, context.device)
    batcher = calls.batcher.set(Batcher(actor.act, env.observation.shape, env.observation.dtype, observe=observe))
    context.on_lost(batcher.drop)
    groups = range(len(envs.group_sizes(settings)))
    steps = context.steps(settings.max_iterations, until=lambda: score.solved, goal=env.threshold,
                          env_id=settings.env_id, threshold=env.threshold, inference=settings.inference,
                          observers=len(context.peers("observer")))  # fmt: skip
    for iteration in steps:
        policy = learner.policy_state() if settings.inference == "observer" else None
        acting = context.peers("observer") if policy is None else []  # with this rank's policy
        batcher.begin([Group(observer.name, number) for observer in acting for number in groups], learner.version)
        with context.timer() as timer:
            rollouts = dict(context.call_each("observer", calls.rollout, policy, learner.version,
                                              timeout=settings.rollout_timeout))  # fmt: skip
        trajectories: list[Trajectory] = []
        for observer in sorted(rollouts, key=lambda peer: peer.rank):  # a run can be repeated, whoever came first
            trajectories += rollouts[observer].trajectories or batcher.trajectories(observer.name)
        if not trajectories:
            context.redo()  # every observer was lost
            continue
        metrics.rl_rollout_seconds.observe(timer.seconds)
        for trajectory in trajectories:
            metrics.rl_policy_age_versions.observe(learner.version - trajectory.version)
        with context.timer() as timer:
            update = learner.update(trajectories)
        metrics.rl_update_seconds.observe(timer.seconds)
        context.require_finite(
            *update, hint=f"the update is not finite ({update}); lower LR or check the rewards of ENV_ID"
        )
        returns = [rollout.returns for rollout in rollouts.values()]
        if not all(returns):
            context.logger.warning("no episode ended in a rollout", steps=envs.MAX_ROLLOUT_STEPS)
        score.add([float(np.mean(each)) for each in returns if each])
        state["samples"] += update.samples
        context.log(
            done=state["samples"],
            score=score.running,
            message=f"Episode {iteration}\tLast reward: {score.last:.2f}\tAverage reward: {score.running:.2f}",
            rl_return_last=score.last,
            rl_policy_version=learner.version,
            rl_policy_loss=update.policy_loss,
            rl_baseline_loss=update.baseline_loss,
            rl_policy_entropy_nats=update.entropy,
        )
    if score.solved:
        message = f"Solved! Running reward is now {score.running:.2f}"
    else:
        bar = "has no reward threshold" if env.threshold is None else f"solves at {env.threshold:g}"
        message = (
            f"Stopped at MAX_ITERATIONS={settings.max_iterations}: running reward {score.running:.2f}; "
            f"{settings.env_id} {bar}"
        )
    return context.finish(message, solved=score.solved, iterations=context.step, running_return=score.running,
                          env_steps=state["samples"])  # fmt: skip


@dataclass
class Score:
    """The tutorial's running reward. `last` is the worst observer's mean return, `updates` counts calls of `add`."""

    threshold: float | None
    last: float = 0.0
    running: float = 0.0
    updates: int = 0

    def add(self, returns: list[float]) -> None:
        """Takes an iteration's mean return of each observer in whose rollout an episode ended."""
        if not returns:
            return
        self.last = min(returns)
        if not self.updates and self.threshold is not None and self.threshold <= 0:
            self.running = self.last  # from the tutorial's 0 it would count as solved at once
        self.running = 0.95 * self.running + 0.05 * self.last
        self.updates += 1

    @property
    def solved(self) -> bool:
        """Whether the running reward has passed the threshold."""
        return self.threshold is not None and self.updates > 0 and self.running > self.threshold

    def state_dict(self) -> dict[str, Any]:
        """All but the threshold, which is the environment's."""
        return {"last": self.last, "running": self.running, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self.last, self.running, self.updates = state["last"], state["running"], state["updates"]
