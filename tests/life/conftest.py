"""The option that writes what scripts print."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write the output of tests/life/*.txt instead of checking it"
    )
