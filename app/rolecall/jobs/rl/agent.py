"""The agent, rank 0: requests the observers' rollouts, answers their calls for actions, and learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rolecall import Context, Peer
from rolecall.jobs.rl import RlSettings, calls, envs, model
from rolecall.jobs.rl.actor import Actor
from rolecall.jobs.rl.batching import Batcher, Group
from rolecall.jobs.rl.defaults import choose
from rolecall.jobs.rl.learner import Learner
from rolecall.jobs.rl.messages import Episode, Rollout, Trajectory
from rolecall.jobs.rl.score import Score
from rolecall.jobs.rl.spaces import Spaces


def run(context: Context[RlSettings]) -> dict[str, Any]:
    """Trains until the score reaches the environment's threshold, or for MAX_ITERATIONS or MAX_STEPS."""
    settings, metrics = context.settings, context.metrics
    env = envs.describe(settings)
    choices = choose(settings, env.spaces)
    learner = Learner(model.build(settings, env.spaces, choices), settings, choices, context.device, context.threads)
    score = Score(env.threshold, settings.solved_by, env.longest)
    # values that determine the shape of the model; a user's policy has no features for gSDE
    chosen = {
        "hidden_size": choices.hidden_size,
        "normalize": choices.normalize,
        "exploration": None if settings.policy else choices.exploration,
    }
    state = context.restore({"learner": learner, "score": score, "samples": 0}, chosen)
    actor = Actor(model.build(settings, env.spaces, choices), context.device)
    sizes = envs.group_sizes(choices.num_envs, settings.inference)
    rollouts = Rollouts(context, learner, actor, env.spaces, sizes)

    def progress() -> float:
        by_steps = state["samples"] / settings.max_steps if settings.max_steps else 0.0
        return min(1.0, max(by_steps, context.step / settings.max_iterations))

    def ended() -> bool:
        return score.solved or bool(settings.max_steps and state["samples"] >= settings.max_steps)

    steps = context.steps(
        settings.max_iterations,
        until=ended,
        work=settings.max_steps or None,
        goal=env.threshold,
        env_id=settings.env_id,
        threshold=env.threshold,
        algorithm=settings.algorithm,
        inference=settings.inference,
        observers=len(context.peers("observer")),
    )
    for iteration in steps:
        with context.timer() as timer:
            experience = rollouts.collect()
        if not experience.trajectories:
            context.redo()  # all observers were lost
            continue
        if settings.pipeline:
            rollouts.start()
        metrics.rl_rollout_seconds.observe(timer.seconds)
        for trajectory in experience.trajectories:
            metrics.rl_policy_age_versions.observe(learner.version - trajectory.version)
        score.add(experience.episodes, max(len(each.rewards) for each in experience.trajectories))
        gauges: dict[str, Any] = {"rl_update_passes": 0.0}
        if not score.holds:
            gauges = _learn(context, learner, experience.trajectories, progress())
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
            rl_policy_version=learner.version,
            **gauges,
        )
    rollouts.finish()
    if score.solved:
        message = f"Solved! {score}"
    else:
        limit = f"MAX_STEPS={settings.max_steps}" if ended() else f"MAX_ITERATIONS={settings.max_iterations}"
        bar = "has no reward threshold" if env.threshold is None else f"solves at {env.threshold:g}"
        message = f"Stopped at {limit}. {score}; {settings.env_id} {bar}"
    return context.finish(
        message,
        solved=score.solved,
        iterations=context.step,
        running_return=score.running,
        mean_return=score.mean or 0.0,
        env_steps=state["samples"],
    )


def _learn(
    context: Context[RlSettings], learner: Learner, trajectories: Sequence[Trajectory], progress: float
) -> dict[str, float]:
    """Updates the policy. Returns the values of the gauges of the update."""
    with context.timer() as timer:
        update = learner.update(trajectories, progress)
    context.metrics.rl_update_seconds.observe(timer.seconds)
    context.require_finite(
        *update,
        hint=f"the update is not finite ({update}); lower LR, or check the rewards of ENV_ID, or your own POLICY",
    )
    return {
        "rl_policy_loss": update.policy_loss,
        "rl_baseline_loss": update.value_loss,
        "rl_policy_entropy_nats": update.entropy,
        "rl_kl_nats": update.kl,
        "rl_clipped_ratio": update.clipped,
        "rl_explained_variance_ratio": update.explained,
        "rl_update_passes": update.passes,
    }


class Experience(NamedTuple):
    """The result of an iteration's rollouts: the episodes that ended at each observer, and all trajectories."""

    episodes: list[list[Episode]]
    trajectories: list[Trajectory]


class Rollouts:
    """Requests rollouts from the observers, and waits for them."""

    def __init__(
        self, context: Context[RlSettings], learner: Learner, actor: Actor, spaces: Spaces, sizes: list[int]
    ) -> None:
        self.context, self.learner, self.sizes, self.actor = context, learner, sizes, actor
        metrics = context.metrics

        def observe(size: int, seconds: float) -> None:
            metrics.rl_inference_batch_observations.observe(size)
            metrics.rl_inference_seconds.observe(seconds)

        observation = spaces.observation
        self.batcher = calls.batcher.set(Batcher(actor, observation.shape, observation.dtype, observe=observe))
        context.on_lost(self.batcher.drop)
        self._under_way: Iterator[tuple[Peer, Rollout]] | None = None

    def start(self) -> None:
        """Requests the next rollouts under the current policy."""
        context = self.context
        policy = self.learner.policy_state()
        groups: dict[Group, int] = {}
        if context.settings.inference == "agent":
            self.actor.load(policy)
            for peer in context.peers("observer"):
                groups.update({Group(peer.name, number): size for number, size in enumerate(self.sizes)})
        self.batcher.begin(groups, self.learner.version)
        self._under_way = context.call_each(
            "observer",
            calls.rollout,
            policy if context.settings.inference == "observer" else None,
            self.learner.version,
            timeout=context.settings.rollout_timeout,
        )

    def collect(self) -> Experience:
        """Waits for the rollouts, after requesting them if they are not under way. Leaves out lost observers."""
        if self._under_way is None:
            self.start()
        assert self._under_way is not None
        rollouts, self._under_way = dict(self._under_way), None
        episodes, trajectories = [], []
        for observer in sorted(rollouts, key=lambda peer: peer.rank):  # a fixed order makes a run repeatable
            episodes.append(rollouts[observer].episodes)
            trajectories += rollouts[observer].trajectories or self.batcher.trajectories(observer.name)
        return Experience(episodes, trajectories)

    def finish(self) -> None:
        """Waits for the rollouts that are under way, and drops them."""
        for _ in self._under_way or ():
            pass
