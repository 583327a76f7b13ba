"""`python -m rolecall.observe.sinks.process SINK`: writes one sink.

The parent sends requests, one JSON object a line, to standard input. Each is answered by a line on standard output:
{"number": N, "error": ""}. A request has {"number": N, "items": [...], "covered": STEP}; the first also has {"open":
ABOUT}, the last {"end": STATE, "summary": {...} or null}. The end of the input stops the sink, too.
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
ORPHAN_SECONDS = 10.0  # that it may run on after its parent's end
MAX_ERROR = 500  # characters of an error


class Sink(Protocol):
    """The result of `begin(about)` of a sink's module. Both methods may raise anything."""

    def write(self, items: list[Item], covered: int) -> None:
        """Writes `items`, some of which may have been written before; checkpoints cover the steps up to `covered`.
        After an error the same items come again."""
        ...

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """Ends the sink: the run is finished, failed, or stopped and may resume. `summary` is the contents of
        summary.json, if there is one."""
        ...


def serve(lines: Iterable[bytes], answer: Callable[[str], None], begin: Callable[[dict[str, Any]], Sink]) -> None:
    """Handles the requests in `lines`. After an error it continues with the next one."""
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
        except (Exception, SystemExit) as raised:  # of a library
            first = (str(raised).strip().splitlines() or [""])[0]
            error = f"{type(raised).__name__}: {first}"[:MAX_ERROR]
        answer(json.dumps({"number": request["number"], "error": error}) + "\n")
        if "end" in request and not error:
            return
    if sink:
        sink.end("stopped", None)


def _follow(parent: int) -> None:
    """Ends this process some time after its parent, even if a library hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)  # a period; nothing waits for it
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def main(name: str) -> None:
    """The process's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
    os.nice(NICE)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print

    def answer(text: str) -> None:
        answers.write(text)
        answers.flush()

    module = importlib.import_module(f"rolecall.observe.sinks.{name}")
    serve(sys.stdin.buffer, answer, module.begin)


if __name__ == "__main__":
    machine.name_part("sink")
    main(sys.argv[1])
