"""A trainer's share of the cores."""

from __future__ import annotations

import ipaddress

import torch

from rolecall import Context
from rolecall.jobs.ps import PsSettings


def share_cores(context: Context[PsSettings]) -> None:
    """Sets torch's threads to this trainer's share of the cores. It is called before each batch or round, because the
    number of trainers changes: with more threads than cores, each step takes many times as long.
    """
    torch.set_num_threads(threads(context))


def threads(context: Context[PsSettings]) -> int:
    """torch's threads for this trainer: its share of the cores if all ranks are on one machine."""
    try:
        one_machine = ipaddress.ip_address(context.settings.master_addr).is_loopback
    except ValueError:  # a name
        one_machine = False
    if context.settings.threads or not one_machine:
        return context.threads
    return max(1, context.threads // max(1, len(context.peers("trainer"))))
