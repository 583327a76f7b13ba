"""TensorBoard's event files in CHECKPOINT_DIR/tensorboard, by tensorboard's own writer, which needs no torch.

A resumed run writes SessionLog.START at its first step. TensorBoard drops the points from that step on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from pathlib import Path
from typing import Any

from rolecall.record.history import Point, Row, Start

FOLDER = "tensorboard"
FLUSH_SECONDS = 3600  # of its writer: `write` flushes


class TensorBoard:
    """One event file, and another one after an error. Points are written as they come."""

    def __init__(self, about: dict[str, Any]) -> None:
        load = importlib.import_module
        self._event: Any = load("tensorboard.compat.proto.event_pb2")
        self._summary: Any = load("tensorboard.compat.proto.summary_pb2")
        self._file_writer: Any = load("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._folder, self._settings = str(Path(about["directory"]) / FOLDER), about["settings"]
        self._last: dict[str, int] = {}  # the newest step of each curve
        self._writer: Any = None
        self._open()

    def _open(self) -> None:
        self._writer = self._file_writer(self._folder, flush_secs=FLUSH_SECONDS)
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for name, value in self._settings.items()
        }
        parameters = importlib.import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb(plain)
        self._add(0, summary=parameters)
        rows = "\n".join(f"| {name} | {value} |" for name, value in plain.items())
        self._add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def write(self, rows: list[Row]) -> None:
        """See `Sink`."""
        last = dict(self._last)
        try:
            if self._writer is None:
                self._open()
            for row in rows:
                match row:
                    case Start():
                        self._start(row)
                    case Point():
                        self._point(row)
            self._writer.flush()
        except Exception:
            writer, self._last, self._writer = self._writer, last, None
            with contextlib.suppress(Exception):  # it flushes, perhaps to a full disk
                writer.close()
            raise

    def _start(self, start: Start) -> None:
        self._last = {name: min(last, start.step) for name, last in self._last.items()}
        self._add(start.step + 1, start.time, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def _point(self, point: Point) -> None:
        if point.step > self._last.get(point.name, -1):
            self._last[point.name] = point.step
            self._add_value(point.step, point.time, tag=point.name, simple_value=point.value)

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        if summary is not None:
            text = f"```\n{json.dumps(summary, indent=1)}\n```"
            self._add_text("summary", text, max(self._last.values(), default=0))
        self._writer.close()

    def _add_text(self, tag: str, text: str, step: int) -> None:
        metadata = importlib.import_module("tensorboard.plugins.text.metadata").create_summary_metadata(tag, "")
        tensor = importlib.import_module("tensorboard.util.tensor_util").make_tensor_proto(text)
        self._add_value(step, tag=tag, metadata=metadata, tensor=tensor)

    def _add_value(self, step: int, unix: float | None = None, **value: Any) -> None:
        self._add(step, unix, summary=self._summary.Summary(value=[self._summary.Summary.Value(**value)]))

    def _add(self, step: int, unix: float | None = None, **what: Any) -> None:
        wall_time = time.time() if unix is None else unix
        self._writer.add_event(self._event.Event(wall_time=wall_time, step=step, **what))


begin = TensorBoard
