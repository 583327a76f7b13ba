"""The functions that ranks call over RPC, and the objects that they use."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import rpc
from torch.futures import Future

from rolecall import RankObject, in_turn
from rolecall.jobs.rl.batching import Answer, Batcher, Group
from rolecall.jobs.rl.messages import PolicyState, Rollout

batcher: RankObject[Batcher] = RankObject()  # at the agent
observe: RankObject[Callable[[PolicyState | None, int], Rollout]] = RankObject()  # at an observer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def act(group: Group, message: bytes, last: bool) -> Future[Answer]:
    """Called at the agent, for each step of a group. See `Batcher.submit`."""
    return batcher.get().submit(group, message, last)


@in_turn
def rollout(policy: PolicyState | None, version: int) -> Rollout:
    """Called at an observer, for each iteration. Without a `policy`, the observer calls `act` for actions."""
    return observe.get()(policy, version)
