"""A process with a tunnel, for tests: a supervisor as far as the tunnel sees it. It imports no torch: that is slow."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.tunnel import keys
from rolecall.tunnel.handle import Handle

JOB, RANK_0 = "tested", "lead_0"


def main() -> None:
    """Prints the tunnel's figures, and obeys what it reads."""
    name, directory = sys.argv[1:]
    settings = Settings(job=JOB)
    keys.RELOAD = 0.2  # no test waits for longer
    telemetry.setup_logging("text", "debug", stream=sys.stderr)
    handle = Handle(settings, JOB, name.replace("-", ""), RANK_0, Path(directory))
    print(handle.pid, flush=True)

    def obey() -> None:
        for line in sys.stdin:
            handle.place(line.strip())

    registry = CollectorRegistry()
    metrics = telemetry.build(telemetry.SUPERVISOR, registry)

    def figures() -> str:
        samples = [sample for family in registry.collect() for sample in family.samples]
        refused = {one.labels["reason"]: one.value for one in samples if one.name == "rolecall_tunnel_refused_total"}
        connections = registry.get_sample_value("rolecall_tunnel_connections")
        passed = registry.get_sample_value("rolecall_tunnel_bytes_total")
        return json.dumps({"connections": connections, "bytes": passed, "refused": refused})

    async def follow() -> None:
        following, told = asyncio.ensure_future(handle.follow(metrics)), ""
        while not (await asyncio.wait({following}, timeout=0.02))[0]:
            if told != (now := figures()):
                print(told := now, flush=True)
        following.exception()  # the tunnel has ended

    threading.Thread(target=obey, daemon=True).start()
    asyncio.run(follow())


if __name__ == "__main__":
    main()
