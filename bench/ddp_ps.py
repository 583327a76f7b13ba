"""What `ps` is measured against at home: torch's DistributedDataParallel over gloo, of the same network and data."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bench import local_ps, ranks
from rolecall import config
from rolecall.jobs.ps import PsSettings, data, evaluate, model
from rolecall.torch_rpc.store import interface

WARM = 2  # epochs before the measured ones


def samples_per_s(processes: int, epochs: int, evaluated: bool = True) -> float:
    """Samples a second over all of `processes` processes with one thread each, in `epochs` epochs with the settings of
    `ps`: each has its own batches of BATCH_SIZE, and, if it is to be `evaluated`, a share of the test data after each
    epoch.
    """
    with tempfile.TemporaryDirectory(prefix="bench-ddp-") as directory:
        store = str(Path(directory) / "store")
        return min(local_ps.apart(processes, _train, store, processes, epochs, evaluated))


def _train(store: str, processes: int, epochs: int, evaluated: bool) -> float:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface(ranks.HOST)
    meeting = distributed.FileStore(store, processes)
    rank, limit = meeting.add("processes", 1) - 1, timedelta(seconds=local_ps.DEADLINE)
    distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=processes, timeout=limit)
    settings = config.load(PsSettings)
    net = model.build(settings).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), settings.lr, settings.momentum, fused=True)
    train, test = data.digits()
    tested = replace(test, pixels=test.pixels[rank::processes], labels=test.labels[rank::processes])
    together = settings.batch_size * processes
    order = local_ps.batches(train, together)

    def train_epoch() -> None:
        for indices in islice(order, -(-len(train) // together)):
            inputs, targets = train.batch(indices[rank::processes])
            optimizer.zero_grad()
            model.loss(ddp(inputs), targets).backward()
            optimizer.step()
        if evaluated:
            evaluate.accuracy(net, tested, 1)
            net.train()

    for _ in range(WARM):
        train_epoch()
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(epochs):
        train_epoch()
    return epochs * len(train) / (time.perf_counter() - started)
