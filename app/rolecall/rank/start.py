"""A rank's processes on this machine: starts its tunnel, and runs its supervisor."""

from __future__ import annotations

import asyncio
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
from rolecall.rank import endpoints, fork_server, termination
from rolecall.rank.supervisor import Supervisor
from rolecall.rank.tied import tie
from rolecall.tunnel.handle import Handle


def run(job: Description, settings: Settings, identity: Identity, run: int = 0, parent: int = 0) -> int:
    """Runs one rank until the job is over for it; of `rolecall run`, whose process is `run`, at the latest until the
    process `parent` ends. Returns the exit code. Raises UsageError for bad input.
    """
    endpoints.allow_descriptors()
    termination.write("")  # of a process that this one replaces
    directory, tunnel = Path(tempfile.mkdtemp(prefix="rolecall-")), None
    rank0 = Peer(job.roles[0].name, 0, 0).name
    name = "" if identity.ordinal is None else Peer(identity.role, identity.ordinal, 0).name
    if name == rank0:  # which the others dial there
        settings = settings.model_copy(update={"port": settings.rank0_port})
    try:
        if settings.secure:
            tunnel = Handle(settings, job.name, name, rank0, directory)
            fork_server.spared.add(tunnel.pid)
        else:
            telemetry.log().warning("TLS=off: whoever reaches a port of this rank can run code on it")
        supervisor = Supervisor(job, settings, identity, directory, tunnel, run, parent)
        if parent:
            tie(parent)
        code, directive = asyncio.run(supervisor.run()), supervisor.member.directive
    finally:
        if tunnel:
            tunnel.close()
        shutil.rmtree(directory, ignore_errors=True)
    if settings.leave_code and supervisor.member.hurried and (directive is None or directive.kind not in OVER):
        return settings.leave_code  # where 0 would count as the end of its work, and 3 as the job's
    if code == USAGE and directive is not None and directive.kind == "failed":
        raise UsageError(directive.reason)
    if code == FAILED and directive is not None and directive.kind == "failed":
        termination.write_failure(directive.reason)
    return code
