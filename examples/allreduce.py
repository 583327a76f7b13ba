"""Members that work in step, in a process group of torch.distributed.

rolecall run examples/allreduce.py --members 3
"""

import torch
import torch.distributed as dist

from rolecall import Context, Job, Role, Settings, remote


class Members(Settings):
    members: int = 2
    rounds: int = 100


# region group
class Member:  # of a fixed role: a fresh process in each generation, as a process group needs
    def __init__(self, context: Context[Members]) -> None:
        context.join_group("member", timeout=30)  # NCCL if each has a GPU of its own, gloo otherwise
        self.total = torch.zeros(1, device=context.device)

    @remote(turn=True)  # collectives must come in the same order everywhere
    def add(self, value: float) -> float:
        term = torch.full_like(self.total, value)
        dist.all_reduce(term)
        return self.total.add_(term).item()


# endregion


def lead(context: Context[Members]) -> dict[str, float]:
    state = context.restore({"total": 0.0})
    for round_number in context.steps(context.settings.rounds):
        answers = list(context.call_all(Member.add, float(round_number)))  # a lost member ends the generation
        state["total"] += round_number * len(answers)
        context.log(score=state["total"])
    return {"total": state["total"]}


JOB = Job([Role("lead", lead), Role("member", Member, count="members")], settings=Members, score="total")
