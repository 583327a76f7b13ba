"""`rolecall export`: the model of a checkpoint as a file that needs no Rolecall, compared with the checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rolecall.checkpoint.checkpoint import Snapshot
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job
from rolecall.errors import FAILED, UsageError
from rolecall.export import agreement, card, saved
from rolecall.export.agreement import Agreement
from rolecall.export.exported import Exported
from rolecall.export.formats import FORMATS, Format
from rolecall.record import rundir


def run(words: Sequence[str]) -> int:
    """Exports what `words` name. Returns the exit code: FAILED where the file's outputs are not the checkpoint's.
    Raises UsageError, and SystemExit as argparse does.
    """
    return saved.guarded(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    first, _ = _parser(full=False).parse_known_args(words)
    job = registry.get(first.job) if first.job is not None else None
    arguments = _parser(job, first.job or "").parse_args(words)
    assert job is not None  # without JOB, the parser has ended the process
    if arguments.format not in FORMATS:
        raise UsageError(f"--format {arguments.format}: no such format ({', '.join(FORMATS)})")
    name, form = registry.name_of(arguments.job), FORMATS[arguments.format]
    if job.export is None:
        raise UsageError(f"{name} has nothing to export: give its Job export=function")
    form.require()
    output = _output(arguments.output, name, form)
    with _unfinished(output, arguments.output or output) as folder:
        settings, snapshot = saved.load(job, name, arguments.checkpoint, saved.given(job, arguments),
                                        "export it with that version")  # fmt: skip
        exported = _exported(job, name, settings, snapshot)
        path = folder / output.name
        _write(form, exported, path, card.facts(job, name, snapshot), output, name)
        compared = _compare(form, exported, path, name)
        if compared is not None and any(each.problem for each in compared):
            problems = "; ".join(str(each) for each in compared if each.problem)
            print(f"rolecall: {output.name} is not what the checkpoint is, and was deleted: {problems}",
                  file=sys.stderr, flush=True)  # fmt: skip
            return FAILED
        score, scored = _score(job, name, settings, snapshot, arguments.evaluate)
        described = card.describe(job, name, snapshot, exported, form, sorted(folder.iterdir(), key=_order(path)),
                                  output.name, compared, score, scored)  # fmt: skip
        with UsageError.wrap(f"{name}: export returns extra facts that are no JSON", TypeError, ValueError):
            text = json.dumps(described, indent=1, allow_nan=False)
        with _writing(output):
            rundir.write_atomically(folder / f"{output.name}.json", text.encode() + b"\n")
            rundir.write_atomically(folder / f"{output.name}.md", card.markdown(described).encode())
            files = _publish(sorted(folder.iterdir(), key=_order(path)), output.parent)
    _print(described, files, compared, form, arguments.json)
    return 0


def _parser(job: Job | None = None, name: str = "", full: bool = True) -> argparse.ArgumentParser:
    """With flags of `job`, which is called `name`; one that is not `full` requires nothing."""
    parser = argparse.ArgumentParser(
        prog="rolecall export", description="Writes the model of a checkpoint to a file that needs no Rolecall, with a "
        "model card beside it, and compares its outputs with the checkpoint's.", allow_abbrev=False, add_help=full,
    )  # fmt: skip
    target = f"{', '.join(registry.JOBS)}, FILE.py, or package.module[:NAME]"
    parser.add_argument("job", metavar="JOB", help=target, nargs=None if full else "?")
    parser.add_argument("--checkpoint", type=Path, required=full, help="a checkpoint, or a directory of them")
    parser.add_argument("--format", required=full, help=f"{', '.join(FORMATS)} (torch.export's program)")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the file, or its directory (JOB.onnx and so on)")
    about = "score the checkpoint for the model card, which otherwise has the run's last score"
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if job is not None:
        saved.add_flags(parser, job, name)
    return parser


def _output(path: Path | None, name: str, form: Format) -> Path:
    """The absolute path of the file to write."""
    path = (path or Path(f"{name}{form.suffix}")).absolute()
    return path / f"{name}{form.suffix}" if path.is_dir() else path


@contextlib.contextmanager
def _unfinished(output: Path, given: Path) -> Iterator[Path]:
    """A directory beside `output`, deleted at the end, for files that may still turn out wrong. Raises UsageError where
    it cannot be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as error:
        raise UsageError(f"--output {given}: cannot be written ({error.strerror})") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exported(job: Job, name: str, settings: Settings, snapshot: Snapshot) -> Exported:
    assert job.export is not None
    with saved.given_to(name, snapshot):
        exported = registry.resolve(job.export)(settings, snapshot.state)
    if not isinstance(exported, Exported):
        raise UsageError(f"{name}: export returns a {type(exported).__name__}, not a rolecall.Exported")
    if problem := exported.problem():
        raise UsageError(f"{name}: export returns what cannot be exported: {problem}")
    exported.module.eval()
    with UsageError.wrap(f"{name}: the module that export returns cannot take its own inputs"), torch.no_grad():
        agreement.answers(exported, exported.module(*exported.inputs.values()))
    return exported


