"""The two roles: the agent learns, observers step environments.

Shapes: n are the environments of a group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from rolecall import Context, Peer, PeerLostError, remote
from rolecall.jobs.rl import RlSettings, envs, model
from rolecall.jobs.rl.actor import Actor, RecurrentState, TrajectoryBuilder
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.defaults import OffPolicy, OnPolicy, choose
from rolecall.jobs.rl.dqn import Dqn
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import Array, Episode, PolicyState, Rollout, Trajectory
from rolecall.jobs.rl.ppo import Ppo
from rolecall.jobs.rl.sac import Sac
from rolecall.jobs.rl.score import Score
from rolecall.jobs.rl.spaces import Spaces
from rolecall.jobs.rl.stepping import BrokenEnvError, Envs

WEIGHTS = "policy"  # their name in metrics


class Experience(NamedTuple):
    """The result of an iteration's rollouts: the `observers`, the episodes that ended at each, and all trajectories."""

    observers: list[Peer]
    episodes: list[list[Episode]]
    trajectories: list[Trajectory]


def make_learner(
    settings: RlSettings, spaces: Spaces, choices: OnPolicy | OffPolicy, device: torch.device, threads: int = 1
) -> Learner:
    """The learner of ALGORITHM, which computes with `threads` threads. Raises UsageError as `model.build` does."""
    built = model.build(settings, spaces, choices)
    if isinstance(choices, OnPolicy):
        return Ppo(built, settings, choices, device, threads)
    kind = Sac if settings.algorithm == "sac" else Dqn
    return kind(built, settings, choices, spaces=spaces, device=device, threads=threads)


