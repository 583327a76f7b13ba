"""A job's source is taken once: a process that imports it later gets the same, whatever is on disk by then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall import config
from rolecall.declare import registry, sources
from rolecall.errors import UsageError

FILE = """import beside, folder.inside
def late():
    import later
    return later.VALUE
def fails():
    raise ValueError(beside.VALUE)  # the old line
"""
IMPORTS = """
import json, pickle, sys, traceback
from rolecall.declare import loader, sources
module = loader.load(sys.argv[1])
try:
    module.fails()
except ValueError:
    trace = traceback.format_exc()
print(json.dumps({
    "late": module.late(), "inside": module.folder.inside.VALUE, "trace": trace, "file": module.__file__,
    "name": pickle.loads(pickle.dumps(module.late)).__module__, "changed": sources.changed(),
    "named": sources.changed("notes:VALUE"),
    "bytes": len(sources.content(module.__file__ and __import__("pathlib").Path(module.__file__))),
}))
"""


def write(folder: Path, value: str) -> Path:
    package = folder / "folder"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    for module in (*(folder / f"{name}.py" for name in ("beside", "later", "notes")), package / "inside.py"):
        module.write_text(f"VALUE = {value}\n")
    (folder / "program.py").write_text(FILE)
    return folder / "program.py"


@pytest.mark.parametrize("target", ["program.py", "program"])
def test_all_processes_of_a_job_import_the_source_that_was_taken(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "'old'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    taken = sources.take(file)
    with sources.passed_on(taken):
        write(tmp_path, "'new' +")  # no Python at all
        file.write_text("and nothing\n" * 100)
        (tmp_path / "later.py").unlink()
        program = f"import sys; sys.path.append({str(tmp_path)!r})\n{IMPORTS}"
        output = subprocess.check_output([sys.executable, "-P", "-c", program, target], cwd=tmp_path, timeout=60)
    got = json.loads(output)
    assert (got["late"], got["inside"], got["name"], got["file"]) == ("old", "old", "program", str(file))
    assert "raise ValueError(beside.VALUE)  # the old line" in got["trace"]
    assert {Path(path).name for path in got["changed"]} == {"program.py", "beside.py", "later.py", "inside.py"}
    assert {*got["named"]} - {*got["changed"]} == {str(tmp_path / "notes.py")}  # which no module imports
    assert got["bytes"] == len(FILE)
    assert not config.exported(config.SOURCES)


def test_what_is_taken_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "1")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    names = {"program.py", "beside.py", "later.py", "notes.py", "folder/__init__.py", "folder/inside.py"}
    assert {str(Path(path).relative_to(tmp_path)) for path in registry.sources_of(str(file))} == names
    assert {Path(path).name for path in registry.sources_of("folder.inside:JOB")} == {"__init__.py", "inside.py"}
    assert registry.sources_of("rl") == registry.sources_of("json.decoder") == registry.sources_of("no.such") == {}
    with pytest.raises(UsageError, match="no such file"):
        registry.sources_of("no_such.py")
