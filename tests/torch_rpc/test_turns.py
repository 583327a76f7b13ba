"""Calls that a rank carries out one after the other, in the thread of its role's function."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from rolecall import RankObject, UsageError, in_turn
from rolecall.declare.remote import require_importable
from rolecall.torch_rpc import rpc, turns
from tests.context.contexts import make

ran: list[tuple[str, int]] = []


class EndError(Exception):
    """Ends `serve`."""


@in_turn
def note(text: str) -> str:
    """Keeps `text`, and the thread that it is run in."""
    ran.append((text, threading.get_ident()))
    return text.upper()


@in_turn
def end() -> None:
    """Raises."""
    raise EndError


def called(function: Any, *args: Any) -> Any:
    """A call as RPC makes it: in another thread."""
    futures: list[Any] = []
    thread = threading.Thread(target=lambda: futures.append(function(*args)))
    thread.start()
    thread.join()
    return futures[0]


def test_calls_run_in_their_order_in_the_thread_that_serves() -> None:
    ran.clear()
    futures = [called(note, text) for text in ("one", "two", "three")]
    assert not any(future.done() for future in futures)
    last = called(end)
    with pytest.raises(EndError):  # what a call raises is this rank's own failure
        turns.serve()
    assert ran == [(text, threading.get_ident()) for text in ("one", "two", "three")]
    assert [future.wait() for future in futures] == ["ONE", "TWO", "THREE"]
    assert not last.done()


def test_rank_0_refuses_them_whoever_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that calls by torch's own functions, or in its own process, would wait for ever."""
    current = RankObject[Any]()
    monkeypatch.setattr(rpc, "_context", current)
    current.set(make(tmp_path))
    with pytest.raises(UsageError, match=r"^note is @in_turn, which rank 0 never serves"):
        note("one")


def test_such_a_function_can_be_called_at_a_peer() -> None:
    require_importable(note)
    assert pickle.loads(pickle.dumps(note)) is note
    assert (note.__name__, note.__doc__) == ("note", "Keeps `text`, and the thread that it is run in.")
