"""The trainer of UPDATE_MODE=autograd, the tutorial's way: trainers run forward through the lead's model, distributed
autograd runs backward through both processes, and the lead steps the one optimizer.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, data, model
from rolecall.jobs.ps.messages import BatchReport, GradientKey, GradientPart


def run(context: Context[PsSettings]) -> None:
    """Computes one batch after another through the lead's model, until the epochs are done."""
    settings, metrics, name = context.settings, context.metrics, context.me.name
    with context.phase("loading"):
        samples, _ = data.load(settings)
    lead = context.members[0].name
    deadline = 2 * settings.step_timeout + settings.phase_timeout + settings.rpc_timeout  # the lead saves, too
    remote = rpc.remote(lead, calls.server_model, timeout=settings.phase_timeout)
    device = context.device if lead in context.mapped else torch.device("cpu")
    key = GradientKey(name, 0)
    call = functools.partial(context.call, lead, timeout=deadline)
    assignment = call(calls.exchange, GradientPart(key, 0, None, BatchReport(0, 0))).wait().assignment
    while assignment.batches:
        for batch in assignment.batches:
            key = GradientKey(name, key.number + 1)
            inputs, targets = samples.batch(torch.from_numpy(batch))
            inputs, targets = inputs.to(device), targets.to(device)
            with dist_autograd.context() as context_id:
                with metrics.ps_compute_seconds.time():
                    output = call(calls.forward, remote, name, context_id, inputs).wait()
                    loss = model.loss(output, targets)
                    dist_autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
                correct = int((output.argmax(1) == targets).sum())
                report = BatchReport(0, len(batch), float(loss.detach()), correct)
                with metrics.ps_wait_seconds.time():
                    assignment = call(calls.step, remote, key, context_id, report).wait().assignment
            metrics.ps_computed_samples.inc(len(batch))
            context.report_step(key.number)
