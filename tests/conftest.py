"""For all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes with one thread: several that wait for each other on a busy machine are 30 times slower.

    Before each test, since an evaluation in a test's process sets as many as the machine has cores.
    """
    torch.set_num_threads(1)
