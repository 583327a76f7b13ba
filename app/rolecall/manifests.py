"""`rolecall manifests JOB`: the kustomizations of a built-in job, for Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from rolecall.declare import registry
from rolecall.errors import UsageError

SOURCE = resources.files("rolecall") / "k8s"
OWN = "job"  # a job file of the user's own
JOBS = (*registry.JOBS, OWN)
FOLDERS = {"ps": "ps-trainers"}  # where it is not the job's name
SHARED = ("base", "components", "lost-pods")
KINDS = ("", "-cuda", "-job", "-indexed")  # StatefulSets, those with GPUs, a JobSet, Indexed Jobs
SUFFIXES = (".yaml", ".env", ".json")


def write(job: str, target: Path) -> tuple[Path, list[Path]]:
    """Writes the kustomizations of `job` and what they share to `target`. Returns the folder to apply, and the files.

    Files that are there already with the same text stay. Raises UsageError for an unknown job, for a file that is there
    with another text, before anything is written, and for a disk that takes nothing.
    """
    if job not in JOBS:
        raise UsageError(f"JOB={job!r}: has no manifests ({', '.join(JOBS)}); `rolecall new` writes those of a new job")
    if not SOURCE.is_dir():  # the image has none
        raise UsageError(
            "this installation has no manifests; install the package `rolecall` with pip, and call it there"
        )
    folder = FOLDERS.get(job, job)
    texts: dict[Path, str] = {}
    for name in (*SHARED, *(folder + kind for kind in KINDS)):
        if (SOURCE / name).is_dir():
            texts |= {target / path: text for path, text in _files(SOURCE / name, PurePosixPath(name))}
    with UsageError.wrap(f"{target}: cannot be written", OSError, advice="choose another directory"):
        for path, text in texts.items():
            if path.exists() and path.read_text() != text:
                raise UsageError(f"{path}: exists already and differs; give --output another directory")
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return target / folder, sorted(texts)


def _files(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    """The files below `folder` with their texts, by their paths below `path`."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from _files(item, path / item.name)
        elif item.name.endswith(SUFFIXES):
            yield path / item.name, item.read_text(encoding="utf-8")
