"""`rolecall scale`: changes how many ranks an elastic role of a local run has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rolecall.errors import UsageError
from rolecall.launch import control


def run(words: Sequence[str]) -> int:
    """Runs `rolecall scale` with `words`. Returns the exit code. Raises UsageError for a number that cannot be."""
    parser = argparse.ArgumentParser(
        prog="rolecall scale",
        description="Starts ranks of an elastic role of a local run, or has those with the highest ordinals drain.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder of `rolecall run`")
    parser.add_argument("wanted", metavar="ROLE=COUNT", help="how many ranks the role is to have")
    arguments = parser.parse_args(words)
    role, _, count = arguments.wanted.partition("=")
    if not role or not (count.isascii() and count.isdecimal()):
        raise UsageError(f"ROLE=COUNT {arguments.wanted!r}: is no role and number, such as observer=4")
    print(f"rolecall: {control.scale(arguments.run, role, int(count))}")
    return 0
