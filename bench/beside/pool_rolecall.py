"""A pool: each item is worked on once."""

from rolecall import Context, Job, Role, Settings, remote


class Pool(Settings):
    workers: int = 3
    items: int = 200


class Worker:
    @remote(idempotent=True)
    def work(self, item: int) -> int:
        return sum(number % 7 for number in range(item))

    def __init__(self, context: Context[Pool]) -> None:
        """A model, or a data set, that all items need, is loaded here."""


def lead(context: Context[Pool]) -> dict[str, int]:
    results = context.restore({"results": {}})["results"]
    left = [item for item in range(context.settings.items) if item not in results]
    answers = context.map_unordered(Worker.work, left)
    for _, (item, result) in zip(context.steps(context.settings.items), answers, strict=False):
        results[item] = result
    return {"sum": sum(results.values())}


ROLES = [Role("lead", lead), Role("worker", Worker, count="workers", minimum=1)]
JOB = Job(ROLES, settings=Pool)
