"""`--overlay DIR` adds a kustomization of one's own to those that the tests of the manifests hold to their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.manifests import COPIED, OVERLAYS, Overlay, overlay


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overlay", action="append", default=[], help="a kustomization to check too (repeatable)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "overlay_name" in metafunc.fixturenames:
        extra = [str(Path(path).resolve()) for path in metafunc.config.getoption("--overlay")]
        names = [*OVERLAYS, *extra]
        if "variant" not in metafunc.fixturenames:
            metafunc.parametrize("overlay_name", names)
            return
        pairs = [*((name, "both") for name in (*COPIED, *extra)), (COPIED[0], "prefix"), (COPIED[0], "suffix")]
        metafunc.parametrize(("overlay_name", "variant"), pairs)


@pytest.fixture
def rendered(overlay_name: str) -> Overlay:
    return overlay(overlay_name)
