"""The functions that ranks call at one another over RPC, and the objects of this rank that they act on."""

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
def act(observer: str, number: int, message: bytes, last: bool) -> Future[Answer]:
    """Called at the agent, for each step of an observer's group. See `Batcher.submit`."""
    return batcher.get().submit(Group(observer, number), message, last)


@in_turn
def rollout(policy: PolicyState | None, version: int) -> Rollout:
    """Called at an observer, for each iteration. Without `policy`, which has `version`, it calls `act` for actions."""
    return observe.get()(policy, version)
