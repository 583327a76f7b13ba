"""What the author of a job may declare, and every contradiction that is refused when it is declared."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, create_model

from rolecall import Metric
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job, Role
from rolecall.errors import UsageError

with pytest.warns(UserWarning, match="shadows"):

    class Shadowing(Settings):
        token: str = ""


class Pi(Settings):
    """Settings of a job."""

    samplers: int = 2
    points: int = Field(1_000, ge=1, description="points of a call")
    least: int = 1
    most: int = 4


class Below(Pi):
    """Settings of a job that has those of another."""

    way: Literal["a", "b"] = "a"


def own(name: str, base: type[Settings] = Settings, **fields: Any) -> type[Settings]:
    """Settings of a user's, each with its default."""
    return create_model(name, __base__=base, **{field: (int, default) for field, default in fields.items()})


def lead(context: object) -> None: ...


LEAD, SAMPLER = Role("lead", lead), Role("sampler", count="samplers", minimum=1)


def roles_of(job: Job, **settings: Any) -> list[tuple[str, int, int, int, bool]]:
    specs = registry.roles(job, job.settings(**settings))
    return [(role.name, role.count, role.minimum, role.maximum, role.elastic) for role in specs]


# ---- what may be declared


def test_a_role_alone_is_a_job() -> None:
    job = Job([LEAD])
    assert (job.settings, job.score, job.unit, job.lower, job.rpc) == (Settings, "score", "steps", False, True)
    assert roles_of(job) == [("lead", 1, 1, 1, False)]


def test_counts_are_numbers_or_settings() -> None:
    job = Job([LEAD, SAMPLER, Role("helper", count=3), Role("other", "a.b:run", "samplers", "least", "MOST")], Pi)
    assert roles_of(job) == [
        ("lead", 1, 1, 1, False),
        ("sampler", 2, 1, 1024, True),
        ("helper", 3, 3, 3, False),
        ("other", 2, 1, 4, True),
    ]
    assert roles_of(job, samplers=3, least=2)[1:] == [
        ("sampler", 3, 1, 1024, True),
        ("helper", 3, 3, 3, False),
        ("other", 3, 2, 4, True),
    ]


def test_an_elastic_role_has_room_for_its_count() -> None:
    assert roles_of(Job([LEAD, SAMPLER], Pi), samplers=5000)[1] == ("sampler", 5000, 1, 5000, True)


