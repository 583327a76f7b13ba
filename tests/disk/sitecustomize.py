"""Makes fsync slow in every Python process that has this folder on its PYTHONPATH.

`os.fsync` waits before it does its work, for the seconds that the file holds which SLOW_FSYNC names. It keeps looking
at the file meanwhile. Without the file, it does not wait. That it did, a second file
says, of the same name and `.held`.
"""

import os
import time
from pathlib import Path

PERIOD = 0.02  # seconds between two looks at the file
_fsync, _file = os.fsync, os.environ.get("SLOW_FSYNC", "")


def _slow_fsync(descriptor: int) -> None:
    began = time.monotonic()
    while time.monotonic() - began < _seconds():
        Path(f"{_file}.held").touch()
        time.sleep(PERIOD)
    _fsync(descriptor)


def _seconds() -> float:
    try:
        return float(Path(_file).read_text())
    except FileNotFoundError:
        return 0.0


if _file:
    os.fsync = _slow_fsync
