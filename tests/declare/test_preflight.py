"""What is told from the text of a user's file, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.declare import preflight, registry
from rolecall.errors import UsageError

HEAD = """import collections
import math
import random
from functools import partial
from types import SimpleNamespace

import torch

from rolecall import Context, Job, Role, Settings, UsageError, in_turn

STEP, SEED = 1, object()
square = triple = lambda x: 3 * x


class Tally:
    count = 0
    def add(self, n): self.count += n
    @staticmethod
    def double(n): return 2 * n
    @classmethod
    def make(cls): return cls()


class Kept(Tally):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass


class Wrapped:
    def __getattr__(self, name): return lambda *_: {}


class Assigned:
    def __init__(self): self.state_dict = self.load_state_dict = dict


class Chosen:
    def __new__(cls): return Kept()


def work(x): return x


@in_turn
def serve(x): return x


TALLY, ROWS = Tally(), []
HOLDER = SimpleNamespace(add=work)

def set_seed():
    global SEED
    SEED = 3


def lead(context, other=None):
    local = Tally()
    unsure = Tally()
    if other: unsure = Kept()
    kept, pair = Tally(), 1
    pair, kept = Kept(), 2
    def inside(): return 0
    @partial
    def replaced(): return 0
    class Holder:
        def work(self): square = lambda: 1
    named = lambda: 0
    {line}


def helper(peers: "Context[Settings]"):
    {helped}


JOB = Job([Role("lead", lead), Role("worker", count=2)])
OTHER = Job([Role("lead", lead), Role("helper", count=2)])
"""
PLACE = HEAD[: HEAD.index("{line}")].count("\n") + 1
METHOD = "is a method of an object, and a peer would call it on a copy: call a function at the top of a module"
TURN = "is @in_turn, which rank 0 never serves"
CALL = "cannot be called at a peer: define it with `def` at the top of a module"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("given", None)


def look(line: str = "pass", helped: str = "pass") -> None:
    Path("given.py").write_text(HEAD.replace("{line}", line).replace("{helped}", helped))
    preflight.require_sound(registry.get("given.py"), registry.module_of("given.py"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('context.call_all("worker", lambda: 1)', f"<lambda> {CALL}"),
        ("context.call(other, function=lambda: 1)", f"<lambda> {CALL}"),
        ('list(context.call_each("worker", triple, 3))', f"<lambda> {CALL}"),
        ('context.call_all("worker", inside)', f"inside {CALL}"),
        ('context.call_all("worker", named)', f"<lambda> {CALL}"),
        (
            "for _ in context.steps(3): context.log(done=1)",
            "steps() would begin at step 1 again after each restart: wr",
        ),
        ('context.call("worker_0", TALLY.add, 1)', f"Tally.add {METHOD}"),
        ('context.call_all("worker", ROWS.append, 1)', f"list.append {METHOD}"),
        ('context.call_all("worker", local.add, 1)', f"Tally.add {METHOD}"),
        ('context.call_all("worker", Tally().add, 1)', f"Tally.add {METHOD}"),
        ('context.call_all("worker", random.random)', f"Random.random {METHOD}"),
        ('context.call_all("lead", serve, 1)', f"serve {TURN}"),
        ('context.call("lead_0", serve, 1)', f"serve {TURN}"),
        ('context.call_all("workers", work, 1)', "no role 'workers' in this job (lead, worker)"),
        ('context.restore({"tally": Tally()})', "tally is a given.Tally, which a checkpoint cannot hold: give it"),
        ('context.restore({"tally": local})', "tally is a given.Tally, which a checkpoint cannot hold"),
        ('context.restore(state={"hits": random})', "hits is a builtins.module, which a checkpoint cannot hold"),
        ('context.restore({"last": collections.deque()})', "last is a collections.deque, which a checkpoint cannot"),
        ('context.restore({"rule": lambda: 0})', "rule is a builtins.function, which a checkpoint cannot hold"),
        ('context.restore({"rule": inside})', "rule is a builtins.function, which a checkpoint cannot hold"),
        ('context.restore({"rule": set_seed})', "rule is a builtins.function, which a checkpoint cannot hold"),
        ('context.restore({"kind": Kept})', "kind is a builtins.type, which a checkpoint cannot hold"),
    ],
)
def test_what_no_worker_could_do_is_a_line_of_the_file(line: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        look(line)
    assert str(raised.value).startswith(f"given.py:{PLACE}: {problem}")


def test_steps_of_a_function_that_is_called_with_a_context_are_left_to_the_worker() -> None:
    """Whoever calls it may have restored the state."""
    look(helped="list(peers.steps(3))")


def test_a_function_that_takes_a_context_is_looked_at_too() -> None:
    with pytest.raises(UsageError, match=r"^given\.py:\d+: <lambda> cannot be called"):
        look(helped='peers.call_all("worker", lambda: 1)')


@pytest.mark.parametrize(
    "line",
    [
        'context.call_all("worker", work, 1)',
        "context.restore(other); list(context.steps(3))",
        "list(context.steps(3, context.snapshot().state))",
        "helper(context); list(context.steps(3))",
        'context.call_all("worker", math.sqrt, 4.0)',
        'context.call_all("worker", torch.ones, 4)',
        'context.call_all("worker", partial(work, 1))',
        'context.call_all("worker", replaced)',
        'context.call_all("helper", work, 1)',
        'context.call_all("worker", Tally.double, 1)',
        'context.call_all("worker", TALLY.double, 1)',
        'context.call_all("worker", Tally.make)',
        'context.call_all("worker", HOLDER.add, 1)',
        'context.call_all("worker", unsure.add, 1)',
        'context.call_all("worker", other.add, 1)',
        'context.call_all("worker", serve, 1)',
        'context.call("worker_0", serve, 1)',
        'context.call_all("lead", work, 1)',
        'context.peers("workers")',
        'context.call_all(*("worker", lambda: 1))',
        "context.call(other, Tally)",
        "context.call_all(other, other)",
        'other.call_all("workers", lambda: 1)',
        'context.restore({"hits": 0, "points": STEP, **dict(a=1)})',
        'context.restore({"a": Kept(), "b": Wrapped(), "c": Assigned(), "d": Chosen(), "e": unsure, "f": kept})',
        'context.restore({"model": torch.nn.Linear(2, 3), "rows": torch.zeros(3), "size": torch.Size((1, 2))})',
        'context.restore({"counts": collections.Counter(), "order": collections.OrderedDict(), "all": set()})',
        'context.restore({"seed": SEED, "other": other, "unknown": nowhere})',
        "context.restore(other)",
    ],
)
def test_what_may_work_is_left_to_the_worker(line: str) -> None:
    look(line)
