"""The message that Kubernetes keeps of an ended container: the cause in one line, then the rest."""

from __future__ import annotations

from pathlib import Path

from rolecall import telemetry

FILE = Path("/dev/termination-log")  # kubelet mounts it; elsewhere there is none
MAX_BYTES = 4096  # that kubelet reads


def write(text: str) -> None:
    """Leaves `text` as the message; an empty one leaves it to the log's last lines."""
    if FILE.exists():
        try:
            FILE.write_bytes(text.encode()[:MAX_BYTES])
        except OSError as error:  # the log has it too
            telemetry.log().warning(f"{FILE} cannot be written", problem=error.strerror)


def write_failure(reason: str) -> None:
    """Leaves why the job failed: its last line, which is a traceback's cause, and then all of it."""
    lines = reason.strip().splitlines() or ["for no known reason"]
    write("\n".join([f"the job failed: {lines[-1]}", *(lines if len(lines) > 1 else [])]))
