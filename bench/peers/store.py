"""Results of long benchmarks, kept in BENCH_JSON as they come: a rerun with the same file measures what is missing."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.display import save
from bench.peers.process import Run


@dataclass
class Store:
    """The runs of the benchmark `kind` by their keys, and in a line why others failed. Threads may share it."""

    kind: str
    runs: dict[str, Run] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def open(kind: str) -> Store:
        """With what BENCH_JSON holds. Raises RuntimeError where that is something else."""
        store, target = Store(kind), os.environ.get("BENCH_JSON")
        if target and Path(target).exists():
            try:
                content = json.loads(Path(target).read_text() or "{}")
                if content and content["benchmark"] != kind:
                    raise ValueError
                store.runs = {key: Run.from_json(value) for key, value in content.get("runs", {}).items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise RuntimeError(f"BENCH_JSON={target}: holds no results of {kind}; name another file") from None
        return store

    def keep(self, key: str, run: Run) -> None:
        with self._lock:
            self.runs[key] = run
            self.failures.pop(key, None)
            save(self.to_json())

    def fail(self, key: str, problem: BaseException) -> str:
        """Returns the line that is kept."""
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        line = lines[0][:300] if len(lines) == 1 else f"{lines[0][:40]}: {lines[-1].strip()[-250:]}"
        with self._lock:
            self.failures[key] = line
            save(self.to_json())
        return line

    def to_json(self) -> dict[str, Any]:
        runs = {key: run.to_json() for key, run in self.runs.items()}
        return {"benchmark": self.kind, "runs": runs, "failures": self.failures}
