"""What the programs that measure a library's calls have in common: their options, and what they print.

A program is the caller, which prints {"event": "figure", "name", "value"} for each figure and {"event": "end"}. With
`--listen`, if its library does not start one, it is the callee, which prints {"event": "ready"}.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import calls_work
from bench.peers.report import say


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--address", default="127.0.0.1", help="the callee's")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="which callee and caller share")
    figures = [name for name in calls_work.FIGURES if name not in calls_work.COSTS]  # those need the callee's process
    parser.add_argument("--figures", default=",".join(figures))
    parser.add_argument("--seconds", type=float, default=2.0)
    return parser.parse_args()


def ready() -> None:
    """The callee can be called."""
    say("ready")


def measure(
    chosen: argparse.Namespace,
    send: calls_work.Send,
    tensor: Callable[[np.ndarray], Any] = lambda array: array,
    callee: int | None = None,
) -> None:
    """Prints all figures, and ends the process."""
    for name in chosen.figures.split(","):
        say("figure", name=name, value=calls_work.measure(name, send, chosen.seconds, tensor, callee))
    say("end")
    os._exit(0)  # some libraries' threads do not end
