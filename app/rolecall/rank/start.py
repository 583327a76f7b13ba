"""A rank's processes on this machine: starts its tunnel, and runs its supervisor."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.declare.registry import Identity
from rolecall.declare.task import Peer
from rolecall.errors import FAILED, USAGE, UsageError
from rolecall.gang.protocol import OVER
from rolecall.rank import descendants, endpoints, fork_server, termination
from rolecall.rank.supervisor import Supervisor
from rolecall.tunnel.handle import Handle


def run(
    job: Description, settings: Settings, identity: Identity, run: int = 0, parent: int = 0, *, tied: int = 0
) -> int:
    """Runs one rank until the job is over for it, or until the process `parent` exits, or the file descriptor `tied`
    comes to its end. `run` is the process of `rolecall run`, if that has started it. Returns the exit code. Raises
    UsageError for bad input.
    """
    endpoints.allow_descriptors()
    termination.write("")  # deletes the message of an earlier process
    directory, tunnel = Path(tempfile.mkdtemp(prefix=f"rolecall-{os.getpid()}-")), None
    rank0 = Peer(job.roles[0].name, 0, 0).name
    name = "" if identity.ordinal is None else Peer(identity.role, identity.ordinal, 0).name
    if name == rank0:  # the others connect there
        settings = settings.model_copy(update={"port": settings.rank0_port})
    try:
        if settings.secure:
            tunnel = Handle(settings, job.name, name, rank0, directory)
            fork_server.spared.add(tunnel.pid)
        else:
            telemetry.log().warning("TLS=off: anyone who reaches a port of this rank can run code on it")
        supervisor = Supervisor(job, settings, identity, directory, tunnel, run=run, parent=parent)
        if parent:
            descendants.exit_with(parent)
        if tied:
            descendants.exit_with_input(tied)
        code, directive = asyncio.run(supervisor.run()), supervisor.member.directive
    finally:
        if tunnel:
            tunnel.close()
        shutil.rmtree(directory, ignore_errors=True)
    if settings.leave_code and supervisor.member.hurried and (directive is None or directive.kind not in OVER):
        return settings.leave_code  # 0 would mean that its work is done, and 3 that the job has failed
    if code == USAGE and directive is not None and directive.kind == "failed":
        raise UsageError(directive.reason)
    if code == FAILED and directive is not None and directive.kind == "failed":
        termination.write_failure(directive.reason)
    return code
