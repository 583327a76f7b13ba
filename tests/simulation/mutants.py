"""Broken rules: a line of a core that is replaced, and what finds that: a script of tests/, or a schedule's seed.

`tests/gang/mutations.list` has a block for each: its name, the text before and after, and what found it last, which is
tried first:

    the fence is longer than a lease
    - if attached and silence > lease * FENCE:
    + if attached and silence > lease * 1.3:
    ? seed 1295: runs beside generation        and what the schedule says, a regular expression

`python -m tests.simulation.mutants NAME` tries one; `--rewrite` keeps what finds those that it tries.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

TESTS = Path(__file__).parents[1]
LIST = TESTS / "gang" / "mutations.list"
CORES = ("gang", "life", "links")
FILES = ("copies/choice.py", "wire/session.py")  # of other rooms
ROOMS = (*CORES, *(file.partition("/")[0] for file in FILES))
SECONDS = 60.0  # of processor time, within which a mutant has to be caught
BUSY = 10  # times as long as that it may take on a busy machine
OLD_WORKERS = r"old worker believed alive|runs beside generation"


@dataclass(frozen=True)
class Mutant:
    """`promise` is what a schedule says, a regular expression; empty for anything."""

    name: str
    before: str
    after: str
    found_by: str  # as "script NAME", "seed NUMBER" or "test PATH::NAME"; empty if nothing did
    promise: str = ""

    @property
    def core(self) -> str:
        """The room that it is in. Raises ValueError unless its line is in the cores once."""
        rooms = [path.parent.name for path in sources() for _ in range(path.read_text().count(self.before))]
        if len(rooms) != 1:
            raise ValueError(f"{self.name}: {self.before!r} is in the cores {len(rooms)} times")
        return rooms[0]

    def __str__(self) -> str:
        promise = self.promise and f": {self.promise}"
        return f"{self.name}\n- {self.before}\n+ {self.after}\n? {self.found_by or 'nothing'}{promise}\n"


def sources() -> list[Path]:
    """The cores' files, what is decided about copies, and what ends with a worker's part in a generation."""
    app = TESTS.parent / "app" / "rolecall"
    return [*(path for room in CORES for path in sorted((app / room).glob("*.py"))), *map(app.joinpath, FILES)]


def read() -> dict[str, Mutant]:
    """All mutants, by name."""
    mutants = {}
    for block in LIST.read_text().strip().split("\n\n")[1:]:
        name, before, after, found = (line for line in block.splitlines())
        by, _, promise = found[2:].partition(": ")
        mutants[name] = Mutant(name, before[2:], after[2:], "" if by == "nothing" else by, promise)
    return mutants


# ---- in a process of its own


class Mutator(MetaPathFinder):
    """Imports the cores' modules with the line replaced."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(tuple(f"rolecall.{room}." for room in ROOMS)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin and self._mutant.before in (source := Path(spec.origin).read_text()):
            spec.loader = Mutated(name, spec.origin, source.replace(self._mutant.before, self._mutant.after))
        return spec


class Mutated(SourceFileLoader):
    """A module with another text than its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


def attempts(mutant: Mutant) -> Iterator[str]:
    """What may find it, the likeliest first."""
    if mutant.found_by:
        yield mutant.found_by
    yield from (f"script {path.stem}" for path in sorted((TESTS / mutant.core).rglob("*.txt")))
    yield from (f"seed {seed}" for seed in range(100_000))


def finds(attempt: str, promise: str) -> str:
    """What a script, or a schedule, says of it; empty if nothing is wrong."""
    kind, _, name = attempt.partition(" ")
    if kind == "test":
        with contextlib.redirect_stdout(io.StringIO()):
            return "" if pytest.main(["-q", "-p", "no:cacheprovider", name]) == 0 else f"{name} fails"
    if kind == "seed":
        from tests.simulation.simulation import Simulation
        from tests.simulation.story import Violation

        try:
            Simulation(int(name)).run()
        except Violation as violation:
            text = str(violation).strip()
            return text if re.search(OLD_WORKERS if promise == "OLD WORKERS" else promise, text) else ""
        except Exception as error:
            return "" if promise else f"seed {name}: {type(error).__name__}: {error}"
        return ""
    (path,) = TESTS.rglob(f"{name}.txt")
    module = "links.test_pool" if path.parent.name == "pool" else f"{path.parent.name}.test_scripts"
    play, text = import_module(f"tests.{module}").play, path.read_text()
    with pytest.MonkeyPatch.context() as patch:
        try:
            printed = play(text, patch) if path.parent.name == "links" else play(text)
        except Exception as error:
            return f"{path.stem} raises {type(error).__name__}: {error}"
    return "" if printed == text else f"{path.stem} prints something else"


def attempt(mutant: Mutant) -> int:
    """Prints what finds the mutant. The exit code is 1 if nothing does within its time."""
    sys.meta_path.insert(0, Mutator(mutant))
    for path in sources():
        if mutant.before in path.read_text():  # before pytest, which loads modules of a plugin's package by itself
            import_module(f"rolecall.{path.parent.name}.{path.stem}")
    end = time.process_time() + SECONDS
    for each in attempts(mutant):
        if said := finds(each, mutant.promise):
            print(f"{each}: {said}".splitlines()[0])
            return 0
        if time.process_time() > end:
            break
    return 1


# ---- all of them


def catch(mutant: Mutant) -> str:
    """What finds `mutant`, in a process of its own, and what that says; empty if nothing does in time."""
    command = [sys.executable, "-m", "tests.simulation.mutants", mutant.name]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=BUSY * SECONDS, cwd=TESTS.parent)
    except subprocess.TimeoutExpired:
        return ""
    if tried.returncode > 1 or tried.stderr:
        raise RuntimeError(f"{mutant.name}: {tried.stderr}")
    return tried.stdout.strip()


def catch_all(names: Sequence[str] = (), *, rewrite: bool = False) -> int:
    """Tries the mutants, prints those that nothing finds and a table of the cores. The exit code is 1 unless 95 of 100
    are caught."""
    mutants, found = read(), dict[str, str]()
    print(f"{len(names or mutants)} broken rules, each in a process of its own ...", flush=True)
    rows = {core: Counter[str]() for core in ROOMS}
    for mutant in mutants.values():
        if not names or mutant.name in names:
            found[mutant.name] = said = catch(mutant)
            rows[mutant.core].update(["mutants", f"by a {said.split()[0]}" if said else "not caught"])
            if not said:
                print(f"not caught: {mutant.name}", flush=True)
    caught = sum(map(bool, found.values()))
    print(f"{'mutants':15}{caught} of {len(found)} caught")
    for core, row in rows.items():
        print(f"{'':15}{core + '/':8}" + ", ".join(f"{what} {count}" for what, count in sorted(row.items())))
    if rewrite:
        head = LIST.read_text().split("\n\n")[0]
        for name, said in found.items():
            old = mutants[name]
            mutants[name] = Mutant(name, old.before, old.after, said.partition(":")[0], old.promise)
        LIST.write_text("\n".join([head + "\n", *map(str, mutants.values())]))
    return 0 if caught >= 0.95 * len(found) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", help="the one to try; without it, all")
    parser.add_argument("--rewrite", action="store_true")
    arguments = parser.parse_args()
    if arguments.name is None or arguments.rewrite:
        return catch_all([arguments.name] if arguments.name else [], rewrite=arguments.rewrite)
    return attempt(read()[arguments.name])


if __name__ == "__main__":
    sys.exit(main())
