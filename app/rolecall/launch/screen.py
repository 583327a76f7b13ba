"""What `rolecall run` shows of a run: lines, and the live display of rank 0's state."""

from __future__ import annotations

import asyncio
import sys

from rolecall.launch.here import LAST_OUTPUT_SECONDS
from rolecall.launch.output import Output, printable
from rolecall.observe.targets import Target
from rolecall.observe.watch import PERIOD_SECONDS, Display


class Screen:
    """Shows lines as they come, or, if `live`, the newest below the display. `seen` are the tracebacks that were
    shown, as `output.Tracebacks` has them."""

    def __init__(self, live: bool) -> None:
        self.display, self.seen = Display(), set[tuple[str, str]]()
        self._live, self._errors = live, set[str]()

    def open(self) -> None:
        """Begins to show what comes. Has to come before the other methods."""
        self._output = Output(sys.stdout, sys.stderr)

    def show(self, line: str) -> None:
        """Shows a line of a rank; an error that several ranks report is shown once."""
        error = line.startswith("rolecall: ")
        if error and line in self._errors:
            return
        if error:
            self._errors.add(line)
        if self._live and not error:
            self.display.lines.append(printable(line))
        else:
            self._output.line(line, error)

    def say(self, line: str) -> None:
        """Shows a line of `rolecall run` itself."""
        self._output.line(f"rolecall: {line}")

    async def draw_forever(self, rank0: Target) -> None:
        """Draws the display, if there is one, of the state that `rank0` streams."""
        if not self._live:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.display.follow_forever(rank0))
            while True:
                self._output.picture(self.display.render(self._output.width))
                await asyncio.sleep(PERIOD_SECONDS)

    def close(self, last: str) -> None:
        """Shows what waits, and then the `last` line."""
        self._output.close(f"rolecall: {last}", LAST_OUTPUT_SECONDS)
