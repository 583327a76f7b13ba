"""`rolecall run JOB --hosts`, or in containers: connects to the hosts, which import torch, or to the engine, and
meanwhile describes the job here."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence

from rolecall.declare import describe, flags, registry
from rolecall.declare.describe import Description
from rolecall.declare.flags import RunOptions
from rolecall.launch import needs
from rolecall.launch.containers import Containers, image_named
from rolecall.launch.hosts import Hosts, placement

RUN = "rolecall.launch.local"  # a name: it is imported while the hosts start


def run(target: str, words: Sequence[str], options: RunOptions) -> int:
    """Runs the job `target`, with the flags in `words`, where `options` say. Returns the exit code. Raises UsageError,
    and SystemExit as `describe.ask` does."""

    def described() -> Description | SystemExit:
        try:
            return describe.ask(target, words)
        except SystemExit as end:  # it would end the event loop
            return end

    async def main() -> int:
        is_docker = options.engine == flags.DOCKER
        hosts = Containers(image_named(options.image)) if is_docker else Hosts(placement(options), target)
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

            return await local.run_on_hosts(needs.given(job, options.roles) if is_docker else job, hosts)
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await hosts.close()

    return asyncio.run(main())
