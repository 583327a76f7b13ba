"""A slow disk for a rank's processes, without any privilege: see sitecustomize.py."""

from __future__ import annotations

import os
from pathlib import Path


class SlowDisk:
    """What makes fsync slow for the processes that have `environment`. `file` must be in a folder that exists."""

    def __init__(self, file: Path) -> None:
        self._file = file
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self.environment = {"SLOW_FSYNC": str(file), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def has_held(self) -> bool:
        """Whether an fsync has waited so far."""
        return Path(f"{self._file}.held").exists()

    def slow(self, seconds: float) -> None:
        """From now on each fsync takes `seconds` longer, that under way too."""
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(str(seconds))
        temporary.replace(self._file)