class Agent:
    """Rank 0: requests the observers' rollouts, answers their calls for actions, and learns."""

    def __init__(self, context: Context[RlSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.env = envs.describe(self.settings)
        spaces = self.env.spaces
        self.choices = choices = choose(self.settings, spaces)
        self.learner = make_learner(self.settings, spaces, choices, context.device, context.threads)
        self.score = Score(self.env.threshold, self.settings.solved_by, self.env.longest)
        # values that determine the shape of the model; a user's policy has no features for gSDE
        names = ("hidden_size", "normalize", "exploration", "replay_size")
        chosen = {name: getattr(choices, name, None) for name in names}
        if self.settings.policy:
            chosen["exploration"] = None
        state = {"learner": self.learner, "score": self.score, "samples": 0, **self.learner.shares(context)}
        self.state = context.restore(state, chosen)
        self.actor = Actor(model.build(self.settings, spaces, choices), context.device)
        self.batcher = Batcher(self.actor, spaces.observation.shape, observe=self._observe_inference)
        context.on_lost(self.batcher.drop)
        self._sizes = envs.group_sizes(choices.num_envs, self.settings.inference)
        self._under_way: Iterator[tuple[Peer, Rollout]] | None = None
        self._known = set[Peer]()  # observers that have made a rollout

    @remote
    def act(self, group: Group, observations: Array, rewards: Array, dones: Array, last: bool) -> Future[Array]:
        """An observer's call for each step of a group. See `Batcher.submit`."""
        return self.batcher.submit(group, observations, rewards, dones, last)

    def run(self) -> dict[str, Any]:
        """Trains until the score reaches the environment's threshold, or for MAX_ITERATIONS or MAX_STEPS."""
        context, settings, choices = self.context, self.settings, self.choices
        score, state = self.score, self.state
        steps = context.steps(
            choices.max_iterations,
            until=self._ended,
            work=settings.max_steps or None,
            goal=self.env.threshold,
            env_id=settings.env_id,
            threshold=self.env.threshold,
            algorithm=settings.algorithm,
            inference=settings.inference,
            observers=len(context.peers("observer")),
        )
        for iteration in steps:
            with context.timer() as timer:
                experience = self._collect()
            if not experience.trajectories:
                context.redo()  # all observers were lost
                continue
            if choices.pipeline:
                self._request()
            self.metrics.rl_rollout_seconds.observe(timer.seconds)
            ages = [self.learner.version - trajectory.version for trajectory in experience.trajectories]
            for each in ages:
                self.metrics.rl_policy_age_versions.observe(each)
            score.add(
                experience.episodes,
                max(len(each.rewards) for each in experience.trajectories),
                first=not self._known.issuperset(experience.observers),
            )
            self._known.update(experience.observers)
            gauges: dict[str, Any] = {"rl_update_passes": 0.0} if score.holds else self._learn(experience.trajectories)
            if choices.pipeline:  # otherwise it is 0
                gauges["age"] = sum(ages) / len(ages)
            state["samples"] += sum(trajectory.samples for trajectory in experience.trajectories)
            if settings.algorithm == "reinforce" and not all(experience.episodes):
                context.logger.warning("no episode ended in a rollout", steps=envs.MAX_ROLLOUT_STEPS)
            context.log(
                done=state["samples"],
                score=score.value,
                spread=score.spread,
                message=f"Episode {iteration}\tLast reward: {score.last:.2f}\tAverage reward: {score.running:.2f}",
                rl_return_last=score.last,
                rl_return_mean=score.mean or 0.0,
                rl_return_running=score.running,
                rl_episode_steps=score.mean_length,
                **gauges,
            )
            self.metrics.weights_version.labels(WEIGHTS).set(self.learner.version)
        for _ in self._under_way or ():
            pass  # nobody learns from these rollouts
        if score.solved:
            message = f"Solved! {score}"
        else:
            limit = f"MAX_STEPS={settings.max_steps}" if self._ended() else f"MAX_ITERATIONS={choices.max_iterations}"
            bar = "has no reward threshold" if self.env.threshold is None else f"solves at {self.env.threshold:g}"
            message = f"Stopped at {limit}. {score}; {settings.env_id} {bar}"
        return context.finish(
            message,
            solved=score.solved,
            iterations=context.step,
            running_return=score.running,
            mean_return=score.mean or 0.0,
            env_steps=state["samples"],
            optimizer_steps=self.learner.optimizer_steps,
        )

    def _ended(self) -> bool:
        limit = self.settings.max_steps
        return self.score.solved or bool(limit and self.state["samples"] >= limit)

    # ---- rollouts

    def _request(self) -> None:
        """Requests the next rollouts under the current policy, of the observers that there are now."""
        policy, version = self.learner.policy_state(), self.learner.version
        observers, groups = self.context.peers("observer"), dict[Group, int]()
        if self.settings.inference == "agent":
            self.actor.load(policy)
            for peer in observers:
                groups.update({Group(peer.name, peer.join, number): size for number, size in enumerate(self._sizes)})
        self.batcher.begin(groups, version)
        self._under_way = self.context.options(timeout=self.settings.rollout_timeout, to=observers).call_each(
            Observer.rollout,
            policy if self.settings.inference == "observer" else None,
            version,
            self.learner.rollout_steps,
        )

    def _collect(self) -> Experience:
        """Waits for the rollouts, after requesting them if they are not under way. Leaves out lost observers."""
        if self._under_way is None:
            self._request()
        assert self._under_way is not None
        rollouts, self._under_way = dict(self._under_way), None
        observers = sorted(rollouts, key=lambda peer: peer.rank)  # a fixed order makes a run repeatable
        episodes, trajectories = [], []
        for observer in observers:
            episodes.append(rollouts[observer].episodes)
            trajectories += rollouts[observer].trajectories or self.batcher.trajectories(observer.name)
        return Experience(observers, episodes, trajectories)

    def _observe_inference(self, size: int, seconds: float) -> None:
        self.metrics.rl_inference_batch_observations.observe(size)
        self.metrics.rl_inference_seconds.observe(seconds)

    # ---- learning

    def _learn(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Updates the policy. Returns the values of the gauges of the update."""
        with self.context.timer() as timer:
            gauges = self.learner.update(trajectories, self._progress(), self.score.longest_episode)
        self.metrics.rl_update_seconds.observe(timer.seconds)
        self.context.require_finite(
            *gauges.values(),
            hint=f"the update is not finite ({gauges}); lower LR, or check the rewards of ENV_ID, or your own POLICY",
        )
        return gauges

    def _progress(self) -> float:
        settings = self.settings
        by_steps = self.state["samples"] / settings.max_steps if settings.max_steps else 0.0
        most = self.choices.max_iterations
        return min(1.0, max(by_steps, self.context.step / most if most else 0.0))


class Observer:
    """Steps groups of environments at the agent's request, with actions of the agent or of a policy that it got. Their
    episodes go on if the agent is lost, unless it took the state of a recurrent policy with it.
    """

    def __init__(self, context: Context[RlSettings]) -> None:
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.choices = choose(self.settings, envs.describe(self.settings).spaces)
        sizes = envs.group_sizes(self.choices.num_envs, self.settings.inference)
        self.groups = [
            Envs(self.settings, size, context.seed(place), first=sum(sizes[:place]), on_hang=context.fail)
            for place, size in enumerate(sizes)
        ]
        self.spaces = self.groups[0].spaces
        self._agent_of: tuple[int, int] | None = None  # generation and join of the newest rollout

    @remote(turn=True)
    def rollout(self, policy: PolicyState | None, version: int, steps: int) -> Rollout:
        """One rollout of `steps` under the policy of `version`; without a `policy`, the agent has it. An error ends
        this rank, which is replaced, and not the agent. The loss of the agent ends the rollout only.
        """
        try:
            return self._rollout(policy, version, steps)
        except PeerLostError:
            raise
        except Exception as error:
            if isinstance(error, BrokenEnvError):  # its text is one line; the traceback of its cause is for debugging
                self.context.logger.debug(str(error), exc_info=error.__cause__ or False)
            self.context.fail(error)
            raise

    def _rollout(self, policy: PolicyState | None, version: int, steps: int) -> Rollout:
        self.metrics.weights_version.labels(WEIGHTS).set(version)
        self._take_episodes()  # nobody has learned from the rollout in which they ended: its agent was lost
        if policy is None:
            self._begin_with_agent()
            self._step_with_agent(steps)
            trajectories = []
        else:
            self.metrics.weights_bytes.labels(WEIGHTS).inc(sum(tensor.nbytes for tensor in policy.values()))
            self._actor.load(policy)
            trajectories = [self._step_with_actor(version, steps)]
        episodes = self._take_episodes()
        self.context.report_step(version + 1)
        return Rollout(episodes, trajectories)

    def _take_episodes(self) -> list[Episode]:
        """The episodes that have ended since the last call."""
        episodes = [episode for group in self.groups for episode in group.take_episodes()]
        self.metrics.rl_episodes.inc(len(episodes))
        return episodes

    def _begin_with_agent(self) -> None:
        """Resets the environments if the agent does not have the state that their recurrent policy is in."""
        agent_of = self.context.generation, self.context.me.join
        if self._agent_of not in (None, agent_of) and self._actor.model.state_size:
            for group in self.groups:
                group.reset()
        self._agent_of = agent_of

    def _step_with_agent(self, steps: int) -> None:
        """A rollout with actions of the agent. While the agent computes those of one group, the other group steps."""
        waiting = [self._request(number, last=False) for number in range(len(self.groups))]
        for last in self._steps(steps):
            for number, group in enumerate(self.groups):
                group.step(waiting[number].result())
                self.metrics.rl_env_steps.inc(len(group.dones))
                waiting[number] = self._request(number, last)
        for answer in waiting:
            answer.result()

    def _request(self, number: int, last: bool) -> Future[Array]:
        """Calls the agent for the actions of group `number`."""
        group, name = self.groups[number], Group(self.context.me.name, self.context.me.join, number)
        seen = name, group.observations, group.rewards, group.dones
        return self.context.call(self.context.rank0, Agent.act, *seen, last)

    def _step_with_actor(self, version: int, steps: int) -> Trajectory:
        """A rollout with actions that this rank computes, of its one group."""
        (group,) = self.groups
        self._actor.refresh(self._state)
        builder = TrajectoryBuilder(version, self._state)
        builder.see(group.observations, group.rewards, group.dones)
        for _ in self._steps(steps):
            with self.context.timer() as timer:
                choice = self._actor.act(group.observations, group.dones, [self._state])
            self.metrics.rl_inference_seconds.observe(timer.seconds)
            self.metrics.rl_inference_batch_observations.observe(len(group.dones))
            builder.choose(*choice)
            group.step(choice.actions)
            builder.see(group.observations, group.rewards, group.dones)
            self.metrics.rl_env_steps.inc(len(group.dones))
        return builder.trajectory()

    def _steps(self, steps: int) -> Iterator[bool]:
        """Yields before each step of a rollout whether it is the last one.

        The tutorial's policy gradient learns from whole returns, so its rollouts go on after `steps` until an episode
        has ended, up to MAX_ROLLOUT_STEPS.
        """
        last = False
        for step in itertools.count(1):
            if last:
                return
            ended = self.settings.algorithm != "reinforce" or any(group.episodes for group in self.groups)
            last = step >= steps and (ended or step >= envs.MAX_ROLLOUT_STEPS)
            yield last

    @functools.cached_property
    def _actor(self) -> Actor:
        return Actor(model.build(self.settings, self.spaces, self.choices), self.context.device)

    @functools.cached_property
    def _state(self) -> RecurrentState:
        return self._actor.initial_state(len(self.groups[0].dones))
