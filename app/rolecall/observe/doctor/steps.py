"""What the doctor's steps have in common: deadlines, results that are kept, errors and sizes in words."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def reason(error: BaseException) -> str:
    """An error's own words, in one line."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def shown(size: float) -> str:
    """A number of bytes for a reader."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 100 else f"{size:.0f} TiB"


def within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)`, or TimeoutError after `seconds`; its thread may hang in the kernel, and is left alone."""
    done, outcome = threading.Event(), dict[str, Any]()

    def run() -> None:
        try:
            outcome["value"] = function(*arguments)
        except BaseException as error:
            outcome["error"] = error
        done.set()

    threading.Thread(target=run, name="doctor", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]  # type: ignore[no-any-return]


class Once(Generic[T]):
    """What is worked out at its first use, for all later ones: a value, or the error that it raised."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._value: T
        self._error: Exception | None = None
        self._over = False

    @property
    def known(self) -> T | None:
        """The value, where it has been worked out."""
        return self._value if self._over and not self._error else None

    def get(self) -> T:
        """The value. Raises what working it out has raised."""
        if not self._over:
            try:
                self._value = self._make()
            except Exception as error:
                self._error = error
            self._over = True
        if self._error:
            raise self._error
        return self._value
