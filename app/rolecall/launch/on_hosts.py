"""`rolecall run JOB --hosts`: starts the hosts, which import torch, and meanwhile describes the job here."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence

from rolecall.declare import describe, registry
from rolecall.declare.describe import Description
from rolecall.launch.hosts import Hosts, Placement

RUN = "rolecall.launch.local"  # a name: it is imported while the hosts start


def run(target: str, words: Sequence[str], placement: Placement) -> int:
    """Runs the job `target`, with the flags in `words`, on hosts. Returns the exit code. Raises UsageError, and
    SystemExit as `describe.ask` does."""

    def described() -> Description | SystemExit:
        try:
            return describe.ask(target, words)
        except SystemExit as end:  # it would end the event loop
            return end

    async def main() -> int:
        hosts = Hosts(placement, target)
        connecting = asyncio.create_task(hosts.connect())  # the hosts import torch meanwhile
        try:
            importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, RUN))
            if target in registry.JOBS:  # it is described here: one import after the other
                await importing
            job = await asyncio.to_thread(described)
            if isinstance(job, SystemExit):
                return job.code if isinstance(job.code, int) else 1
            await asyncio.gather(connecting, importing)
            from rolecall.launch import local  # imported by now

            return await local.run_on_hosts(job, hosts)
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await hosts.close()

    return asyncio.run(main())
