"""The agent, rank 0: requests the observers' rollouts, answers their calls for actions, and learns."""

from __future__ import annotations

import itertools
import queue
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.rl import RlSettings, calls, envs, model
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import PolicyState, Rollout


def run(context: Context[RlSettings]) -> dict[str, Any]:
    """Trains until the running return passes the environment's threshold, or for MAX_ITERATIONS."""
    settings, metrics = context.settings, context.metrics
    env = envs.describe(settings.env_id)
    learner = Learner(model.build(settings, env.observation, env.action), settings, context.device, context.threads)
    score = Score(env.threshold)
    iteration = env_steps = 0
    if snapshot := context.snapshot():
        iteration, env_steps = snapshot.step, snapshot.state["samples"]
        score = Score(env.threshold, snapshot.state["last"], snapshot.state["running"], updates=iteration)
        learner.load(snapshot.state["learner"])

    def state() -> dict[str, Any]:
        return {"learner": learner.state(), "samples": env_steps, "last": score.last, "running": score.running}

    def observe(size: int, seconds: float) -> None:
        metrics.rl_inference_batch_observations.observe(size)
        metrics.rl_inference_seconds.observe(seconds)

    actor = model.Actor(learner.model, context.device)
    batcher = calls.batcher.set(Batcher(actor.act, env.observation.shape, env.observation.dtype, observe=observe))
    collector = Collector(context, batcher)
    context.start(iteration, done=env_steps, goal=env.threshold, env_id=settings.env_id, threshold=env.threshold,
                  inference=settings.inference, observers=len(context.peers("observer")))  # fmt: skip
    while not score.solved and iteration < settings.max_iterations:
        if context.due:
            context.save(iteration, state())
        context.require_peers("observer")
        policy = learner.policy_state() if settings.inference == "observer" else None
        with context.timer() as timer:
            rollouts = collector.collect(policy, learner.version)
        trajectories = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
        if not trajectories:
            continue  # every observer was lost
        metrics.rl_rollout_seconds.observe(timer.seconds)
        for trajectory in trajectories:
            metrics.rl_policy_age_versions.observe(learner.version - trajectory.version)
        with context.timer() as timer:
            update = learner.update(trajectories)
        context.require_finite(
            *update, hint=f"the update is not finite ({update}); lower LR or check the rewards of ENV_ID"
        )
        metrics.rl_update_seconds.observe(timer.seconds)
        score.add([float(np.mean(rollout.returns)) for rollout in rollouts if rollout.returns])
        iteration, env_steps = iteration + 1, env_steps + update.samples
        context.log(
            iteration,
            done=env_steps,
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
    return context.finish(message, step=iteration, state=state(), solved=score.solved, iterations=iteration,
                          running_return=score.running, env_steps=env_steps)  # fmt: skip


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


class Collector:
    """Has the observers make an iteration's rollouts, without those that fail or are lost meanwhile."""

    def __init__(self, context: Context[RlSettings], batcher: Batcher) -> None:
        self.context, self.batcher = context, batcher
        self._events: queue.SimpleQueue[tuple[str, Future[Rollout] | None]] = queue.SimpleQueue()
        context.on_lost(self._on_lost)

    def collect(self, policy: PolicyState | None, version: int) -> list[Rollout]:
        """A rollout of each observer that is left, in a fixed order, with trajectories also where the agent acted."""
        context, settings = self.context, self.context.settings
        events = self._events = queue.SimpleQueue()  # answers to earlier requests go to another queue
        names = [peer.name for peer in context.peers("observer")]
        groups = itertools.starmap(Group, itertools.product(names, range(len(envs.group_sizes(settings)))))
        self.batcher.begin(list(groups) if policy is None else [], version)
        for name in names:
            answer = context.call(name, calls.rollout, policy, version, timeout=settings.rollout_timeout)
            answer.add_done_callback(lambda answer, name=name: events.put((name, answer)))
        rollouts: dict[str, Rollout] = {}
        waiting = set(names)
        while waiting:
            # longer than the calls' own deadline: each call ends, and with it this wait
            name, answer = events.get(timeout=settings.rollout_timeout + settings.rpc_timeout)
            if name not in waiting:
                continue
            waiting.discard(name)
            if answer is None or name in context.lost:
                context.logger.warning("observer lost", observer=name)
                continue
            try:
                rollouts[name] = answer.value()
            except RuntimeError as error:  # the call's own: the observer failed, is gone or silent
                context.logger.warning("observer given up", observer=name, problem=str(error).partition("\n")[0])
                context.give_up(name)
        complete = [(name, rollouts[name]) for name in sorted(rollouts) if name not in context.lost]
        if not all(rollout.returns for _, rollout in complete):
            context.logger.warning("no episode ended in a rollout", steps=envs.MAX_ROLLOUT_STEPS)
        return [
            Rollout(rollout.returns, rollout.trajectories or self.batcher.trajectories(name))
            for name, rollout in complete
        ]

    def _on_lost(self, name: str) -> None:
        self.batcher.drop(name)
        self._events.put((name, None))