def _writing(output: Path) -> contextlib.AbstractContextManager[None]:
    return UsageError.wrap(f"--output {output}: cannot be written", OSError)


def _write(form: Format, exported: Exported, path: Path, facts: Mapping[str, str], output: Path, name: str) -> None:
    problem = f"--format {form.name}: the model of {name} cannot be exported"
    advice = "give another format, or change the module"
    with UsageError.wrap(problem, advice=advice), _writing(output), torch.no_grad():
        form.write(exported, path, facts)


def _compare(form: Format, exported: Exported, path: Path, name: str) -> list[Agreement] | None:
    """How the file's outputs agree with the checkpoint's; None where nothing here runs the file."""
    with torch.no_grad():
        with UsageError.wrap(f"--format {form.name}: the file that was written cannot be loaded"):
            loaded = form.load(exported, path)
        if loaded is None:
            return None
        with UsageError.wrap(f"{name}: the outputs cannot be compared on its evaluation data"):
            return agreement.compare(exported, loaded)


def _score(
    job: Job, name: str, settings: Settings, snapshot: Snapshot, evaluate: bool
) -> tuple[Mapping[str, float], str]:
    """The checkpoint's score, and where it is from."""
    if evaluate and job.evaluate is not None:
        with saved.given_to(name, snapshot):
            result = registry.resolve(job.evaluate)(settings, snapshot.state)
        return saved.numbers(name, result), "the job's evaluate, at the export"
    return card.score_of(snapshot), "the end of the run that wrote the checkpoint"


def _publish(files: Sequence[Path], directory: Path) -> list[Path]:
    """Moves finished files to `directory`, and returns their paths there. Raises OSError."""
    mode = next(file for file in files if file.suffix == ".json").stat().st_mode  # safetensors' is readable by one only
    for file in files:
        file.chmod(mode)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    moved = [file.replace(directory / file.name) for file in files]
    rundir.sync_directory(directory)
    return moved


def _order(first: Path) -> Any:
    """The key that sorts the model's own file to the end, so that it never stands there without what belongs to it."""
    return lambda path: (path.name == first.name, path.name)


def _print(described: dict[str, Any], files: Sequence[Path], compared: Sequence[Agreement] | None, form: Format,
           as_json: bool) -> None:  # fmt: skip
    if as_json:
        shown = {each: value for each, value in described.items() if each not in ("extra", "layers", "load")}
        print(json.dumps({"path": str(files[-1]), **shown}))
        return
    print(f"wrote {', '.join(str(file) for file in reversed(files))}")
    if compared is None:
        print(f"not checked: {form.runtime} is not installed")
    else:
        print(f"equal to the checkpoint: {'; '.join(map(str, compared))}")
    if described["score"]:
        print("score: " + ", ".join(f"{what} {card.number(value)}" for what, value in described["score"].items()))
