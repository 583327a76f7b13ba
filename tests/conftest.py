"""For all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch computes with one thread: several that wait for each other on a busy machine are 30 times slower."""
    torch.set_num_threads(1)
