"""Reads what sinks were given, by the libraries' own means."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curve = list[tuple[int, float]]
BLOCK, HEAD, FILE_HEAD = 32768, struct.Struct("<IHB"), struct.Struct("<4sHB")  # of LevelDB's log, which wandb writes


def tensorboard(directory: Path) -> Any:
    """The EventAccumulator of everything that a run in `directory` wrote."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    everything = module.EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return everything.Reload()


def tensorboard_curve(directory: Path, name: str) -> Curve:
    return [(event.step, event.value) for event in tensorboard(directory).Scalars(name)]


def mlflow_run(directory: Path) -> Any:
    """The run of the checkpoints in `directory`, as MLflow's client gives it, and the client."""
    client = importlib.import_module("mlflow.tracking").MlflowClient((directory / "mlflow").as_uri())
    return client.get_run(json.loads((directory / "mlflow" / "rolecall.json").read_text())["run"]), client


def mlflow_curve(directory: Path, name: str) -> Curve:
    run, client = mlflow_run(directory)
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def wandb_records(directory: Path) -> Iterator[Any]:
    """The records of all offline folders, in their order, as wandb's own messages."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        for data in _entries(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            yield record


def _entries(content: bytes) -> Iterator[bytes]:
    assert FILE_HEAD.unpack_from(content)[0] == b":W&B"
    at, parts = FILE_HEAD.size, b""
    while at + HEAD.size <= len(content):
        if BLOCK - at % BLOCK < HEAD.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(content, at)
        parts += content[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_rows(directory: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(directory):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def wandb_curve(directory: Path, name: str) -> Curve:
    return [(row["step"], row[name]) for row in wandb_rows(directory) if name in row]


CURVES = {"tensorboard": tensorboard_curve, "mlflow": mlflow_curve, "wandb": wandb_curve}
