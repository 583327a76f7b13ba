"""Runs the tests that depend on torch and on Python with pairs of their versions: `make test-versions`.

Each pair has an environment of its own in build/versions/, with the other packages as constraints.txt pins them.
`make test-versions TORCH=2.14.1` runs the pairs with that torch, `PYTHON_VERSION=3.13` those with that Python.
`TORCH=nightly` takes the next torch from TORCH_INDEX; a release is sought there and in pip's default index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
NIGHTLY = "nightly"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL_SECONDS = 3600.0  # gigabytes, where pip finds only builds for CUDA
TEST_SECONDS = 3600.0
INSTALLED = """
from importlib.metadata import version
import platform
print("torch", version("torch"), "Python", platform.python_version(), flush=True)
"""
TESTS = (
    "tests/test_tiny.py",
    "tests/contracts/test_torch.py",
    "tests/torch_rpc",
    # what depends on Python: forked processes, sockets, types
    "tests/declare",
    "tests/wire",
    "tests/context",
    "tests/rank",
    # what depends on torch's formats
    "tests/checkpoint",
    "tests/export",
    # each job's shortest training, and unmodified programs
    "tests/integration/test_job.py::test_run_solves_a_quick_task",
    "tests/integration/test_ps.py::test_each_mode_learns_and_its_checkpoint_evaluates_to_what_was_logged",
    "tests/integration/test_rnn.py::test_split_training_equals_one_process_and_eval_gives_the_reported_perplexity",
    "tests/integration/test_hybrid.py::test_it_trains_as_one_process_does",
    "tests/integration/test_script.py",
)


@dataclass(frozen=True)
class Pair:
    """A version of torch, and of Python. `torch` is a release, or nightly."""

    torch: str
    python: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"torch-{self.torch}-python-{self.python}"

    def pip_arguments(self, index: str) -> list[str]:
        """What pip installs, perhaps from `index`."""
        if self.torch == NIGHTLY:
            if not index:
                problem = "needs TORCH_INDEX=ADDRESS, a package index with torch's nightly builds"
                raise CannotRunError(f"TORCH={NIGHTLY}: {problem}")
            return ["--pre", "--upgrade", "torch", "--index-url", index]
        return [f"torch=={self.torch}", *(["--extra-index-url", index] if index else [])]


# The oldest with the oldest, the newest with the newest, and each version in between once. There is a Python more than
# versions of torch, so the newest torch, which pip installs, has two.
PAIRS = (Pair("2.13.0", "3.11"), Pair("2.14.1", "3.12"), Pair("2.15.0", "3.13"), Pair("2.15.0", "3.14"))


@dataclass(frozen=True)
class Outcome:
    """What came of a pair: `said` is the last line of the tests, or why they did not run."""

    pair: Pair
    passed: bool
    said: str
    seconds: float


class CannotRunError(Exception):
    """A pair cannot be tested here; the text says why, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="only this version of torch, or nightly")
    parser.add_argument("--python", help=f"only this version of Python, such as {HERE}")
    parser.add_argument("--only", nargs="+", default=TESTS, help="these tests instead")
    parser.add_argument("--index", default="", help="a package index with builds of torch, such as those for CPUs")
    parser.add_argument("--pip-args", default="", help="pip's options")
    arguments = parser.parse_args()
    outcomes = []
    for pair in chosen(arguments.torch, arguments.python):
        print(f"torch {pair.torch}, Python {pair.python}: in {pair.folder.relative_to(ROOT)}", flush=True)
        began = time.monotonic()
        try:
            python = prepare(pair, arguments.index, arguments.pip_args.split())
            run([python, "-c", INSTALLED])
            passed, said = test(python, arguments.only)
        except CannotRunError as error:
            passed, said = False, str(error)
        outcomes.append(Outcome(pair, passed, said, time.monotonic() - began))
    show(outcomes)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def chosen(torch: str | None, python: str | None) -> list[Pair]:
    """The pairs of these versions: those of PAIRS, or one of its own."""
    pairs = [pair for pair in PAIRS if torch in (None, pair.torch) and python in (None, pair.python)]
    return pairs or [Pair(torch or PAIRS[-1].torch, python or HERE)]


def interpreter(version: str) -> Path:
    """The Python of this version: on the path, or of pyenv, whose command fails for a version that is not chosen."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in (shutil.which(name), *sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))):
        if path and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
            return Path(path)
    raise CannotRunError(f"there is no {name}: install it, so that it is on the path")


def prepare(pair: Pair, index: str, pip_args: list[str]) -> Path:
    """The Python of the pair's environment, which is made unless it is there."""
    python = pair.folder / "bin" / "python"
    ready = pair.folder / ".ready"
    if ready.exists() and pair.torch != NIGHTLY:  # which is another one each day
        return python
    wanted = pair.pip_arguments(index)
    shutil.rmtree(pair.folder, ignore_errors=True)
    run([interpreter(pair.python), "-m", "venv", pair.folder])
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *pip_args]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [one for one in project["dependencies"] + extras["jobs"] + extras["dev"] if not of_torch(one)]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = pair.folder / "constraints.txt"
    pinned.write_text("\n".join(line for line in constraints if not of_torch(line)))
    run([*pip, *wanted])
    run([*pip, "--constraint", pinned, *required])
    # without what it asks for: a nightly build is outside of the range of torch
    run([*pip, "--no-deps", "--editable", ROOT])
    ready.touch()
    return python


def of_torch(requirement: str) -> bool:
    return requirement.startswith(("torch=", "torch>"))


def run(command: list[str | Path]) -> None:
    """Runs a command of the preparation."""
    try:
        done = subprocess.run(command, check=False, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotRunError(f"{' '.join(map(str, command))} took longer than {INSTALL_SECONDS:.0f} s") from None
    if done.returncode:
        raise CannotRunError(f"{' '.join(map(str, command))} failed with exit code {done.returncode}; see above")


def test(python: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests passed, and their last line."""
    command = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", *tests]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    late = threading.Timer(TEST_SECONDS, process.kill)
    late.start()
    last = "no test has run"
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
        passed = process.wait(TEST_SECONDS) == 0
    finally:
        late.cancel()
        process.kill()
    if time.monotonic() - began >= TEST_SECONDS:
        return False, f"took longer than {TEST_SECONDS:.0f} s"
    return passed, last


def show(outcomes: list[Outcome]) -> None:
    table = Table("torch", "Python", "result", "seconds")
    for one in outcomes:
        color = "green" if one.passed else "red"
        table.add_row(one.pair.torch, one.pair.python, Text(one.said, color), f"{one.seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
