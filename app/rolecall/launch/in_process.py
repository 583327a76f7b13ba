"""`rolecall run JOB --in-process`: all ranks as threads of this process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare import describe, flags, registry
from rolecall.inprocess.run import InProcessRun
from rolecall.launch import ended
from rolecall.launch.output import Tracebacks


class Lines:
    """Takes the log, and gives `show` each line: a traceback once, though several ranks log it."""

    def __init__(self, show: Callable[[str], None] = print) -> None:
        self._tracebacks, self._show = Tracebacks("", set()), show

    def write(self, text: str) -> None:
        """Writes whole lines."""
        shown = [each for line in text.splitlines() for each in self._tracebacks.show(line)]
        for line in [*shown, *self._tracebacks.end()]:
            self._show(line.removeprefix(": "))

    def flush(self) -> None:
        """Has it written."""
        sys.stdout.flush()


def run(target: str, words: Sequence[str]) -> int:
    """Runs the job that `target` names, with the flags in `words`. Returns the exit code. Raises UsageError."""
    registry.require_extra(target)
    job, given = registry.get(target), flags.parse(registry.get(target), target, words)
    _, settings = registry.load(target, **{name.lower(): value for name, value in given.variables.items()})
    description = describe.describe(target, words)
    telemetry.warn_misspelt({*Settings.model_fields, *description.variables})
    here = InProcessRun(job, settings, description, Lines())

    async def main() -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, _interrupt, here)
        return await here.run()

    code = asyncio.run(main())
    print(f"rolecall: {ended.state_of(code)}; results in {here.directory}", flush=True)
    return code


def _interrupt(run: InProcessRun) -> None:
    if not run.leaving:
        print("rolecall: stopping: the job's state, if it has any, is saved; Ctrl-C again to stop at once", flush=True)
    run.drain()
