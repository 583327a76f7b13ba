"""How `ps` would grow, by formulas and by simulation, from measured costs: `python -m bench.scale_ps`.

It computes no network: see docs/scale.md. `--growth FILE` compares with what `growth_ps` measured here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.scale_model import COSTS, Costs, Plan, Work, formula, lead_in
from bench.scale_simulation import Simulation
from rolecall import config
from rolecall.jobs.ps import PsSettings, model

UPDATES = 2  # of the large simulation: the first warms up
LARGE = Plan(1000, 100, 100_000_000, compute_s=1.0, link_bits_s=10e9, delay_s=0.0001)
INNER_STEPS = 50
# what is shown of 1,000 trainers on 100 servers
PLANS = {
    "sync": LARGE,
    "sync, int8": replace(LARGE, bytes_each=1.016),
    "async": replace(LARGE, mode="async", overlap=True),
    "local": replace(LARGE, compute_s=INNER_STEPS * LARGE.compute_s, overlap=True),
    "local, int8": replace(LARGE, compute_s=INNER_STEPS * LARGE.compute_s, overlap=True, bytes_each=1.016),
    "sync, TLS=off": replace(LARGE, connection="tcp"),
    "sync, 10 servers": replace(LARGE, servers=10),
}


def measured_here(mode: str, servers: int, trainers: int, server_cores: int) -> Plan:
    """The plan that `growth_ps` measures: one machine, and posers that share one core."""
    settings = config.load(PsSettings, update_mode=mode, servers=servers)
    parts = model.parts(model.build(settings), settings)
    return Plan(trainers, servers, parts[-1].stop, mode, connection="unix", parts=max(1, round(len(parts) / servers)),
                server_cores=min(server_cores, servers), trainer_cores=1)  # fmt: skip


def growth(costs: Costs, points: Sequence[dict[str, float | str]]) -> Table:
    """Measured and simulated pushes a second of each point of `growth_ps`."""
    shown = Table(
        "", "measured", "simulated", "formula", "measured to simulated", title="Pushes a second on this machine"
    )
    for point in points:
        mode, servers, trainers = str(point["update_mode"]), int(point["servers"]), int(point["trainers"])
        plan = measured_here(mode, servers, trainers, int(point["server_cores"]))
        simulated, rate = Simulation(costs, plan).run(12), float(point["pushes_per_s"])
        shown.add_row(f"{mode}, {servers} servers, {trainers} trainers", f"{rate:.0f}", f"{simulated:.0f}",
                      f"{formula(costs, plan).pushes_per_s:.0f}", f"{rate / simulated:.2f}")  # fmt: skip
    return shown


def lead_busy(costs: Costs, plan: Plan) -> float:
    """Seconds of the lead for one push of each trainer, beside its own shard: of `sync` with one report of each server,
    of `async` with one for each push, which is an update.
    """
    work, updates = Work.of(costs, plan), 1 if plan.mode == "sync" else plan.trainers
    return plan.trainers * lead_in(work, plan) + updates * ((plan.servers - 1) * work.report_in + work.order)


def large(costs: Costs, updates: int) -> Table:
    """1,000 trainers on 100 servers, by formula and, with `updates`, by simulation."""
    shown = Table("1,000 trainers, 100 servers", "seconds from push to push", "simulated", "limited by", "lead busy, s",
                  "a server's CPU, s", "a server's link, s", "gradients in a report, simulated",
                  title="100 million parameters, 10 Gbit/s")  # fmt: skip
    for what, plan in PLANS.items():
        work, rate, n = Work.of(costs, plan), formula(costs, plan), plan.trainers
        simulated = count = ""
        if updates:
            simulation = Simulation(costs, plan)
            simulated = f"{n / simulation.run(updates):.1f}"
            count = f"{simulation.reported / simulation.reports:.1f}"
        server = n * (work.server_in + work.server_out)
        server += (work.report_out + work.update) * (1 if plan.mode == "sync" else n)
        shown.add_row(what, f"{n / rate.pushes_per_s:.1f}", simulated, rate.limit, f"{lead_busy(costs, plan):.2f}",
                      f"{server:.2f}", f"{n * work.link:.2f}", count)  # fmt: skip
    return shown


def lead_limit(costs: Costs, plan: Plan) -> int:
    """The most trainers whose gradients the lead takes in COMPUTE seconds, with as many servers as `plan` has."""
    trainers = 1
    while lead_busy(costs, replace(plan, trainers=trainers)) < plan.compute_s:
        trainers += 1
    return trainers - 1


def main(argv: list[str] | None = None) -> int:
    """Print the tables. Returns 0, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale_ps", description=__doc__)
    parser.add_argument("--costs", type=Path, default=COSTS, help="a file that costs_ps wrote")
    parser.add_argument("--growth", type=Path, help="a file that growth_ps wrote (BENCH_JSON)")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of the simulation of 1,000 trainers; 0: none")
    arguments = parser.parse_args(argv)
    for file in (arguments.costs, arguments.growth):
        if file and not file.is_file():
            parser.error(f"{file}: no such file")
    if arguments.updates == 1 or arguments.updates < 0:
        parser.error("--updates: 0, or at least 2: the first warms up")
    console, costs = Console(width=150), Costs.load(arguments.costs)
    if arguments.growth:
        console.print(growth(costs, json.loads(arguments.growth.read_text())))
    console.print(large(costs, arguments.updates))
    for servers in (1, 10, 100):
        limits = (f"{lead_limit(costs, replace(LARGE, mode=mode, servers=servers)):,} of {mode}"
                  for mode in ("sync", "async"))  # fmt: skip
        console.print(f"{servers} servers: the lead takes this many gradients a second: {', '.join(limits)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
