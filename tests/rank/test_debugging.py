"""Who is attached to a worker's debugger, with a socket pair in the place of `rolecall debug`."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rolecall.messages import codec, control
from rolecall.messages import worker as messages
from rolecall.rank import debugging
from rolecall.rank.worker_end import WorkerEnd


def attached(reports: list[bool]) -> tuple[debugging.Terminal, socket.socket]:
    terminal = debugging.Terminal(Path("run"), "worker_0", reports.append)
    mine, theirs = socket.socketpair()
    terminal._socket = mine
    return terminal, theirs


def test_a_connection_that_was_lost_before_does_not_detach_the_next_one() -> None:
    reports: list[bool] = []
    terminal, theirs = attached(reports)
    old, other = socket.socketpair()
    with theirs, old, other:
        terminal.detach(old)
        assert (terminal.attach("here"), reports) == (True, [])


def test_a_thread_goes_on_once_its_terminal_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[bool] = []
    terminal, theirs = attached(reports)
    debugger = debugging.Debugger(terminal)
    debugger.reset()
    debugger._connection = terminal.connection
    terminal.detach(terminal.connection)
    monkeypatch.setattr(terminal, "attach", lambda *_: pytest.fail("waits for somebody"))
    debugger.interaction(sys._getframe(), None)
    theirs.close()


def test_a_stop_whose_sender_has_gone_waits_briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(debugging, "STOP_SECONDS", 0.05)
    reports: list[bool] = []
    terminal = debugging.Terminal(Path("run"), "worker_0", reports.append)
    assert not terminal.attach("here", 0.05)
    assert not terminal.attach("there")  # not ATTACH_SECONDS any more
    assert reports == [True, False] * 2


def test_the_working_directorys_pdbrc_is_not_executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".pdbrc").write_text("!raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    terminal, theirs = attached([])
    with theirs:
        assert not debugging.Debugger(terminal).rcLines


def test_only_a_socket_of_this_user_makes_a_breakpoint_possible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / control.SOCKET).write_text("")
    assert not debugging.possible()


def test_a_thread_that_is_stopped_with_the_lock_held_can_be_left() -> None:
    mine, theirs = multiprocessing.Pipe()
    task: Any = None
    worker = WorkerEnd(mine, task, None)
    with worker._lock:
        thread = threading.Thread(target=worker.report_debugging, args=(False,), daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()
    assert theirs.poll(5.0)
    assert isinstance(codec.decode(messages.FromWorker, theirs.recv_bytes()), messages.Report)
