"""What a call costs in the caller's thread and in the handler's, in microseconds, without the network between them:
`python -m bench.trace_calls MODE`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODES = ("none", "off", "on")
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


def called(vector: Any) -> Any:
    """What is called."""
    return vector


def main(mode: str) -> None:
    """Prints the microseconds of a call: the median of blocks."""
    import torch
    from prometheus_client import CollectorRegistry
    from torch.distributed import rpc

    from rolecall import telemetry
    from rolecall.context.watchdog import Deadline, Watchdog
    from rolecall.record.recorder import recorder
    from rolecall.torch_rpc.rpc import TorchRpc

    if mode == "none":
        from bench import untraced

        assert TorchRpc.call is untraced.call

    def rpc_async(to: str, function: Any, args: tuple[Any, ...], timeout: float) -> Any:
        answer: torch.futures.Future[Any] = torch.futures.Future()
        answer.set_result(function(*args))
        return answer

    rpc.rpc_async = rpc_async
    metrics = telemetry.build(telemetry.WORKER, CollectorRegistry())
    context: Any = SimpleNamespace(metrics=metrics, watchdog=Watchdog(600, 60), mapped=())
    transport, deadline = TorchRpc(context, None), Deadline(10.0, "RPC_TIMEOUT=10")
    vector = torch.ones(100)
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        if mode == "on":
            about = {"job": "bench", "role": "lead", "ordinal": 0, "rank": 0, "generation": 1}
            recorder.start(Path(directory) / "trace", about)
        for _ in range(BLOCKS):
            began = time.process_time()  # of all threads: the recorder's too
            for _ in range(CALLS):
                transport.call("ps_0", called, vector, timeout=deadline)
            recorder.flush()
            seconds.append((time.process_time() - began) / CALLS)
        recorder.close()
    print(1e6 * statistics.median(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
