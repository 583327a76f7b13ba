"""`rolecall new NAME`: a job to start from, with its test and its deployment."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template

from rolecall.declare import registry
from rolecall.errors import UsageError

TEMPLATES = resources.files("rolecall") / "template"


def write(name: str, parent: Path) -> list[Path]:
    """Writes the folder `name` in `parent`: the job, its test, compose.yaml and a kustomization. Returns the files.

    Raises UsageError for a name that no module can have, a folder that is there already, or a disk that takes nothing.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r}: a job's name consists of small letters, digits and _, and begins with a letter")
    if name in sys.stdlib_module_names or name in registry.JOBS:
        raise UsageError(f"{name!r}: there is a module or a job of that name; choose another")
    folder = parent / name
    if folder.exists():
        raise UsageError(f"{folder}: exists already; choose another name, or another directory")
    words = {"name": name, "Name": name.title().replace("_", ""), "dashed": name.replace("_", "-").rstrip("-")}
    with UsageError.wrap(f"{folder}: cannot be written", OSError, advice="choose another directory"):
        folder.mkdir()
        for source in sorted(TEMPLATES.iterdir(), key=lambda each: each.name):
            target = folder / source.name.removesuffix(".txt").replace("job", name)
            target.write_text(Template(source.read_text()).substitute(words))
    return sorted(folder.iterdir())
