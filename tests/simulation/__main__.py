"""`make simulate`: random schedules against the gang's logic, or the story of one. Exit code 1: a promise is broken."""

from __future__ import annotations

import argparse
import sys

import tests.simulation
from tests.simulation.explore import explore, replay
from tests.simulation.mutants import catch_all


def main() -> int:
    about = (tests.simulation.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=about)
    parser.add_argument("replay", nargs="?", type=int, metavar="SEED", help="print the story of this one schedule")
    parser.add_argument("--schedules", type=int, default=10_000, help="how many to play (default 10000)")
    parser.add_argument("--seed", type=int, default=1, help="the first one's seed (default 1)")
    parser.add_argument("--ranks", type=int, default=0, help="each job has so many, where it would have fewer")
    parser.add_argument("--mutants", action="store_true", help="then try broken rules: how many are caught?")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay, ranks=arguments.ranks)
    code = explore(max(arguments.schedules, 0), arguments.seed, ranks=arguments.ranks)
    return code or (catch_all() if arguments.mutants else 0)


if __name__ == "__main__":
    sys.exit(main())
