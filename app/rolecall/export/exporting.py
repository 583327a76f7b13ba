"""`rolecall export`: the model of a checkpoint as a file that needs no Rolecall, compared with the checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rolecall import machine
from rolecall.declare import registry
from rolecall.declare.spec import Job
from rolecall.errors import FAILED, UsageError
from rolecall.export import agreement, card, saved
from rolecall.export.agreement import Agreement
from rolecall.export.exported import Exported
from rolecall.export.formats import FORMATS, Format
from rolecall.export.saved import Saved
from rolecall.record import rundir


@saved.guarded
def run(words: Sequence[str]) -> int:
    """Exports what `words` name. Returns the exit code: FAILED if the file's outputs are not the checkpoint's.
    Raises UsageError, and SystemExit as argparse does.
    """
    first, _ = parser(full=False).parse_known_args(words)
    job = registry.get(first.job) if first.job is not None else None
    arguments = parser(job, first.job or "").parse_args(words)
    assert job is not None  # without JOB, the parser has ended the process
    if arguments.format not in FORMATS:
        raise UsageError(f"--format {arguments.format}: no such format ({', '.join(FORMATS)})")
    name, form = registry.name_of(arguments.job), FORMATS[arguments.format]
    if job.export is None:
        raise UsageError(f"{name} has nothing to export: give its Job export=function")
    machine.require_packages(f"--format {form.name}", form.packages, "export")
    export = registry.resolve(job.export)
    output = _output(arguments.output, name, form)
    unwritable = f"--output {arguments.output or output}: cannot be written"
    with UsageError.wrap(unwritable, OSError):
        unchecked = tempfile.TemporaryDirectory(None, f".{output.name}.", output.parent, ignore_cleanup_errors=True)
    with unchecked as temporary:
        folder = Path(temporary)
        one = saved.load(job, name, arguments, "export it with that version")
        exported, path = _exported(one, export), folder / output.name
        with (
            UsageError.wrap(
                f"--format {form.name}: the model of {name} cannot be exported",
                advice="give another format, or change the module",
            ),
            UsageError.wrap(unwritable, OSError),
            torch.no_grad(),
        ):
            form.write(exported, path, card.facts(one))
        compared = _compare(form, exported, path, name)
        if problems := "; ".join(str(each) for each in compared or () if each.problem):
            problem = f"{output.name} is not what the checkpoint is, and was deleted: {problems}"
            print(f"rolecall: {problem}", file=sys.stderr, flush=True)
            return FAILED
        # the model's file last: it is never published without the others
        files = sorted(folder.iterdir(), key=lambda each: (each.name == path.name, each.name))
        score, scored_by = _score(one, arguments.evaluate)
        described = card.describe(
            one,
            exported,
            form,
            files=files,
            agreement=compared,
            score=score,
            scored_by=scored_by,
        )
        with UsageError.wrap(f"{name}: export returns extra facts that are no JSON", TypeError, ValueError):
            text = json.dumps(described, indent=1, allow_nan=False)
        with UsageError.wrap(unwritable, OSError):
            beside = folder / f"{output.name}.json"
            beside.write_text(text + "\n")
            files = [beside, *files]
            for file in files:
                file.chmod(beside.stat().st_mode)  # safetensors' files are readable by their owner only
                with file.open("rb") as opened:  # on disk before it takes an earlier one's place
                    os.fsync(opened.fileno())
            files = [file.replace(output.parent / file.name) for file in files]
            rundir.sync_directory(output.parent)
    if arguments.json:
        shown = {each: value for each, value in described.items() if each not in ("extra", "layers")}
        print(json.dumps({"path": str(files[-1]), **shown}))
        return 0
    print(f"wrote {', '.join(str(file) for file in reversed(files))}")
    if compared is None:
        print(f"not checked: {form.runtime} is not installed")
    else:
        print(f"equal to the checkpoint: {'; '.join(map(str, compared))}")
    if described["score"]:
        print("score: " + ", ".join(f"{what} {card.number(value)}" for what, value in described["score"].items()))
    return 0


def parser(job: Job | None = None, name: str = "", full: bool = True) -> argparse.ArgumentParser:
    """The command's arguments, with flags of `job`, which is called `name`; one that is not `full` requires nothing."""
    description = "Writes the model of a checkpoint to a file that needs no Rolecall, with a model card beside it, and "
    parser = saved.parser("rolecall export", f"{description}compares its outputs with the checkpoint's.", full)
    parser.add_argument("--format", required=full, help=f"{', '.join(FORMATS)} (torch.export's program)")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the file, or its directory (JOB.onnx and so on)")
    about = "score the checkpoint for the model card, which otherwise has the run's last score"
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help=about)
    if job is not None:
        saved.add_flags(parser, job, name)
    return parser


def _output(path: Path | None, name: str, form: Format) -> Path:
    """The absolute path of the file to write."""
    path = (path or Path(f"{name}{form.suffix}")).absolute()
    return path / f"{name}{form.suffix}" if path.is_dir() else path


def _exported(one: Saved, export: Callable[..., Any]) -> Exported:
    """The result of the job's `export` for the checkpoint. Raises UsageError if it cannot be exported."""
    name = one.name
    with one.errors():
        exported = export(one.settings, one.snapshot.state)
    if not isinstance(exported, Exported):
        raise UsageError(f"{name}: export returns a {type(exported).__name__}, not a rolecall.Exported")
    if problem := exported.problem():
        raise UsageError(f"{name}: export returns what cannot be exported: {problem}")
    exported.module.eval()
    with UsageError.wrap(f"{name}: the module that export returns cannot take its own inputs"), torch.no_grad():
        agreement.answers(exported, exported.module(*exported.inputs.values()))
    return exported


def _compare(form: Format, exported: Exported, path: Path, name: str) -> list[Agreement] | None:
    """The agreement of the file's outputs with the checkpoint's; None if its runtime is not installed."""
    with torch.no_grad():
        with UsageError.wrap(f"--format {form.name}: the file that was written cannot be loaded"):
            loaded = form.load(exported, path)
        if loaded is None:
            return None
        with UsageError.wrap(f"{name}: the outputs cannot be compared on its evaluation data"):
            return agreement.compare(exported, loaded)


def _score(one: Saved, evaluate: bool) -> tuple[Mapping[str, float], str]:
    """The checkpoint's score, and its source."""
    if evaluate and one.job.evaluate is not None:
        with one.errors():
            result = registry.resolve(one.job.evaluate)(one.settings, one.snapshot.state)
        return one.numbers(result), "the job's evaluate, at the export"
    return card.score_of(one.snapshot), "the end of the run that wrote the checkpoint"
