"""What is told from the text of a user's file, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.declare import preflight, registry
from rolecall.errors import UsageError

HEAD = """from functools import partial
from types import SimpleNamespace

from rolecall import Context, Job, Role, Settings, remote

SEED = 1


class Tally:
    count = 0
    @remote
    def add(self, n, *, twice=False): self.count += n
    @remote
    def many(self, *numbers): pass
    def hidden(self): pass
    @staticmethod
    def double(n): return 2 * n


class Kept(Tally): pass


def work(x): return x


TALLY = Tally()
HOLDER = SimpleNamespace(add=work)

def set_seed():
    global SEED
    SEED = 3


def lead(context, other=None):
    unsure = Tally.add
    if other: unsure = Kept.many
    def inside(): return 0
    @partial
    def replaced(): return 0
    class Holder:
        def work(self): square = lambda: 1
    named = lambda: 0
    {line}


def helper(peers: "Context[Settings]"):
    {helped}


class Lead:
    def run(self): self.context.call_all({method})


JOB = Job([Role("lead", lead), Role("worker", Tally, count=2)])
"""
PLACE = HEAD[: HEAD.index("{line}")].count("\n") + 1
UNMARKED = "cannot be called at a peer: put @remote above its `def` in the class of a role"
NO_METHOD = "is no method of a role's class"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("given", None)


def look(line: str = "pass", helped: str = "pass", method: str = "Tally.many") -> None:
    text = HEAD.replace("{line}", line).replace("{helped}", helped).replace("{method}", method)
    Path("given.py").write_text(text)
    preflight.require_sound(registry.get("given.py"), registry.module_of("given.py"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("context.call_all(lambda: 1)", f"<lambda> {NO_METHOD}"),
        ("context.call(other, lambda: 1)", f"<lambda> {NO_METHOD}"),
        ("list(context.call_each(inside))", f"inside {NO_METHOD}"),
        ("context.call_any(named)", f"<lambda> {NO_METHOD}"),
        ("context.call_all(set_seed)", f"set_seed {NO_METHOD}"),
        ("context.call_all(Tally.hidden)", f"Tally.hidden {UNMARKED}"),
        ("context.call_all(Tally.nothing)", "Tally has no method 'nothing'"),
        ("context.call_all(Tally.add)", "Tally.add(self, n, *, twice=False): missing a required argument: 'n'"),
        ("context.call_all(Tally.add, 1, 2)", "Tally.add(self, n, *, twice=False): too many positional arguments"),
        ("context.call(other, Tally.add, 1, no=2)", "Tally.add(self, n, *, twice=False): got an unexpected keyword"),
        ("other.options(lost='skip').call_all(Tally.add)", "Tally.add(self, n, *, twice=False): missing a required"),
    ],
)
def test_what_no_worker_could_do_is_a_line_of_the_file(line: str, problem: str) -> None:
    with pytest.raises(UsageError) as raised:
        look(line)
    assert str(raised.value).startswith(f"given.py:{PLACE}: {problem}")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the definition evaluates the annotations")
def test_annotations_may_name_what_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HEAD", HEAD.replace("def add(self, n,", "def add(self, n: Missing,"))
    with pytest.raises(UsageError, match=r"Tally\.add\(.*: missing a required argument: 'n'"):
        look("context.call_all(Tally.add)")


def test_a_function_that_takes_a_context_is_looked_at_too() -> None:
    with pytest.raises(UsageError, match=r"^given\.py:\d+: <lambda> is no method"):
        look(helped="peers.call_all(lambda: 1)")


def test_methods_are_looked_at_too() -> None:
    with pytest.raises(UsageError, match=r"^given\.py:\d+: Tally\.add\(self, n, \*, twice=False\): missing"):
        look(method="Tally.add")


@pytest.mark.parametrize(
    "line",
    [
        "context.call_all(Tally.add, 1, twice=True)",
        "context.call(other, Tally.add, *other)",
        "context.call_all(Tally.add, **other)",
        "context.call_all(Tally.many, 1, 2, 3)",
        "context.call_all(HOLDER.add, 1)",
        "context.call_all(unsure, 1)",
        "context.call_all(other)",
        "context.call_all(*(lambda: 1,))",
        'context.peers("workers")',
        "other.call_all(lambda: 1)",
        "other.call(TALLY.add, Kept.add)",
    ],
)
def test_what_may_work_is_left_to_the_worker(line: str) -> None:
    look(line)
