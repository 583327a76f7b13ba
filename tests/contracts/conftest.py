"""`--overlay DIR` adds a kustomization of one's own to those that the tests of the manifests hold to their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.manifests import NAMED_IN_ALL_WAYS, OVERLAYS, VARIANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overlay", action="append", default=[], help="a kustomization to check too (repeatable)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "overlay_name" in metafunc.fixturenames:
        extra = [str(Path(path).resolve()) for path in metafunc.config.getoption("--overlay")]
        names = [*OVERLAYS, *extra]
        if "variant" not in metafunc.fixturenames:
            metafunc.parametrize("overlay_name", names)
            return
        in_all_ways = {*NAMED_IN_ALL_WAYS, *extra}
        pairs = [(name, one) for name in names for one in VARIANTS if one == "both" or name in in_all_ways]
        metafunc.parametrize(("overlay_name", "variant"), pairs)
