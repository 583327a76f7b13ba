"""A module beside a program."""

import torch


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x
