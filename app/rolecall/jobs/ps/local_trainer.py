"""The trainer of UPDATE_MODE=local: rounds of INNER_STEPS steps by itself, each of one assigned batch of samples."""

from __future__ import annotations

import queue
import time
from collections import deque

import numpy as np
import torch
from torch.futures import Future

from rolecall import Context
from rolecall.jobs.ps import PsSettings, calls, data, model
from rolecall.jobs.ps.local_replica import LocalReplica
from rolecall.jobs.ps.messages import BatchReport, Indices

SIGN_SECONDS = 1.0  # between two signs to the lead that steps are made


def run(context: Context[PsSettings]) -> None:
    """Makes round after round until the epochs are done."""
    s, metrics, replica = context.settings, context.metrics, LocalReplica(context)
    with context.phase("loading"):
        train, _ = data.load(s)
    assigned, ending = deque[Indices](), calls.ENDING.set(queue.SimpleQueue())
    told, steps, lead = time.monotonic(), 0, context.members[0]
    sign: Future[None] | None = None  # the newest to the lead
    replica.ask()
    while True:
        assigned += replica.take(wait=not assigned)
        if not assigned:
            return  # the epochs are done
        samples, version, begun = assigned.popleft(), replica.version, time.monotonic()
        done, loss, correct = 0, 0.0, 0
        for batch in np.array_split(samples, -(-len(samples) // s.batch_size)):  # of equal size, give or take one
            with metrics.ps_compute_seconds.time():
                mean, right = replica.step(*train.batch(torch.from_numpy(batch)))
            done, loss, correct, steps = done + len(batch), loss + mean * len(batch), correct + right, steps + 1
            metrics.ps_computed_samples.inc(len(batch))
            context.report_step(steps)
            assigned += replica.take(wait=False)
            now = time.monotonic()
            if now - told > min(SIGN_SECONDS, s.step_timeout / 4) and (sign is None or sign.done()):
                # a round may take longer than the lead waits; where this call fails, the exchange does, too
                sign = context.call(lead, calls.working, context.me.name, replica.number, timeout=replica.deadline)
                told = now
            if s.round_seconds and now - begun >= s.round_seconds:
                break
            if not ending.empty():  # a drain
                ending.get()
                break
        metrics.ps_round_seconds.observe(time.monotonic() - begun)
        assigned += replica.take(wait=True)
        replica.send(BatchReport(version, done, loss / done, correct, model.buffers(replica.model)))
