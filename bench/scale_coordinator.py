"""A coordinator alone in its process, for `make bench-scale`: `python -m bench.scale_coordinator DIRECTORY
MEMBERS LEASE_SECONDS`. It prints its port and rank 0's incarnation, and serves until its standard input closes.

With PROFILE=FILE it leaves there what cProfile saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import os
import resource
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.gang.protocol import RoleSpec
from rolecall.rank.coordinator import Coordinator
from tests.ports import free_ports

FIRST = "first"
FIXED = 2  # members of the role that is not elastic


def describe(members: int) -> Description:
    """A job of so many members: a lead, `FIXED` of a fixed role, and the others of an elastic one."""
    elastic = members - 1 - FIXED
    roles = (
        RoleSpec("lead", 1, 1, 1, False),
        RoleSpec("fixed", FIXED, FIXED, FIXED, False),
        RoleSpec("elastic", elastic, 1, elastic, True),
    )
    names = [role.name for role in roles]
    return Description(
        name="scale", target="scale", version="1", summary="", roles=roles, gpus=dict.fromkeys(names),
        preloads=dict.fromkeys(names, ()), score="score", unit="steps", lower=False, settings={},
    )  # fmt: skip


def allow_descriptors() -> None:
    """Raises the limit of open files to what this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(directory: Path, members: int, lease: float) -> None:
    (port,) = free_ports(1)
    settings = Settings(
        checkpoint_dir=directory, port=port, bind_addr="127.0.0.1", lease_seconds=lease,
        rejoin_interval=3600, join_grace=600,
    )  # fmt: skip
    allow_descriptors()
    lead = Coordinator(describe(members), settings, FIRST, "node")
    await lead.start(telemetry.build(telemetry.COORDINATOR, CollectorRegistry()))
    lead.checked()
    loops = [asyncio.create_task(loop) for loop in lead.loops()]
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for loop in loops:
        loop.cancel()
    await lead.stop(ended=True)


def main() -> None:
    directory, members, lease = sys.argv[1:]
    profile = cProfile.Profile() if os.environ.get("PROFILE") else None
    with profile or contextlib.nullcontext():
        asyncio.run(serve(Path(directory), int(members), float(lease)))
    if profile:
        profile.dump_stats(os.environ["PROFILE"])


if __name__ == "__main__":
    main()
