"""What a call costs in the caller's thread, in microseconds, without the network:
`python -m bench.trace_calls MODE`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

MODES = ("off", "on")
CALLS, BLOCKS = 2000, 15
DEADLINE = 120.0  # seconds


def measure(mode: str) -> float:
    """Microseconds of a call, in a process of its own. Raises RuntimeError where it fails or takes too long."""
    command = [sys.executable, "-m", "bench.trace_calls", mode]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done within {DEADLINE:g} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


class Answering:
    """In place of the wire: each call is answered at once."""

    def call(self, to: str, request: Any, deadline: Any, ended: Any, *, content: Any) -> Any:
        from rolecall.wire.future import Future

        answer: Future[None] = Future()
        ended(None, None, 0)
        answer.set_result(None)
        return answer


def main(mode: str) -> None:
    """Prints the microseconds of a call: the median of blocks."""
    import torch
    from prometheus_client import CollectorRegistry

    from rolecall import telemetry
    from rolecall.context.transport import WireTransport
    from rolecall.context.watchdog import Watchdog
    from rolecall.record.recorder import recorder
    from rolecall.wire.messages import Deadline, Request

    metrics, wire = telemetry.build(telemetry.WORKER, CollectorRegistry()), cast(Any, Answering())
    transport = WireTransport(wire, metrics, Watchdog(600, 60), rank0="lead_0", rpc_timeout=10.0)
    deadline = Deadline(10.0, "RPC_TIMEOUT=10")
    vector = torch.ones(100)
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        if mode == "on":
            about = {"job": "bench", "role": "lead", "ordinal": 0, "rank": 0, "generation": 1}
            recorder.start(Path(directory) / "trace", about)
        for _ in range(BLOCKS):
            began = time.process_time()  # of all threads: the recorder's too
            for _ in range(CALLS):
                transport.call("ps_0", Request("called", (vector,), {}, 10.0), deadline)
            recorder.flush()
            seconds.append((time.process_time() - began) / CALLS)
        recorder.close()
    print(1e6 * statistics.median(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
