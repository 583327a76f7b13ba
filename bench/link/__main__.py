"""`python -m bench.link --check`: measures links and prints promised beside measured."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from bench.link import check
from bench.link.links import LINKS
from tests.chaos.network import NetworkError


def main(argv: list[str] | None = None) -> int:
    """Returns 0 where every link is what it promises, 1 where one is not or cannot be had, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.link", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="with BENCH_JSON=FILE written there too")
    parser.add_argument("--links", default=",".join(LINKS), help=f"with commas between them: {','.join(LINKS)}")
    arguments = parser.parse_args(argv)
    names = arguments.links.split(",")
    if wrong := [name for name in names if name not in LINKS]:
        parser.error(f"--links: no link is called {wrong[0]!r} ({', '.join(LINKS)})")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    checks = list[check.Checked]()
    for name in names:
        try:
            checks.append(check.check(LINKS[name]))
        except (NetworkError, RuntimeError) as error:
            console.print(f"link: {LINKS[name].what}: {error}", markup=False, highlight=False)
            return 1
    console.print(check.table(checks))
    if target := os.environ.get("BENCH_JSON"):
        check.write(Path(target), checks)
    return 0 if all(one.holds for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
