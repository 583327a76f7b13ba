"""Compose projects for tests: gone afterwards, and with every container's log where a test failed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.manifests import Rendering
from tests.e2e.containers import IMAGE, PACED, ROOT, Project
from tests.e2e.pods import JobPods, Pods
from tests.integration import cluster

Projects = Callable[..., Project]
Started = Callable[..., Pods]
StartedJob = Callable[..., JobPods]
# of `rl`: it trains for as long as a test needs, and leaves the cores to what happens beside it
ENDLESS = {**cluster.ENDLESS["rl"], "REJOIN_INTERVAL": "0.5", "CHECKPOINT_INTERVAL": "1", "LOG_INTERVAL": "1000"}
_open: list[Project | Pods | JobPods] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for project in _open:
            report.sections.append(("every container's log", project.logs()))


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    """The image of this very code."""
    found = subprocess.run(["docker", "image", "inspect", IMAGE], cwd=ROOT, capture_output=True, check=False)
    assert found.returncode == 0, f"there is no image {IMAGE}: run `make test-e2e`, which builds it"


@pytest.fixture(scope="module")
def projects() -> Iterator[Projects]:
    """A factory of projects, which last as long as the module's tests."""
    made: list[Project] = []

    def make(profile: str, first: str, **settings: str) -> Project:
        made.append(Project(profile, first, **settings))
        _open.append(made[-1])
        return made[-1]

    yield make
    for project in made:
        _open.remove(project)
        project.close()


@pytest.fixture
def started() -> Iterator[Started]:
    """A factory of started pods, gone afterwards."""
    everyone: list[Pods] = []

    def start(
        rendering: Rendering, folder: Path | None = None, secret: bool = True, beside: Pods | None = None
    ) -> Pods:
        everyone.append(Pods(rendering, folder, secret, beside))
        _open.append(everyone[-1])
        everyone[-1].start()
        return everyone[-1]

    yield start
    for pods in reversed(everyone):  # those beside others first: the network is the others'
        _open.remove(pods)
        pods.close()


@pytest.fixture
def job_pods() -> Iterator[StartedJob]:
    """A factory of started pods of Jobs, gone afterwards."""
    everyone: list[JobPods] = []

    def start(rendering: Rendering, secret: bool = True) -> JobPods:
        everyone.append(JobPods(rendering, secret))
        _open.append(everyone[-1])
        everyone[-1].start()
        return everyone[-1]

    yield start
    for pods in everyone:
        _open.remove(pods)
        pods.close()


@pytest.fixture(scope="session")
def endless() -> dict[str, str]:
    """ENDLESS, for a project."""
    return {**ENDLESS, **PACED}
