"""`rolecall doctor [JOB]`: examines the rank that the environment names."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from rolecall.errors import USAGE
from rolecall.observe.doctor import (
    agreement,
    environment,
    files,
    gpu,
    machine,
    network,
    packages,
    patient,
    ports,
    report,
    secrets,
)
from rolecall.observe.doctor.checks import Check, examine, unchecked

TOPICS: dict[str, Sequence[Check]] = {
    "settings": environment.CHECKS,
    "network": (*network.CHECKS[:3], *ports.CHECKS),
    "membership": secrets.CHECKS,
    "rank 0": (*agreement.CHECKS[:3], network.CHECKS[3]),
    "files": files.CHECKS,
    "machine": (*machine.CHECKS, *gpu.CHECKS, *packages.CHECKS, *agreement.CHECKS[3:]),
}
OF_A_RANK = ("network", "membership", "rank 0")  # topics that need a rank's environment
NO_RANK = "nothing names a rank here"
CHECKS = tuple(check for checks in TOPICS.values() for check in checks)
LONGEST = 600.0  # seconds


def run(words: Sequence[str]) -> int:
    """Examines, prints what came of it, and returns the exit code: 2 where there is a problem, otherwise 0."""
    given = _parser().parse_args(words)
    with contextlib.redirect_stdout(sys.stderr):  # what a user's file prints is no part of the report
        one = patient.admit(given.job, given.timeout, given.wait)
    width, colour = max(len(check.name) for check in CHECKS), sys.stdout.isatty()
    if not given.json:
        _say(report.head(one))
    findings = []
    try:
        for topic, check in ((topic, check) for topic, checks in TOPICS.items() for check in checks):
            left_out = topic in OF_A_RANK and not one.named
            findings.append((check, unchecked(NO_RANK) if left_out else examine(check, one)))
            if not given.json:
                _say(report.line(*findings[-1], width, colour))
    finally:
        one.rank0.close()
    _say(report.as_json(one, findings) if given.json else report.verdict(findings))
    return USAGE if report.worst(findings) == "problem" else 0


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever read it has gone; the exit code still counts
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolecall doctor",
        description="Checks everything that the rank which the environment names needs, beside it or instead of it. "
        "Exit code 2 where there is a problem, otherwise 0.",
    )
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="the job, where JOB does not say it")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    parser.add_argument("--timeout", type=_seconds, default=10.0, metavar="SECONDS", help="bound of each wait (10)")
    parser.add_argument(
        "--wait", type=_wait, default=0.0, metavar="SECONDS", help="time that rank 0 has to start meanwhile (0)"
    )
    return parser


def _wait(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= LONGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, above 0 and up to {LONGEST:g}")
