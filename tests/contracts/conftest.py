"""`--overlay DIR` adds a kustomization of one's own to those that the tests of the manifests hold to their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.manifests import OVERLAYS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overlay", action="append", default=[], help="a kustomization to check too (repeatable)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "overlay_name" in metafunc.fixturenames:
        extra = [str(Path(path).resolve()) for path in metafunc.config.getoption("--overlay")]
        metafunc.parametrize("overlay_name", [*OVERLAYS, *extra])
