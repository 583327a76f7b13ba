"""`rolecall doctor [JOB]`: runs the checks of the rank that the environment describes, and reports them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

from rolecall import config
from rolecall.config import Settings, __version__
from rolecall.errors import USAGE, UsageError
from rolecall.observe.doctor import common, files, machine, network
from rolecall.observe.doctor.checks import Check, Finding, State, check, examine, ok, problem, unchecked, warning
from rolecall.observe.doctor.subject import Subject, load

MAX_SECONDS = 600.0
WIDTHS = 11, 20  # characters of states and names
NO_RANK = "the environment describes no rank"


@check("settings", "correct the named variables; `rolecall config JOB` lists what each may be")
def settings(subject: Subject) -> Finding:
    """Every variable of the job's and Rolecall's own: type, bounds, files that they name, misspelt names."""
    known = {*Settings.model_fields, *subject.job.variables}
    if misspelt := ", ".join(f"{name} (for {meant}?)" for name, meant in config.misspelt(known)):
        return warning(f"without effect: {misspelt}", "rename it, or remove it")
    return ok(f"all {len(known)} can be used")


@check("role", "give ROLE and ORDINAL, or RANK, within the job's counts")
def role(subject: Subject) -> Finding:
    """The role and the ordinal, from ROLE, ORDINAL, RANK or the host name."""
    try:
        identity = subject.identity
    except UsageError as error:
        return problem(str(error))
    if identity is None or not identity.role:
        return ok("the gang gives this rank its role and ordinal")
    if identity.ordinal is None:
        return ok(f"{identity.role}; the gang gives it its ordinal")
    return ok(subject.name + (", which is rank 0" if subject.is_rank0 else ""))


TOPICS: dict[str, Sequence[Check]] = {
    "settings": (settings, role),
    "network": network.CHECKS,
    "rank 0": common.CHECKS,
    "files": files.CHECKS,
    "machine": machine.CHECKS,
}
RANK_TOPICS = ("network", "rank 0")  # topics that need a rank's environment
Results = Sequence[tuple[Check, Finding]]


def run(words: Sequence[str]) -> int:
    """Examines, prints the report, and returns the exit code: 2 if there is a problem, otherwise 0."""
    given = parser().parse_args(words)
    one, results = None, list[tuple[Check, Finding]]()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's file prints does not belong into the report
            one = load(given.job, given.timeout, given.wait)
    except UsageError as error:
        wrong = problem(str(error), settings.action)
    if not given.json:
        print(head(one))
    for topic, checks in TOPICS.items():
        for each in checks:
            if one is None:
                finding = wrong if each is settings else unchecked("the settings are wrong")
            elif topic in RANK_TOPICS and not one.named:
                finding = unchecked(NO_RANK)
            else:
                finding = examine(each, one)
            results.append((each, finding))
            if not given.json:
                print(line(each.name, finding))
    print(as_json(one, results) if given.json else totals(results))
    return USAGE if worst(results) == "problem" else 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="rolecall doctor",
        description="Checks everything that the rank which the environment describes needs. Exit code 2 if there is a "
        "problem, otherwise 0.",
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="the job, if JOB does not say it")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    parser.add_argument("--timeout", type=_seconds, default=10.0, metavar="SECONDS", help="limit of each wait (10)")
    parser.add_argument("--wait", type=_seconds, default=0.0, metavar="SECONDS", help="time for rank 0 to start (0)")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= MAX_SECONDS:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_SECONDS:g}")


# ---- the report


def head(subject: Subject | None) -> str:
    """Which rank was examined, and where."""
    if subject is None:
        return f"rolecall {__version__}: {config.host_name()}"
    name = subject.name if subject.named else "no rank (ROLE, MASTER_ADDR, JOB_TOKEN_FILE)"
    return f"rolecall {__version__}: {name}, {subject.job.target} on {subject.host}"


def line(name: str, finding: Finding) -> str:
    """A check's line: state, name, what there is, what to do."""
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{finding.state:<{WIDTHS[0]}}  {name:<{WIDTHS[1]}}  {finding.text}{advice}"


def totals(results: Results) -> str:
    """How many checks have which state."""
    counts = Counter(finding.state for _, finding in results)
    return (
        f"{len(results)} checks: {', '.join(f'{counts[state]} {state}' for state in get_args(State) if counts[state])}"
    )


def worst(results: Results) -> State:
    """The worst state; "not checked" only if nothing was checked."""
    states = {finding.state for _, finding in results}
    order: tuple[State, ...] = ("problem", "warning", "ok")
    return next((state for state in order if state in states), "not checked")


def as_json(subject: Subject | None, results: Results) -> str:
    """The report as JSON."""
    content = {
        "version": __version__,
        "job": subject.job.name if subject else "",
        "rank": subject.name if subject else "",
        "host": config.host_name(),
        "state": worst(results),
        "checks": [{"name": check.name, **asdict(finding)} for check, finding in results],
    }
    return json.dumps(content, indent=1)
