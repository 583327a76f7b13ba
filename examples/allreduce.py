"""Members that work in step: each role member runs its own loop in a process group of torch.distributed.

rolecall run examples/allreduce.py --members 3
"""

import torch
import torch.distributed as dist

from rolecall import Context, Job, RankObject, Role, Settings


class Members(Settings):
    members: int = 2
    rounds: int = 100


# region group
TOTAL: RankObject[torch.Tensor] = RankObject()


def member(context: Context[Members]) -> None:
    context.join_group("member", timeout=30)  # NCCL where each has a GPU of its own, gloo otherwise
    TOTAL.set(torch.zeros(1, device=context.device))


def add(value: float) -> float:  # called by the lead, at every member at the same time
    term = torch.full_like(TOTAL.get(), value)
    dist.all_reduce(term)
    return TOTAL.get().add_(term).item()


# endregion


def lead(context: Context[Members]) -> dict[str, float]:
    state = context.restore({"total": 0.0})
    for round_number in context.steps(context.settings.rounds):
        answers = list(context.call_all("member", add, float(round_number)))  # a lost member ends the generation
        state["total"] += round_number * len(answers)
        context.log(score=state["total"])
    return {"total": state["total"]}


JOB = Job([Role("lead", lead), Role("member", member, count="members")], settings=Members, score="total")
