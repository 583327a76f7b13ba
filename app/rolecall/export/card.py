"""The model card, which describes an exported model as JSON beside its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolecall import fields
from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.config import Settings, __version__
from rolecall.export import formats
from rolecall.export.agreement import Agreement, answers
from rolecall.export.exported import Exported
from rolecall.export.formats import Format
from rolecall.export.saved import Saved
from rolecall.record import rundir


def facts(one: Saved) -> dict[str, str]:
    """The facts in the model's file: the job, the layout of its state, the step, and the settings as JSON."""
    return {
        "job": one.name,
        "layout": str(one.job.layout),
        "step": str(one.snapshot.step),
        "settings": json.dumps(settings_of(one)),
        "rolecall": __version__,
    }


def settings_of(one: Saved) -> dict[str, Any]:
    """The job's settings that the checkpoint was trained with, by variable: all of them if the run's summary is beside
    it, otherwise those that it depends on. Secrets, settings of single ranks and those of all jobs are left out.
    """
    settings = {name.lower(): value for name, value in summary_of(one.snapshot, "settings").items()}
    pinned = {name: value for name, value in one.snapshot.pinned.items() if name in one.job.pinned}
    shown = {
        name
        for name, field in one.job.settings.model_fields.items()
        if name in pinned or (name not in Settings.model_fields and fields.agrees(field, default=True))
        if not fields.is_secret(field)
    }
    return dict(sorted((name.upper(), value) for name, value in {**settings, **pinned}.items() if name in shown))


def summary_of(snapshot: Snapshot, part: str) -> dict[str, Any]:
    """A part of the summary of the run that wrote the checkpoint; empty if it cannot be read."""
    try:
        values = (rundir.read_summary(snapshot.path.parent) or {}).get(part)
    except OSError:
        return {}
    return values if isinstance(values, dict) else {}


def score_of(snapshot: Snapshot) -> dict[str, float]:
    """The last score of the run that wrote the checkpoint, by its label; empty if it is unknown."""
    curve = summary_of(snapshot, "curve")
    final = curve.get("final")
    return {fields.shown(curve.get("label", "score")): float(final)} if isinstance(final, int | float) else {}


def describe(
    one: Saved,
    exported: Exported,
    form: Format,
    *,
    files: Sequence[Path],
    agreement: Sequence[Agreement] | None,
    score: Mapping[str, float],
    scored_by: str,
) -> dict[str, Any]:
    """The card. `files` are those of the model, the one to load at last; `agreement` is None if it could not be run;
    `scored_by` is the source of the `score`.
    """
    snapshot = one.snapshot
    with torch.no_grad():
        results = answers(exported, exported.module(*exported.inputs.values()))
    return {
        "model": files[-1].name,
        "job": one.name,
        "summary": one.job.summary,
        "format": form.name,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files},
        "parameters": sum(parameter.numel() for parameter in exported.module.parameters()),
        "layers": str(exported.module),
        "inputs": [_described(exported, each, value) for each, value in exported.inputs.items()],
        "outputs": [
            {"name": each, "dtype": _dtype(value), "shape": list(value.shape)}
            for each, value in zip(exported.outputs, results, strict=True)
        ],
        "score": {each: value if math.isfinite(value) else None for each, value in score.items()},
        "scored_by": scored_by,
        "checked_by": form.runtime if agreement is not None else None,
        "agreement": [] if agreement is None else [dataclasses.asdict(each) for each in agreement],
        "checkpoint": {
            "file": snapshot.path.name,
            "generation": snapshot.generation,
            "step": snapshot.step,
            "done": snapshot.about.get("done"),
            "unit": one.job.unit,
            "training_seconds": round(float(snapshot.about.get("seconds", 0.0)), 3),
            "layout": one.job.layout,
        },
        "settings": settings_of(one),
        "licence_of_the_data": exported.licence or None,
        "versions": {"rolecall": __version__, "python": platform.python_version(), **formats.versions(form)},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "extra": dict(exported.extra),
    }


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _described(exported: Exported, name: str, value: Tensor) -> dict[str, Any]:
    axes = exported.dynamic.get(name, {})
    shape = [axes.get(axis, size) for axis, size in enumerate(value.shape)]
    return {"name": name, "dtype": _dtype(value), "shape": shape}


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def number(value: float | None) -> str:
    """A score in a few digits."""
    return "not finite" if value is None else f"{value:.6g}"
