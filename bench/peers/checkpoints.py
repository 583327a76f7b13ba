"""Evaluates a directory of Rolecall's checkpoints, oldest first, until one reaches the threshold.

Prints what a peer's program prints: a line for each policy. One process for all of them, as most of the seconds that
`rolecall eval` takes are imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from bench.peers import report
from rolecall.checkpoint import checkpoint
from rolecall.export import evaluation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threshold", type=float, required=True)
    parser.add_argument("--every", type=float, required=True)
    parser.add_argument("--episodes", type=int, default=report.EPISODES)
    parser.add_argument("--sampled", action="store_true")
    arguments = parser.parse_args()
    how = "--no-deterministic" if arguments.sampled else "--deterministic"
    last = 0.0
    files = checkpoint.newest_first(arguments.directory)
    for path in reversed(files):
        about = checkpoint.read(path, "rl").about
        if path != files[0] and not report.due(about["seconds"], last, arguments.every):
            continue
        last = about["seconds"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            episodes = str(arguments.episodes)
            code = evaluation.run(["rl", "--checkpoint", str(path), "--json", how, "--episodes", episodes])
        if code:
            return code
        score = json.loads(printed.getvalue())["mean_return"]
        report.say("snapshot", steps=int(about["done"]), seconds=about["seconds"], scores=[score])
        if score >= arguments.threshold:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
