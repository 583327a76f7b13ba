"""The trainer of UPDATE_MODE=autograd, the tutorial's way: trainers run forward through the lead's model, distributed
autograd runs backward through both processes, and the lead steps the one optimizer.
"""

from __future__ import annotations

import torch
import torch.distributed.autograd as dist_autograd

from rolecall import Context
from rolecall.jobs.ps import PsSettings, data, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart, TrainerId
from rolecall.jobs.ps.server import Server


def run(context: Context[PsSettings], train: data.Split) -> None:
    """Computes one batch after another through the lead's model, until the epochs are done."""
    settings, metrics, me = context.settings, context.metrics, TrainerId.of(context.me, context.generation)
    lead = context.rank0
    deadline = 2 * settings.step_timeout + settings.phase_timeout + settings.rpc_timeout  # the lead saves, too
    calls, device = context.options(timeout=deadline), context.device if lead.name in context.torch.mapped else "cpu"
    key = GradientKey(me, 0)
    answer = calls.call(lead, Server.exchange, GradientPart(key, 0, None, BatchReport(0, 0))).result()
    server = context.reference(lead)
    while answer.assignment and answer.assignment.batches:
        for batch in answer.assignment.batches:
            key = GradientKey(me, key.number + 1)
            inputs, targets = train.batch(torch.from_numpy(batch))
            inputs, targets = inputs.to(device), targets.to(device)
            with dist_autograd.context() as context_id:
                with metrics.ps_compute_seconds.time():
                    output = server.rpc_sync(timeout=deadline).forward(me, context_id, inputs)
                    loss = model.loss(output, targets)
                    dist_autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
                correct = int((output.argmax(1) == targets).sum())
                report = BatchReport(0, len(batch), float(loss.detach()), correct)
                with metrics.ps_wait_seconds.time():
                    answer = calls.call(lead, Server.step, key, context_id, report).result()
            metrics.ps_computed_samples.inc(len(batch))
            context.report_step(key.number)
