"""The agent, rank 0: commands the observers' rollouts, answers their calls for actions, and learns."""

from __future__ import annotations

import functools
import queue
import time
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.job import rpc as rolecall_rpc
from rolecall.job.context import Context, Outcome
from rolecall.job.rpc import PeerLostError
from rolecall.jobs.rl import RlSettings, envs, model
from rolecall.jobs.rl.batching import Answer, Batcher
from rolecall.jobs.rl.envs import Trajectory
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.observer import Observer, Rollout, group_sizes, rollout

_agent: Agent | None = None


def run(context: Context) -> Outcome:
    """Train until the running return passes the environment's threshold, MAX_ITERATIONS, or a drain."""
    global _agent
    _agent = Agent(context)
    return _agent.train()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def act(observer: str, group: int, message: bytes, last: bool) -> torch.futures.Future[Answer]:
    """Called by an observer at each step of a group of its environments; answered with the group's actions."""
    assert _agent is not None
    return _agent.batcher.submit((observer, group), message, last)


class Agent:
    """The model, the learner, and the RRefs of the generation's observers."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.metrics = context.metrics
        self.log = telemetry.log()
        settings = context.settings
        assert isinstance(settings, RlSettings)
        self.settings = settings
        made = envs.make(settings.env_id, 1)
        observation, action = made.single_observation_space, made.single_action_space
        self.threshold = envs.threshold(made)
        made.close()
        assert isinstance(observation, Box)
        assert isinstance(action, Discrete)
        self.learner = Learner(model.build(settings, observation, action), settings, context.device, context.threads)
        self.actor = model.Actor(self.learner.model, context.device)
        self.iteration = self.samples = 0
        self.running = self.last = self.seconds = 0.0
        self._restore()
        self.batcher = Batcher(
            self.actor.act,
            observation.shape,
            observation.dtype,
            settings.max_batch,
            settings.batch_wait,
            self._inferred,
        )
        self._answers: queue.Queue[tuple[str, torch.futures.Future[Any] | None]] = queue.Queue()
        self._saved_at = time.monotonic()

    # ---- the loop

    def train(self) -> Outcome:
        """One iteration after another: rollouts, update, log, checkpoint."""
        me = rpc.RRef(self)
        self.context.on_lost(self._lost)
        self.observers = {
            peer.name: rpc.remote(peer.name, Observer, args=(me,), timeout=self.settings.connect_timeout)
            for peer in self.context.peers("observer")
        }
        self.log.info("training", env_id=self.settings.env_id, iteration=self.iteration, observers=len(self.observers),
                      inference=self.settings.inference, threshold=self.threshold)  # fmt: skip
        self.context.note("train", self.iteration, 0)
        if self.threshold is not None:
            self.context.note("goal", self.iteration, self.threshold)
        started, before, logged = time.monotonic(), self.seconds, (time.monotonic(), self.samples)
        while not self._over():
            if self.context.draining and self._save(drain=True):
                return Outcome("drained", self.iteration)
            trajectories, returns = self._rollouts()
            if not trajectories:
                continue  # every observer of this iteration was lost
            self._update(trajectories)
            self._score(returns)
            self.seconds = before + time.monotonic() - started
            self.context.report(self.iteration)
            self.context.note("done", self.iteration, self.samples)
            if self.iteration % self.settings.log_interval == 0:
                now = time.monotonic(), self.samples
                self.log.info(
                    f"Episode {self.iteration}\tLast reward: {self.last:.2f}\tAverage reward: {self.running:.2f}",
                    steps_per_s=round((now[1] - logged[1]) / (now[0] - logged[0])),
                )
                logged = now
            if time.monotonic() - self._saved_at > self.settings.checkpoint_interval:
                self._save()
        return self._finish()

    def _over(self) -> bool:
        return self._solved() or self.iteration >= self.settings.max_iterations

    def _solved(self) -> bool:
        return self.threshold is not None and self.iteration > 0 and self.running > self.threshold

    def _finish(self) -> Outcome:
        if self._solved():
            self.log.info(f"Solved! Running reward is now {self.running:.2f}", iterations=self.iteration)
        else:
            bar = "has no reward threshold" if self.threshold is None else f"solves at {self.threshold:g}"
            self.log.info(
                f"Stopped at MAX_ITERATIONS={self.settings.max_iterations}: running reward {self.running:.2f}; "
                f"{self.settings.env_id} {bar}"
            )
        saved = self._save()
        summary = {
            "solved": self._solved(),
            "iterations": self.iteration,
            "running_return": self.running,
            "env_steps": self.samples,
            "seconds": self.seconds,
            "saved": saved,
        }
        return Outcome("finished", self.iteration, summary)

    # ---- an iteration

    def _rollouts(self) -> tuple[list[Trajectory], list[float]]:
        """A rollout of every observer that is left: the trajectories in order of rank, and each one's mean return."""
        names = [name for name in self.observers if name not in self.context.lost]
        if not names:
            # the gang ends the generation, or drains it; nothing can be learned until then
            if not self.context.wait_draining(2 * self.settings.lease_seconds):
                raise PeerLostError("no observer is left")
            return [], []
        policy = None
        self.learner.model.eval()
        if self.settings.inference == "observer":
            policy = {name: value.cpu() for name, value in self.learner.model.policy.state_dict().items()}
        groups = range(len(group_sizes(self.settings)))
        version = self.learner.version
        self.batcher.begin([(name, group) for name in names for group in groups] if policy is None else [], version)
        while not self._answers.empty():
            self._answers.get_nowait()
        with telemetry.Timer() as timer:
            for name in names:
                observer, limit = self.observers[name], self.settings.rollout_timeout
                answer = rolecall_rpc.call(name, rollout, observer, policy, version, timeout=limit)
                answer.add_done_callback(functools.partial(self._answered, name))
            rollouts = self._gather(set(names))
        self.metrics.rl_rollout_seconds.observe(timer.seconds)
        if policy is None:
            trajectories = self.batcher.trajectories(set(rollouts))
        else:
            trajectories = [
                Trajectory(*arrays, version) for name in sorted(rollouts) for arrays in rollouts[name].trajectories
            ]
        returns = [float(np.mean(rollouts[name].returns)) for name in sorted(rollouts) if rollouts[name].returns]
        if len(returns) < len(rollouts):
            self.log.warning("no episode ended within MAX_ROLLOUT_STEPS", steps=self.settings.max_rollout_steps)
        return trajectories, returns

    def _gather(self, waiting: set[str]) -> dict[str, Rollout]:
        """The answers of the observers in `waiting`, less those that fail or are lost meanwhile."""
        rollouts: dict[str, Rollout] = {}
        waiting -= self.context.lost
        while waiting:
            # no longer than the calls' own deadline
            name, answer = self._answers.get(timeout=self.settings.rollout_timeout + self.settings.rpc_timeout)
            if name not in waiting:
                continue
            waiting.discard(name)
            if answer is None or name in self.context.lost:
                self.log.warning("observer lost", observer=name)
                continue
            problem = "it failed"
            try:
                found = answer.value()
            except RuntimeError as error:  # the call's own: the observer is gone or silent
                found, problem = None, rolecall_rpc.first_line(error)
            if found is not None:
                rollouts[name] = found
            else:
                self.log.warning("observer given up", observer=name, problem=problem)
                self.context.give_up(name)
        return {name: found for name, found in rollouts.items() if name not in self.context.lost}

    def _answered(self, name: str, answer: torch.futures.Future[Any]) -> None:
        self._answers.put((name, answer))

    def _lost(self, name: str) -> None:
        self.batcher.drop(name)
        self._answers.put((name, None))

    def _update(self, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            self.metrics.rl_policy_age_versions.observe(self.learner.version - trajectory.version)
        with telemetry.Timer() as timer:
            stats = self.learner.update(trajectories)
        hint = f"the update is not finite ({stats}); lower LR or check the rewards of ENV_ID"
        self.context.require_finite(*stats.values(), hint=hint)
        self.iteration += 1
        self.samples += int(stats["samples"])
        self.metrics.rl_update_seconds.observe(timer.seconds)
        self.metrics.rl_samples.inc(stats["samples"])
        self.metrics.rl_iterations.inc()
        self.metrics.step.set(self.iteration)
        self.metrics.rl_policy_version.set(self.learner.version)
        self.metrics.rl_policy_loss.set(stats["policy_loss"])
        self.metrics.rl_baseline_loss.set(stats["baseline_loss"])
        self.metrics.rl_policy_entropy_nats.set(stats["entropy"])

    def _score(self, returns: list[float]) -> None:
        """The tutorial's running reward: of the worst observer's mean return."""
        if returns:
            self.last = min(returns)
            if self.iteration == 1 and self.threshold is not None and self.threshold <= 0:
                self.running = self.last  # from the tutorial's 0 it would count as solved at once
            self.running = 0.95 * self.running + 0.05 * self.last
        self.metrics.rl_return_last.set(self.last)
        self.metrics.rl_return_running.set(self.running)
        self.context.note("score", self.iteration, self.running)
        self.metrics.rl_return_threshold.set(float("nan") if self.threshold is None else self.threshold)

    def _inferred(self, size: int, seconds: float) -> None:
        self.metrics.rl_inference_batch_observations.observe(size)
        self.metrics.rl_inference_seconds.observe(seconds)

    # ---- checkpoints

    def _state(self) -> dict[str, Any]:
        s = self.settings
        return {
            "learner": self.learner.state(),
            "iteration": self.iteration,
            "samples": self.samples,
            "running": self.running,
            "last": self.last,
            "seconds": self.seconds,
            "settings": {"env_id": s.env_id, "policy": s.policy, "hidden_size": s.hidden_size, "dropout": s.dropout},
        }

    def _save(self, drain: bool = False) -> bool:
        self._saved_at = time.monotonic()
        return self.context.save(self.iteration, self._state(), drain)

    def _restore(self) -> None:
        assert self.context.checkpoints is not None
        found = self.context.checkpoints.newest()
        if found is None:
            return
        state = found.state
        self.learner.load(state["learner"])
        self.iteration, self.samples = state["iteration"], state["samples"]
        self.running, self.last, self.seconds = state["running"], state["last"], state["seconds"]
        self.log.info("resumed", file=found.path.name, iteration=self.iteration)
