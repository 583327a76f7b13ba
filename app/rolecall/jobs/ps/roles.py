"""The functions of the job's roles."""

from __future__ import annotations

from typing import Any

import torch

from rolecall import Context
from rolecall.jobs.ps import PsSettings, autograd_trainer, calls, trainer
from rolecall.jobs.ps.lead import LeadServer
from rolecall.jobs.ps.server import ShardServer


def serve(context: Context[PsSettings]) -> dict[str, Any] | None:
    """Serves one shard; at rank 0, the lead, until the epochs are done or a drain."""
    server = ShardServer(context) if context.me.rank else LeadServer(context)
    calls.INBOX.set(server.inbox)
    return server.serve()


def train(context: Context[PsSettings]) -> None:
    """Trains until the epochs are done."""
    torch.set_num_threads(trainer.threads(context))
    if context.settings.update_mode == "autograd":
        autograd_trainer.train(context)
    else:
        trainer.Trainer(context).train()