@pytest.mark.parametrize(
    ("role", "settings", "problem"),
    [
        (SAMPLER, {"samplers": 0}, "SAMPLERS=0 must lie between minimum=1 and maximum=1024, all at least 1"),
        (Role("x", count=0), {}, "count=0 must be at least 1: the role x"),
        (Role("x", count=-1), {}, "count=-1 must be at least 1"),
        (Role("x", count="SAMPLERS"), {"samplers": 0}, "SAMPLERS=0 must be at least 1"),
        (Role("x", None, "SAMPLERS", "LEAST", "most"), {"samplers": 5}, "SAMPLERS=5 must .* LEAST=1 and MOST=4"),
        (Role("x", None, 2, "LEAST", 4), {"least": 3}, "count=2 must lie between LEAST=3 and maximum=4"),
        (Role("x", None, 2, 0, 4), {}, "count=2 must lie between minimum=0 and maximum=4"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(role: Role, settings: dict[str, Any], problem: str) -> None:
    job = Job([LEAD, role], Pi)
    with pytest.raises(UsageError, match=f"^wrong settings: {problem}"):
        roles_of(job, **settings)


def test_settings_may_be_built_on_those_of_another_job() -> None:
    assert Job([LEAD, SAMPLER], Below, pinned=["way", "points", "seed"]).settings is Below


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (own("Own", points=...), r"Own\.points: has no default; give it one"),
        (own("Own", seed=3), r"Own\.seed: Rolecall has a setting SEED already; choose another name"),
        (
            own("Own", own("Base", seed=3), points=3),
            r"Own\.seed: Rolecall has a setting SEED already; choose another name",
        ),
        (own("Own", home=1), r"Own\.home: the variable HOME means something else; choose another name"),
        (Shadowing, r"Shadowing\.token: rolecall\.Settings has an attribute of that name; choose another"),
        (own("Own", help=1), r"Own\.help: the variable HELP means something else; choose another name"),
        (dict, r"Job\(settings=<class 'dict'>\): is not a subclass of rolecall\.Settings"),
        (Pi(), r"Job\(settings=Pi\(.*\): is not a subclass of rolecall\.Settings"),
        (None, r"Job\(settings=None\): is not a subclass of rolecall\.Settings"),
    ],
)
def test_settings_that_cannot_be(settings: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}$"):
        Job([LEAD], settings)


def test_annotations_may_be_evaluated_when_they_are_read() -> None:
    """As Python 3.14 does in a file without the import of `annotations`; they may name what only checkers import."""
    names: dict[str, Any] = {"Settings": Settings, "ClassVar": ClassVar, "__name__": __name__}
    kept = "Decimal" if sys.version_info >= (3, 14) else "int"
    text = f"class Own(Settings):\n    seed: int = 3\n    kept: ClassVar[{kept}]\n"
    exec(compile(text, "own.py", "exec", dont_inherit=True), names)
    with pytest.raises(UsageError, match=r"^Own\.seed: Rolecall has a setting SEED already"):
        Job([LEAD], names["Own"])


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ([], r"Job\(roles=\.\.\.\): needs a list of rolecall\.Role"),
        ([LEAD, "sampler"], r"Job\(roles=\.\.\.\): needs a list of rolecall\.Role"),
        ([LEAD, SAMPLER, SAMPLER], r"Job\(roles=\.\.\.\): two roles have the same name \(lead, sampler, sampler\)"),
        ([Role("lead", lead, minimum=1)], "role lead: has rank 0, and cannot be elastic; leave its minimum out"),
        ([Role("lead"), SAMPLER], r"role lead: has rank 0, and needs a function: Role\('lead', function\)"),
        ([LEAD, Role("sampler", count="workers")], "role sampler: Pi has no setting 'workers' to count members by"),
        ([LEAD, Role("sampler", minimum="fewest")], "role sampler: Pi has no setting 'fewest' to count members by"),
        ([LEAD, Role("sampler", minimum=1, maximum="MOST_OF")], "role sampler: Pi has no setting 'MOST_OF' to count"),
        ([Role("lead", 3)], "role lead: 3 is neither a function nor a class"),  # type: ignore[arg-type]
        ([Role("lead", "lead")], "role lead: 'lead' is neither a function nor a class"),
        ([Role("lead", "module:")], "role lead: 'module:' is neither a function nor a class"),
        ([LEAD, Role("Sampler")], "role 'Sampler': a name consists of small letters, digits and _, and begins with a"),
        ([LEAD, Role("hit-maker")], "role 'hit-maker': a name consists of small letters"),
        ([LEAD, Role("")], "role '': a name consists of small letters"),
        ([LEAD, Role("2nd")], "role '2nd': a name consists of small letters"),
        ([LEAD, Role("a" * 42)], "role 'a+': a name consists of small letters"),
        ([LEAD, Role("sampler", lead, minimum=1, stays=True)], "role sampler: stays=True needs a class"),
        ([LEAD, Role("sampler", restarts=2)], r"role sampler: restarts, backoff and required are for an elastic role"),
        ([LEAD, Role("sampler", minimum=1, required=True)], r"role sampler: required=True needs restarts=\.\.\."),
        ([LEAD, Role("sampler", minimum=1, restarts=-1)], "role sampler: restarts and backoff cannot be negative"),
        (
            [LEAD, Role("sampler", max_memory_mb=0)],
            "role sampler: max_memory_mb=0 must be above 0; None means no limit",
        ),
    ],
)
def test_roles_that_cannot_be(roles: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}"):
        Job(roles, Pi)


@pytest.mark.parametrize(
    "name", ["step", "score", "rank_info", "rpc_calls_total", "rpc_calls", "done", "value", "job_info"]
)
def test_no_metric_of_rolecalls_is_anothers(name: str) -> None:
    with pytest.raises(UsageError, match=f"^metric {name}: Rolecall has a metric of that name already; choose another"):
        Job([LEAD], metrics=[Metric("gauge", name, "Mine.")])


def test_metrics_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"^Job\(metrics=\.\.\.\): needs a list of rolecall\.Metric$"):
        Job([LEAD], metrics=["temperature"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("hits", "hits"), r"Job\(metrics=\.\.\.\): two metrics have the name hits"),
        (("hits_total", "hits"), r"Job\(metrics=\.\.\.\): two metrics have the name hits"),
        (("Hits",), "metric 'Hits': a name consists of small letters, digits and _, and begins with a letter"),
        (("my hits",), "metric 'my hits': a name consists of small letters"),
    ],
)
def test_names_of_metrics_that_cannot_be(names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}"):
        Job([LEAD], metrics=[Metric("counter", name, "Mine.") for name in names])


@pytest.mark.parametrize(
    ("name", "problem"),
    [("width", "Pi has no setting 'width'"), ("job_token", r"Pi\.job_token is a secret, .*; leave it out")],
)
def test_what_is_pinned_is_a_setting_that_a_checkpoint_may_hold(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"^Job\(pinned=\.\.\.\): {problem}$"):
        Job([LEAD], Pi, pinned=("points", name))
