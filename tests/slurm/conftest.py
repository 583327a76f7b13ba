"""One cluster for all tests: its processes and files are gone afterwards, and its logs are printed if a test failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.slurm.cluster import Slurm, SlurmError

NODES = 5
CLUSTER = pytest.StashKey[Slurm]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and CLUSTER in item.config.stash:
        report.sections.append(("the cluster's logs", item.config.stash[CLUSTER].logs()))


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    cluster = Slurm(NODES)
    request.config.stash[CLUSTER] = cluster
    try:
        cluster.start()
        yield cluster
    except SlurmError as error:
        pytest.skip(f"no Slurm here: {error}")
    finally:
        cluster.close()
