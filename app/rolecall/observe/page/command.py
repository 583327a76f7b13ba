"""`rolecall page RUN_DIRECTORY`: how a run went, as one HTML file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rolecall.errors import UsageError
from rolecall.observe.page import leftover, render
from rolecall.record import rundir

DESCRIPTION = (
    "Writes one HTML file from the history and the summary of a run whose rank 0 was killed. The file needs neither a "
    "network nor another file. During a run, rank 0 serves the page at http://HOST:METRICS_PORT/."
)


def run(words: Sequence[str]) -> int:
    """Runs the command. Returns the exit code. Raises UsageError if there is no run, or the file cannot be written."""
    parser = argparse.ArgumentParser(prog="rolecall page", description=DESCRIPTION)
    parser.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="a run's CHECKPOINT_DIR")
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of RUN_DIRECTORY/page.html")
    arguments = parser.parse_args(words)
    output = arguments.output or arguments.directory / rundir.PAGE
    if output.exists() and not arguments.output:
        raise UsageError(f"{output}: rank 0 has written it; give another file by --output")
    page = render.saved(leftover.read(arguments.directory, time.time()))
    with UsageError.wrap(f"{output}: cannot be written", OSError):
        rundir.write_atomically(output, page.encode())
    print(f"rolecall: wrote {output}")
    return 0
