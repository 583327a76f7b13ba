"""The model card: what an exported model is, beside its file, as JSON and as Markdown."""

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
from rolecall.declare.spec import Job
from rolecall.export import formats
from rolecall.export.agreement import Agreement, answers
from rolecall.export.exported import Exported
from rolecall.export.formats import Format
from rolecall.record import rundir

CHUNK = 1 << 24  # bytes that are hashed at once
MOST = 2000  # characters of the module's layers in the Markdown


def facts(job: Job, name: str, snapshot: Snapshot) -> dict[str, str]:
    """What is written into the model's file itself: the job, the layout of its state, and the settings as JSON."""
    return {
        "job": name,
        "layout": str(job.layout),
        "step": str(snapshot.step),
        "settings": json.dumps(settings_of(job, snapshot)),
        "rolecall": __version__,
    }


def settings_of(job: Job, snapshot: Snapshot) -> dict[str, Any]:
    """The job's settings that the checkpoint was trained with, by variable: all of them where the run's summary is
    beside it, otherwise those that it depends on. Without secrets, those of single ranks, and those of all jobs.
    """
    declared = job.settings.model_fields
    of_job = {name.upper() for name, field in declared.items()
              if name not in Settings.model_fields and fields.agrees(field, default=True)}  # fmt: skip
    run = summary_of(snapshot, "settings")
    settings = {name: value for name, value in run.items() if name in of_job}
    settings |= {name.upper(): value for name, value in snapshot.pinned.items() if name in job.pinned}
    secret = {name.upper() for name, field in declared.items() if fields.is_secret(field)}
    return {name: value for name, value in sorted(settings.items()) if name not in secret}


def summary_of(snapshot: Snapshot, part: str) -> dict[str, Any]:
    """A part of the summary of the run that wrote the checkpoint; empty where there is none that can be read."""
    try:
        values = (rundir.read_summary(snapshot.path.parent) or {}).get(part)
    except OSError:
        return {}
    return values if isinstance(values, dict) else {}


def score_of(snapshot: Snapshot) -> dict[str, float]:
    """The last score of the run that wrote the checkpoint, by its label; empty where there is none."""
    curve = summary_of(snapshot, "curve")
    final = curve.get("final")
    return {fields.shown(curve.get("label", "score")): float(final)} if isinstance(final, int | float) else {}


def describe(
    job: Job, name: str, snapshot: Snapshot, exported: Exported, form: Format, files: Sequence[Path], file: str,
    agreement: Sequence[Agreement] | None, score: Mapping[str, float], scored: str,
) -> dict[str, Any]:  # fmt: skip
    """The card as JSON's types. `files` are those of the model, of which one is called `file`; `agreement` is
    None where the file could not be run; `scored` says where the `score` comes from.
    """
    with torch.no_grad():
        results = answers(exported, exported.module(*exported.inputs.values()))
    return {
        "model": file,
        "job": name,
        "summary": job.summary,
        "format": form.name,
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)} for path in files},
        "parameters": sum(parameter.numel() for parameter in exported.module.parameters()),
        "layers": str(exported.module),
        "inputs": [_described(exported, each, value) for each, value in exported.inputs.items()],
        "outputs": [
            {"name": each, "dtype": _dtype(value), "shape": list(value.shape)}
            for each, value in zip(exported.outputs, results, strict=True)
        ],
        "load": form.usage(exported, file),
        "score": {each: value if math.isfinite(value) else None for each, value in score.items()},
        "scored_by": scored,
        "checked_by": f"{form.runtime}" if agreement is not None else None,
        "agreement": [] if agreement is None else [dataclasses.asdict(each) for each in agreement],
        "checkpoint": {
            "file": snapshot.path.name,
            "generation": snapshot.generation,
            "step": snapshot.step,
            "done": snapshot.about.get("done"),
            "unit": job.unit,
            "training_seconds": round(float(snapshot.about.get("seconds", 0.0)), 3),
            "layout": job.layout,
        },
        "settings": settings_of(job, snapshot),
        "licence_of_the_data": exported.licence or None,
        "versions": {"rolecall": __version__, "python": platform.python_version(), **formats.versions(form)},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "extra": dict(exported.extra),
    }


def markdown(card: Mapping[str, Any]) -> str:
    """The card for people."""
    checkpoint, agreement = card["checkpoint"], card["agreement"]
    work = "" if checkpoint["done"] is None else f", {checkpoint['done']:g} {checkpoint['unit']}"
    rows = [(kind, each["name"], each["dtype"], "[" + ", ".join(map(str, each["shape"])) + "]")
            for kind in ("input", "output") for each in card[f"{kind}s"]]  # fmt: skip
    if agreement:
        checked = [(each["output"], f"{each['max_absolute']:.2g}", f"{each['max_relative']:.2g}", each["differ"],
                    each["values"]) for each in agreement]  # fmt: skip
        compared = _table(("output", "largest difference", "relative", "values that differ", "values"), checked)
        compared = f"Compared on the evaluation data, run by {card['checked_by']}:\n\n{compared}"
    else:
        compared = "Not compared: the format's runtime was not installed."
    layers = card["layers"] if len(card["layers"]) <= MOST else f"{card['layers'][:MOST]}\n..."
    score = _table(("score", "value"), [(each, number(value)) for each, value in card["score"].items()])
    hashes = [(f"`{each}`", f"{file['bytes']:,}", f"`{file['sha256']}`") for each, file in card["files"].items()]
    parts = [
        f"# {card['model']}\n\nThe model of the job `{card['job']}`{': ' * bool(card['summary'])}{card['summary']}.",
        f"{card['format']}, {card['parameters']:,} parameters, written by Rolecall {card['versions']['rolecall']}.",
        f"## Load it\n\n```python\n{card['load']}```",
        _table(("", "name", "type", "shape"), rows),
        "The outputs' shapes are those for the inputs above.",
        f"## Score\n\n{score}\n\nBy {card['scored_by']}." if card["score"] else "## Score\n\nNone.",
        f"## Equal to the checkpoint\n\n{compared}",
        f"## Training\n\nCheckpoint `{checkpoint['file']}`: step {checkpoint['step']}{work}, "
        f"{checkpoint['training_seconds']:g} s.",
        _table(("setting", "value"), [(f"`{each}`", value) for each, value in card["settings"].items()]),
        f"Licence of the data: {card['licence_of_the_data'] or 'not stated by the job'}.",
        "## Files",
        _table(("file", "bytes", "SHA-256"), hashes),
        _table(("package", "version"), list(card["versions"].items())),
        f"## Layers\n\n```\n{layers}\n```",
    ]
    if card["extra"]:
        parts.insert(5, f"The JSON file beside this one has under `extra`: {', '.join(card['extra'])}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _described(exported: Exported, name: str, value: Tensor) -> dict[str, Any]:
    axes = exported.dynamic.get(name, {})
    shape = [axes.get(axis, size) for axis, size in enumerate(value.shape)]
    return {"name": name, "dtype": _dtype(value), "shape": shape}


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def number(value: float | None) -> str:
    """A score in a few digits."""
    return "not finite" if value is None else f"{value:.6g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    """A value in a table, from a checkpoint perhaps: in one line, without HTML."""
    return fields.shown(value, most=MOST).replace("|", "\\|").replace("<", "&lt;")
