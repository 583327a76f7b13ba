"""What a check is, how it is run within a deadline, and helpers that checks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
State = Literal["ok", "warning", "problem", "not checked"]
SLACK_SECONDS = 5.0  # added to the waits that a check bounds itself


@dataclass(frozen=True)
class Finding:
    """The result of a check: what there is, and what to do about it."""

    state: State
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A check. `subject` and `action`, what it looks at and what to do if it finds a fault, are also documentation."""

    name: str
    subject: str
    action: str
    run: Callable[[Any], Finding]


def check(name: str, action: str) -> Callable[[Callable[[Any], Finding]], Check]:
    """Makes a check of a function, whose docstring says what it looks at."""

    def decorate(function: Callable[[Any], Finding]) -> Check:
        text = " ".join((function.__doc__ or "").split()).removesuffix(".")
        return Check(name, text, action, function)

    return decorate


def ok(text: str) -> Finding:
    """No fault."""
    return Finding("ok", text)


def warning(text: str, advice: str = "") -> Finding:
    """The rank runs, but with a limitation."""
    return Finding("warning", text, advice)


def problem(text: str, advice: str = "") -> Finding:
    """The rank cannot run."""
    return Finding("problem", text, advice)


def unchecked(text: str) -> Finding:
    """The check could not be made or does not apply; `text` says why."""
    return Finding("not checked", text)


def examine(check: Check, subject: Any) -> Finding:
    """Runs `check`. A finding without advice gets the check's action. Exceptions become findings."""
    try:
        finding = within(subject.timeout + subject.wait + SLACK_SECONDS, lambda: check.run(subject))
    except TimeoutError as error:
        return problem(str(error), check.action)
    except Exception as error:  # a bug in the check says nothing about the rank
        return unchecked(f"the check failed ({type(error).__name__}: {reason(error)})")
    if finding.state in ("warning", "problem") and not finding.advice:
        return Finding(finding.state, finding.text, check.action)
    return finding


def within(seconds: float, function: Callable[[], T]) -> T:
    """Returns `function()`. Raises TimeoutError after `seconds`; the thread, which may hang in the kernel, is left."""
    done, outcome = threading.Event(), dict[str, Any]()

    def run() -> None:
        try:
            outcome["value"] = function()
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
    """Calls a function at the first use, and keeps its value or the exception that it raised."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._value: T
        self._error: Exception | None = None

    def get(self) -> T:
        """The value. Raises the kept exception."""
        if self._make:
            make, self._make = self._make, None
            try:
                self._value = make()
            except Exception as error:
                self._error = error
        if self._error:
            raise self._error
        return self._value


def reason(error: BaseException) -> str:
    """An exception's text in one line."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__
