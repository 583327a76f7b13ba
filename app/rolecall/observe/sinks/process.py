"""`python -m rolecall.observe.sinks.process SINK`: writes one sink. Its parent sends requests, a JSON object a line, to its
standard input; each is answered by a line on standard output: {"number": N, "error": ""}.

Requests: {"open": ABOUT}, then {"items": [...], "covered": STEP} as often as there is something, and {"end": STATE,
"summary": {...} or null}. Without `end`, the end of the input stops it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rolecall import machine
from rolecall.observe.sinks.points import Item

NICE = 10  # lower priority than training
LAST = 10.0  # seconds that are left to it after its parent's end
LONGEST = 500  # characters of an error


class Sink(Protocol):
    """What a sink's module opens with `begin(about)`. Both methods may raise anything."""

    def write(self, items: list[Item], covered: int) -> None:
        """Writes `items`, some of which it may have written before; checkpoints cover the steps up to `covered`. After
        an error it is given the same ones once more."""
        ...

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """Ends: the run is finished, failed, or stopped and may resume; `summary` is summary.json's, if there is."""
        ...


def serve(lines: Iterable[bytes], answer: Callable[[str], None], begin: Callable[[dict[str, Any]], Sink]) -> None:
    """Carries out the requests in `lines`, those after an error too."""
    about: dict[str, Any] = {}
    sink: Sink | None = None
    for line in lines:
        request = json.loads(line)
        error = ""
        try:
            about = request.get("open", about)
            sink = sink or begin(about)
            if "items" in request:
                sink.write(request["items"], request["covered"])
            if "end" in request:
                sink.end(request["end"], request["summary"])
        except (Exception, SystemExit) as raised:  # whatever a library raises
            first = (str(raised).strip().splitlines() or [""])[0]
            error = f"{type(raised).__name__}: {first}"[:LONGEST]
        answer(json.dumps({"number": request["number"], "error": error}) + "\n")
        if "end" in request and not error:
            return
    if sink:
        sink.end("stopped", None)


def _follow(parent: int) -> None:
    """Ends this process some time after its parent, even where a library hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)  # a period; nothing waits for it
    time.sleep(LAST)
    os._exit(1)


def main(name: str) -> None:
    """The process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(text: str) -> None:
        answers.write(text)
        answers.flush()

    module = importlib.import_module(f"rolecall.observe.sinks.{name}")
    serve(sys.stdin.buffer, answer, module.begin)


if __name__ == "__main__":
    machine.name_part("sink")
    main(sys.argv[1])
