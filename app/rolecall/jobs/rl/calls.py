"""The functions that ranks call at one another over RPC, and the objects of this rank that they act on."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue

from torch.distributed import rpc
from torch.futures import Future

from rolecall import RankObject
from rolecall.jobs.rl.batching import Answer, Batcher, Group
from rolecall.jobs.rl.messages import PolicyState, Rollout


@dataclass(frozen=True)
class RolloutRequest:
    """A rollout that the agent has requested; the observer sets the `answer`.

    `policy` is None where the agent makes the actions; `version` is the policy's in both cases.
    """

    policy: PolicyState | None
    version: int
    answer: Future[Rollout] = field(default_factory=Future)


batcher: RankObject[Batcher] = RankObject()  # at the agent
requests: RankObject[SimpleQueue[RolloutRequest]] = RankObject()  # at an observer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def act(observer: str, number: int, message: bytes, last: bool) -> Future[Answer]:
    """Called at the agent, for each step of an observer's group. See `Batcher.submit`."""
    return batcher.get().submit(Group(observer, number), message, last)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def rollout(policy: PolicyState | None, version: int) -> Future[Rollout]:
    """Called at an observer, for each iteration. Without `policy`, the observer calls `act` for its actions."""
    request = RolloutRequest(policy, version)
    requests.get().put(request)
    return request.answer
