"""TensorBoard's event files in CHECKPOINT_DIR/tensorboard, written with tensorboard's own classes, without TensorFlow.

A resumed run writes SessionLog.START at its first step, at which TensorBoard drops the points from that step on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from rolecall.observe.sinks.points import Item

FOLDER = "tensorboard"
PREFIX = "events.out.tfevents."
VERSION = "brain.Event:2"  # of the format: with it, START is understood


class TensorBoard:
    """One event file, and another after an error. Points are written as they come."""

    def __init__(self, about: dict[str, Any]) -> None:
        load = importlib.import_module
        self._event: Any = load("tensorboard.compat.proto.event_pb2")
        self._summary: Any = load("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = load("tensorboard.summary.writer.record_writer").RecordWriter
        self._folder, self._settings = Path(about["directory"]) / FOLDER, about["settings"]
        self._last: dict[str, int] = {}  # step of each curve
        self._step = 0
        self._records: Any = None
        self._open()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / _name(self._folder)).open("xb")
        self._records = self._writer(self._file)
        self._write(time.time(), 0, file_version=VERSION)
        self._parameters(self._settings)
        self._records.flush()

    def write(self, items: list[Item], covered: int) -> None:
        """See `Sink`."""
        last = dict(self._last)
        try:
            if self._records is None:
                self._open()
            for kind, *rest in items:
                self._start(*rest) if kind == "start" else self._point(*rest)
            self._records.flush()
        except Exception:
            self._last, self._records = last, None
            with contextlib.suppress(OSError):  # it flushes, perhaps to a full disk
                self._file.close()
            raise

    def _start(self, step: int, generation: int, unix: float) -> None:
        self._step, self._last = step, {name: min(last, step) for name, last in self._last.items()}
        self._write(unix, step + 1, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def _point(self, name: str, step: int, unix: float, value: float) -> None:
        if step > self._last.get(name, -1):
            self._last[name], self._step = step, max(step, self._step)
            self._value(step, unix, tag=name, simple_value=value)

    def end(self, state: str, summary: dict[str, Any] | None) -> None:
        """See `Sink`."""
        if summary is not None:
            self._text("summary", f"```\n{json.dumps(summary, indent=1)}\n```", self._step)
            plugin = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
            metadata = importlib.import_module("tensorboard.plugins.hparams.metadata")
            api = importlib.import_module("tensorboard.plugins.hparams.api_pb2")
            status = {"finished": api.STATUS_SUCCESS, "failed": api.STATUS_FAILURE}.get(state, api.STATUS_UNKNOWN)
            data = plugin.HParamsPluginData(
                session_end_info=plugin.SessionEndInfo(status=status, end_time_secs=time.time())
            )
            described = metadata.create_summary_metadata(data)
            self._value(self._step, tag=metadata.SESSION_END_INFO_TAG, metadata=described, tensor=metadata.NULL_TENSOR)
        self._records.close()

    def _parameters(self, settings: dict[str, Any]) -> None:
        plain = {name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
                 for name, value in settings.items()}  # fmt: skip
        parameters = importlib.import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb(plain)
        self._write(time.time(), 0, summary=parameters)
        rows = "\n".join(f"| {name} | {value} |" for name, value in plain.items())
        self._text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def _text(self, tag: str, text: str, step: int) -> None:
        metadata = importlib.import_module("tensorboard.plugins.text.metadata")
        tensor = importlib.import_module("tensorboard.util.tensor_util").make_tensor_proto(text)
        self._value(step, tag=tag, metadata=metadata.create_summary_metadata(tag, ""), tensor=tensor)

    def _value(self, step: int, unix: float | None = None, **what: Any) -> None:
        summary = self._summary.Summary(value=[self._summary.Summary.Value(**what)])
        self._write(time.time() if unix is None else unix, step, summary=summary)

    def _write(self, unix: float, step: int, **what: Any) -> None:
        self._records.write(self._event.Event(wall_time=unix, step=step, **what).SerializeToString())


def _name(folder: Path) -> str:
    """A file's name, behind all others: TensorBoard reads them in the order of their names."""
    times = (path.name.removeprefix(PREFIX).split(".")[0] for path in folder.glob(f"{PREFIX}*"))
    newest = max((int(digits) for digits in times if digits.isdecimal()), default=0)
    return f"{PREFIX}{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}.{os.getpid()}"


begin = TensorBoard
