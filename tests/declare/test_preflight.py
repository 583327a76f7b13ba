"""What is told from the text of a user's file, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.declare import preflight, registry
from rolecall.errors import UsageError

HEAD = """
from rolecall import Job, Role, remote


class Tally:
    count = 0
    @remote
    def add(self, n, *, twice=False): self.count += n
    @remote
    def many(self, *numbers): pass
    def hidden(self): pass
    @staticmethod
    def double(n): return 2 * n


class Other:
    def work(self): pass


class Changed(Tally): pass


def change(to):
    global Changed
    Changed = to


def lead(context, other=None):
    unsure = Tally.add if other else Tally.many
    {line}


JOB = Job([Role("lead", lead), Role("worker", Tally, count=2), Role("changed", Changed)])
"""
PLACE = HEAD[: HEAD.index("{line}")].count("\n") + 1


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    sys.modules.pop("given", None)


def look(line: str) -> None:
    Path("given.py").write_text(HEAD.replace("{line}", line))
    preflight.require_sound(registry.get("given.py"), registry.module_of("given.py"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("context.call_all(Tally.hidden)", "Tally.hidden cannot be called at a peer: put @remote above its `def`"),
        ("context.call_all(Tally.nothing)", "Tally has no method 'nothing'"),
        ("list(context.call_each(Tally.add))", "Tally.add(self, n, *, twice=False): missing a required argument: 'n'"),
        ("context.call_any(Tally.add, 1, 2)", "Tally.add(self, n, *, twice=False): too many positional arguments"),
        ("context.call(other, Tally.add, 1, no=2)", "Tally.add(self, n, *, twice=False): got an unexpected keyword"),
        ("context.call_all(Tally.ad)", "Tally has no method 'ad' (did you mean add?)"),
        (
            "context.call_all(Tally.add, twce=True)",
            "Tally.add(self, n, *, twice=False): got an unexpected keyword argument 'twce' (did you mean twice?)",
        ),
        ("context.call_all(lambda: 1)", "<lambda> is no method of a role's class"),
        ("context.options(lost='skip').call_any(change)", "change is no method of a role's class"),
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


@pytest.mark.parametrize(
    "line",
    [
        "context.call_all(Tally.add, 1, twice=True)",
        "context.call(other, Tally.add, *other)",
        "context.call_all(Tally.add, **other)",
        "context.call_all(Tally.many, 1, 2, 3)",
        "context.call_all(unsure, 1)",
        "context.call_all(*(lambda: 1,))",
        "context.call_all(Changed.add)",
        "other.call_all(Other.work)",
        "other.call_all(lambda: 1)",
        "Tally = other; context.call_all(Tally.add)",
    ],
)
def test_what_may_work_is_left_to_the_worker(line: str) -> None:
    look(line)
