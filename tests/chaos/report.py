"""The totals and the checks at the end of a run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos import series
from tests.chaos.series import Summary, summary
from tests.chaos.soak import Soak

WORKER_BAR = 1.5  # seconds from the kill of rank 0's worker to the next step
RESTART_BAR = 4.0  # from the start of a rank that training waits for to the next step
PAUSE_BAR = 1.0  # of the others, where an elastic rank was killed
NOTICE_BAR = 10.0


@dataclass(frozen=True)
class Check:
    """`met` is None where the run had nothing to check it with."""

    what: str
    measured: str
    bar: str
    met: bool | None


def checks(soak: Soak) -> list[Check]:
    result = soak.result
    clean = [m for m in result.measured if not m.disturbed and not m.note]
    worker = summary(m.next_step for m in clean if m.kind == "kill worker" and m.target == "rank 0")
    restart = summary(
        m.after_start for m in clean if m.kind in ("kill supervisor", "kill rank") and m.target in ("rank 0", "fixed")
    )
    pause = summary(m.pause for m in clean if m.kind.startswith("kill") and m.target == "elastic")
    silent = [math.inf if m.noticed is None else m.noticed for m in result.measured if m.must_notice]
    slow = [m for m in clean if m.kind == "slow disk"]
    stuck = [m.event for m in result.measured if m.next_step is None]
    drained = sum(m.lost for m in clean if m.kind in ("drain", "join", "leave"))
    strange = [f"{ended.rank} with {ended.code}" for ended in soak.keeper.exits if not ended.expected]
    codes = {*result.drain_codes.values(), *result.finish_codes.values()}
    return [
        _median("rank 0's worker killed: kill to next step", worker, WORKER_BAR),
        _median("supervisor or rank killed: restart to next step", restart, RESTART_BAR),
        _median("elastic rank killed: longest pause of the others", pause, PAUSE_BAR),
        Check(
            "silent peers noticed, worst",
            _seconds(max(silent, default=math.nan)),
            f"<= {NOTICE_BAR:g} s",
            max(silent) <= NOTICE_BAR if silent else None,
        ),
        Check("events without a next step", ", ".join(stuck) or "none", "none", not stuck),
        Check(
            "leases lost and requests unanswered while a disk was slow",
            str(sum(m.leases_lost for m in slow)),
            "0",
            not any(m.leases_lost for m in slow) if slow else None,
        ),
        Check("steps lost by drains, joins and leaves", str(drained), "0", drained == 0),
        Check("ranks that ended otherwise than was done to them", ", ".join(strange) or "none", "none", not strange),
        Check(
            "exit codes of the drain and the finish",
            ", ".join(map(str, sorted(codes))) or "none",
            "0",
            codes == {0} and bool(result.finish_codes),
        ),
        Check("result", result.judged or "none", "right", result.right),
        Check("processes left", ", ".join(result.leftovers) or "none", "none", not result.leftovers),
    ]


def _median(what: str, found: Summary, bar: float) -> Check:
    met = found.median <= bar if found.count else None
    return Check(what, f"{_seconds(found.median)} (of {found.count})", f"median <= {bar:g} s", met)


def show(soak: Soak, found: list[Check], console: Console) -> None:
    for name, value in totals(soak).items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    table = Table("check", "measured", "bar", "", title="Checks", title_justify="left")
    for check in found:
        verdict = "[yellow]not met with" if check.met is None else "[green]PASS" if check.met else "[red]MISS"
        table.add_row(check.what, check.measured, check.bar, verdict)
    console.print(table)


def totals(soak: Soak) -> dict[str, Any]:
    steps = soak.steps()
    counters = soak.counters()
    usual = summary(b.time - a.time for a, b in pairwise(steps) if a.generation == b.generation)

    def by_cause(name: str) -> str:
        causes = {
            labels.partition('"')[2].rstrip('"'): int(n) for (found, labels), n in counters.items() if found == name
        }
        return ", ".join(f"{cause} {n}" for cause, n in sorted(causes.items(), key=lambda item: -item[1])) or "none"

    return {
        "minutes": round(soak.result.seconds / 60, 1),
        "load average": round(os.getloadavg()[2], 1),
        "steps made": len(steps),
        "seconds between two steps": f"median {usual.median:.2f}, p95 {usual.p95:.2f}",
        "steps lost": series.lost(steps),
        "generations": max((step.generation for step in steps), default=0),
        "generations ended and elastic ranks lost, by cause": by_cause("gang_restarts_total"),
        "workers ended, by cause": by_cause("worker_restarts_total"),
        "rank starts": sum(len(rank.starts) for rank in soak.keeper.ranks.values()),
    }


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else "never" if math.isinf(value) else f"{value:.2f} s"
