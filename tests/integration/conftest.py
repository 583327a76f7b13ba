"""A cluster for each test: its processes are gone afterwards, and its logs are printed where the test failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall.declare import registry
from rolecall.rank.zygote import Zygote
from tests.integration.cluster import Cluster, until
from tests.roles import counter

KEPT = pytest.StashKey[Cluster]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and report.when != "teardown":
        kept = item.config.stash.get(KEPT, None) if "kept" in getattr(item, "fixturenames", ()) else None
        for cluster in (*getattr(item, "clusters", ()), *([kept] if kept else ())):
            report.sections.append(("every rank's log", cluster.logs()))
    if report.failed and KEPT in item.config.stash:
        _close_kept(item.config)


@pytest.hookimpl(tryfirst=True)  # before the server of its ranks is gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # it trains while it is kept: not beside tests that have no use for it
    if KEPT in item.config.stash and "kept" not in getattr(nextitem, "fixturenames", ()):
        _close_kept(item.config)


def _close_kept(config: pytest.Config) -> None:
    config.stash[KEPT].close()
    del config.stash[KEPT]


@pytest.fixture(scope="session")
def server() -> Iterator[Zygote]:
    """What ranks are forked from."""
    with Zygote(*registry.JOBS) as made:
        yield made


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Zygote) -> Cluster:
    """A training job with checkpoints every 0.2 s, left by the test before this one or new; rl, or the parameter.

    A test that uses it must leave it whole: starting ranks costs more than most of what is done to them.
    """
    job, stash = getattr(request, "param", "rl"), request.config.stash
    if KEPT in stash and stash[KEPT].settings["JOB"] != job:
        _close_kept(request.config)
    if KEPT not in stash:
        made = Cluster(tmp_path_factory.mktemp("kept"), server, JOB=job, CHECKPOINT_INTERVAL="0.2")
        stash[KEPT] = made.start(2 if counter(made.others) else 1)
    stash[KEPT].is_whole()
    until(stash[KEPT].first.appears("checkpoint file="), "a checkpoint")
    return stash[KEPT]


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path, server: Zygote) -> Iterator[Callable[..., Cluster]]:
    """A factory of clusters; further ones share nothing with the first. Ranks named in `cold` start as users' do."""
    clusters: list[Cluster] = []
    request.node.clusters = clusters

    def make(**settings: Any) -> Cluster:
        directory = tmp_path / f"cluster-{len(clusters)}"
        directory.mkdir()
        clusters.append(Cluster(directory, server, **settings))
        return clusters[-1]

    yield make
    for made in clusters:
        made.close()
