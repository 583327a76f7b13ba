"""A run in a notebook: its state below the cell, as `rolecall watch` shows it, until the run is over."""

from __future__ import annotations

import asyncio
import html
import importlib
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console

from rolecall.observe.targets import Target
from rolecall.observe.watch import PERIOD_SECONDS, Display

WIDTH = 100  # characters
FORMAT = '<pre style="line-height: 1.2; font-family: monospace">{code}</pre>'


def _shell() -> Any:
    """IPython's shell in a kernel, if this process is one."""
    if ipython := sys.modules.get("IPython"):
        shell = ipython.get_ipython()
        return shell if shell is not None and hasattr(shell, "kernel") else None
    return None


def is_here() -> bool:
    """Whether this process runs cells of a notebook."""
    return _shell() is not None


class Cell:
    """Shows a run below the cells that ask for it, until it is `over`. `address` is where rank 0 serves its page, empty
    if it does not; `state` is then what a page would show."""

    def __init__(
        self,
        run: object,
        display: Display,
        over: threading.Event,
        *,
        address: Callable[[], str],
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self._run, self._display, self._over, self._address, self._state = run, display, over, address, state
        self._shown_at = 0  # the number of the cell

    def show(self) -> None:
        """Shows it, once in a cell, and returns. Outside of a notebook, prints what it is."""
        shell = _shell()
        if shell is None:
            print(repr(self._run))
        elif shell.execution_count != self._shown_at:
            self._shown_at = shell.execution_count
            handle = importlib.import_module("IPython.display").display(self, display_id=True)
            threading.Thread(target=asyncio.run, args=(self._update(handle),), daemon=True).start()

    def _repr_html_(self) -> str:
        console = Console(
            record=True,
            width=WIDTH,
            file=io.StringIO(),
            color_system="truecolor",
            force_terminal=True,
            force_jupyter=False,
        )
        console.print(self._display.render(WIDTH))
        return (
            f"{console.export_html(inline_styles=True, code_format=FORMAT)}<code>{html.escape(repr(self._run))}</code>"
        )

    def __repr__(self) -> str:
        return f"{self._display.line()}\n{self._run!r}"

    async def _update(self, handle: Any) -> None:
        following: asyncio.Task[None] | None = None
        while True:
            is_last = self._over.is_set()
            if following is None and (address := self._address()):
                following = asyncio.create_task(self._display.follow_forever(Target("", address.rstrip("/"))))
            if state := self._state():
                self._display.state, self._display.problem = state, ""
            if is_last:
                self._display.problem = ""  # its last state is right
            handle.update(self)
            if is_last:
                break
            await asyncio.sleep(PERIOD_SECONDS)
        if following:
            following.cancel()
            await asyncio.wait({following})
