"""`--overlay DIR` adds a kustomization of one's own to those that the tests of the manifests hold to their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.manifests import SOURCES, Rendering, rendering


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overlay", action="append", default=[], help="a kustomization to check too (repeatable)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rendered" in metafunc.fixturenames:
        extra = [str(Path(path).resolve()) for path in metafunc.config.getoption("--overlay")]
        # of the module: the tests of one kustomization are run together, and it is rendered once
        metafunc.parametrize("rendered", [*SOURCES, *extra], indirect=True, scope="module")


@pytest.fixture(scope="module")
def rendered(request: pytest.FixtureRequest) -> Rendering:
    return rendering(request.param)
