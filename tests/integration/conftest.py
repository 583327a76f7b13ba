"""A cluster for each test: its processes are gone afterwards, and its logs are printed where the test failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for cluster in getattr(item, "clusters", ()):
            report.sections.append(("every rank's log", cluster.logs()))


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """A factory of clusters; further ones share nothing with the first."""
    clusters: list[Cluster] = []
    request.node.clusters = clusters

    def make(**settings: str) -> Cluster:
        directory = tmp_path / f"cluster-{len(clusters)}"
        directory.mkdir()
        clusters.append(Cluster(directory, **settings))
        return clusters[-1]

    yield make
    for made in clusters:
        made.close()
