"""What tests share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from structlog.typing import EventDict

from rolecall.checkpoint import saving
from rolecall.context import progress
from rolecall.context.context import Context
from rolecall.wire.session import Session
from tests.context import contexts
from tests.context.contexts import Clock, Supervisor

pytest_plugins = ["rolecall.testing", "pytester"]  # an installed Rolecall brings the first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write tests/gang/*.txt and contracts/snapshots instead of checking them"
    )


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that is called in this process logs to streams that end with its test."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def sessions_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session that a test began is over after it, and with it the threads of its wire."""
    sessions, init = list[Session](), Session.__init__

    def begin(session: Session, *arguments: Any, **keywords: Any) -> None:
        init(session, *arguments, **keywords)
        sessions.append(session)

    monkeypatch.setattr(Session, "__init__", begin)
    yield
    for session in sessions:
        session.end()


@pytest.fixture(scope="session")
def torchlib() -> None:
    """Exports to ONNX share what torch's operators become, which each would read anew for a second."""
    apis: Any = importlib.import_module("onnxscript._framework_apis.torch_2_5")
    apis.get_torchlib_ops = functools.cache(apis.get_torchlib_ops)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (progress, saving):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def supervisor() -> Supervisor:
    return Supervisor()


@pytest.fixture
def context(clock: Clock, supervisor: Supervisor, tmp_path: Path) -> Context[Any]:
    """Rank 0's."""
    return contexts.make(tmp_path, supervisor)


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread: several that wait for each other on a busy machine are 30 times slower.

    Before each test, since an evaluation in a test's process sets as many as the machine has cores.
    """
    torch.set_num_threads(1)
