"""The architecture of app/rolecall, read from its syntax trees: every import counts, lazy ones in functions and those
under TYPE_CHECKING too. Each rule is also held against a source tree that breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rolecall
from tools.tables import ROOMS

ROOT = Path(__file__).resolve().parents[2]
# the public API is imported by jobs, and by no room below it
ROOT_IMPORTS = {"errors", "fields", "config", "telemetry", "declare", "checkpoint", "context", "torch_rpc", "wire"}
ROOT_IMPORTS |= {"export", "launch"}
PURE = {"__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math"}
PURE |= {"msgspec", "operator", "signal", "typing"}
# what a core may import of this project: its own room, and what declares values
CORES = {"gang": {"errors"}, "life": {"errors", "gang", "declare.task", "messages", "record"}, "links": {"errors"}}
CORES["copies.choice"] = set()  # a file of a room
PUBLIC = set(rolecall.__all__)
SUPPORT = "rolecall.jobs.support"  # shared by the jobs; the only one of them that imports more than the public API
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MEANINGLESS = {"found", "own", "made"}
MAX_FILE_LINES = 600
MAX_POSITIONAL_ARGUMENTS = 5


@dataclass(frozen=True)
class Import:
    """`module` is what is imported: a file of the package where there is one, else what the statement names."""

    importer: str
    line: int
    module: str
    name: str = ""  # of what is imported from the module

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}{f' ({self.name})' if self.name else ''}"


class Source:
    """The files of the package `rolecall` in a folder, by module name."""

    def __init__(self, folder: Path) -> None:
        self.texts = {module_name(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
        self.packages = {module_name(path.relative_to(folder)) for path in folder.rglob("__init__.py")}
        # what each tree has, which is walked once
        self.nodes = {name: [*ast.walk(ast.parse(text))] for name, text in self.texts.items()}

    @cached_property
    def imports(self) -> list[Import]:
        return [one for name, nodes in self.nodes.items() for node in nodes for one in self._of(name, node)]

    def _of(self, importer: str, node: ast.AST) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = importer.split(".")
                package = parts[: len(parts) - node.level + (importer in self.packages)]
                module = ".".join([*package, *([module] if module else [])])
            for alias in node.names:
                file = f"{module}.{alias.name}"
                yield Import(importer, node.lineno, *((file,) if file in self.texts else (module, alias.name)))

    def inside(self) -> list[Import]:
        """The imports of other files of the package."""
        return [one for one in self.imports if one.module in self.texts and one.module != one.importer]


@cache
def the_source() -> Source:
    return Source(ROOT / "app")


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """`job` for rolecall.context.context, and the empty string for the root package."""
    return (module.split(".") + [""])[1]


# ---- the rules: each returns what breaks it


def circles(source: Source) -> list[str]:
    graph: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(source.texts, ()))
    for one in source.inside():
        graph.add(one.importer, one.module)
    try:
        graph.prepare()
    except CycleError as error:
        return [" > ".join(reversed(error.args[1]))]
    return []


def upward_imports(source: Source) -> list[str]:
    problems = [f"{name}: no room is called {room(name)}" for name in source.texts if room(name) not in ROOMS]
    for one in source.inside():
        importer, imported = room(one.importer), room(one.module)
        if importer not in ROOMS or imported not in ROOMS:
            continue
        allowed = ROOMS.index(imported) <= ROOMS.index(importer)
        if importer == "":
            allowed = imported in ROOT_IMPORTS
        if imported == "jobs" and importer != "jobs":
            allowed = False  # a job is found by its name
        if not allowed:
            problems.append(str(one))
    return problems


def impure_imports(source: Source) -> list[str]:
    """Cores have no time, threads or I/O."""
    problems = []
    for one in source.imports:
        core, module = room(one.importer), one.module.removeprefix("rolecall.")
        core = core if core in CORES else one.importer.removeprefix("rolecall.")
        if core not in CORES or one.module.split(".")[0] in PURE:
            continue
        if not {room(one.module), module} & {core, *CORES[core]} or module == one.module:
            problems.append(str(one))
    return problems


def private_imports_of_jobs(source: Source) -> list[str]:
    problems = []
    for one in source.imports:
        if room(one.importer) != "jobs" or one.module.split(".")[0] != "rolecall":
            continue
        itself = ".".join(one.importer.split(".")[:3])
        public = one.module == "rolecall" and one.name in PUBLIC
        support = SUPPORT in (one.importer, one.module)
        if not public and not support and not f"{one.module}.".startswith(f"{itself}."):
            problems.append(str(one))
    return problems


def readers_of_the_environment(source: Source) -> list[str]:
    problems = []
    for name, nodes in source.nodes.items():
        if name == "rolecall.config":
            continue
        modules = {"os"} | {
            alias.asname
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "os" and alias.asname
        }
        problems += [
            f"{name}:{node.lineno} reads {node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute)
            and node.attr in ENVIRONMENT
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ]
    return problems + [
        str(one)
        for one in source.imports
        if one.module == "os" and one.name in ENVIRONMENT and one.importer != "rolecall.config"
    ]


def long_files(source: Source) -> list[str]:
    lengths = {name: len(text.splitlines()) for name, text in source.texts.items()}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FILE_LINES]


def unlisted_parts(source: Source) -> list[str]:
    """Each room's docstring names its files and folders; those of a job are described by its page."""
    problems = []
    for package in source.packages:
        listing = ast.get_docstring(ast.parse(source.texts[package])) or ""
        if package == "rolecall" or package.startswith("rolecall.jobs."):
            continue
        parts = [name for name in source.texts if name.rpartition(".")[0] == package]
        problems += [f"{package}: does not list {name}" for name in parts if f"{name.split('.')[-1]}" not in listing]
    return problems


def long_calls(source: Source) -> list[str]:
    """Calls with many arguments by place, in which a reader cannot tell them apart."""
    return [
        f"{name}:{node.lineno}: {len(node.args)} arguments by place"
        for name, nodes in source.nodes.items()
        for node in nodes
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL_ARGUMENTS
    ]


def meaningless_names(source: Source) -> list[str]:
    """Names that are bound, as variables, parameters, attributes, keywords, functions, imports or captures."""
    problems = []
    for name, nodes in source.nodes.items():
        for node in nodes:
            for key in ("id", "arg", "attr", "name", "asname", "rest"):
                if getattr(node, key, None) in MEANINGLESS:
                    problems.append(f"{name}:{getattr(node, 'lineno', 0)} {getattr(node, key)}")
    return problems


RULES: tuple[Callable[[Source], list[str]], ...] = (
    circles,
    upward_imports,
    impure_imports,
    private_imports_of_jobs,
    readers_of_the_environment,
    long_files,
    unlisted_parts,
    long_calls,
    meaningless_names,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Callable[[Source], list[str]]) -> None:
    assert rule(the_source()) == []


# ---- the rules see what breaks them


GOOD = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rolecall.declare.spec import Job\n",
    "gang/__init__.py": '"""Parts: gang, roster."""\n',
    "declare/__init__.py": '"""Parts: spec."""\n',
    "jobs/__init__.py": '"""Parts: rl."""\n',
    "rank/__init__.py": '"""Parts: worker, other."""\n',
    "gang/gang.py": "from dataclasses import dataclass\nfrom rolecall.gang import roster\n",
    "gang/roster.py": "from collections.abc import Iterable\n",
    "config.py": "import os\nHOME = os.environ['HOME']\n",
    "declare/spec.py": "from rolecall import config\nimport torch\n",
    "jobs/rl/agent.py": "from rolecall import Job\nfrom rolecall.jobs.rl import model\nfrom . import model\n",
    "jobs/rl/model.py": "import torch\n",
    "rank/worker.py": "from rolecall.declare.spec import Job\ndef run():\n    from rolecall.gang import gang\n",
}
BAD: tuple[tuple[Callable[[Source], list[str]], str, str], ...] = (
    (circles, "gang/roster.py", "def lazy():\n    from rolecall.gang.gang import Gang\n"),
    (circles, "config.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rolecall.declare.spec\n"),
    (circles, "jobs/rl/model.py", "from .agent import run\n"),
    (upward_imports, "config.py", "from rolecall import telemetry\n"),
    (upward_imports, "context/other.py", "def run():\n    from rolecall.rank import worker\n"),
    (upward_imports, "context/other.py", "from rolecall import Job\n"),
    (upward_imports, "__init__.py", "import rolecall.rank.worker\n"),
    (upward_imports, "rank/other.py", "from rolecall.jobs.rl import agent\n"),
    (upward_imports, "cellar/wine.py", ""),
    (impure_imports, "gang/roster.py", "import time\n"),
    (impure_imports, "gang/roster.py", "def log():\n    import logging\n"),
    (impure_imports, "gang/roster.py", "from rolecall import config\n"),
    (impure_imports, "gang/roster.py", "from os import path\n"),
    (private_imports_of_jobs, "jobs/rl/other.py", "from rolecall.declare.spec import Job\n"),
    (private_imports_of_jobs, "jobs/rl/other.py", "from rolecall import config\n"),
    (private_imports_of_jobs, "jobs/rl/other.py", "from rolecall import no_such_name\n"),
    (private_imports_of_jobs, "jobs/ps/lead.py", "from rolecall.jobs.rl import model\n"),
    (upward_imports, "jobs/support.py", "from rolecall.rank import worker\n"),
    (private_imports_of_jobs, "jobs/ps/lead.py", "from ..rl import model\n"),
    (readers_of_the_environment, "rank/other.py", "import os\nHOME = os.environ['HOME']\n"),
    (readers_of_the_environment, "rank/other.py", "import os as system\nHOME = system.getenv('HOME')\n"),
    (readers_of_the_environment, "rank/other.py", "from os import environ\n"),
    (long_files, "rank/other.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (unlisted_parts, "gang/__init__.py", '"""Parts: gang."""\n'),
    (long_calls, "rank/other.py", "run(1, 2, 3, 4, 5, 6)\n"),
    (meaningless_names, "rank/other.py", "found = 1\n"),
    (meaningless_names, "rank/other.py", "def run(own): ...\n"),
    (meaningless_names, "rank/other.py", "def run(self):\n    self.made = 1\n"),
    (meaningless_names, "rank/other.py", "run(own=1)\n"),
    (meaningless_names, "rank/other.py", "match 1:\n    case found:\n        pass\n"),
)


def write(folder: Path, files: dict[str, str]) -> Source:
    for name, text in files.items():
        path = folder / "rolecall" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return Source(folder)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_allows_what_is_right(rule: Callable[[Source], list[str]], tmp_path: Path) -> None:
    assert rule(write(tmp_path, {**GOOD, "rank/other.py": "x = 1\n" * MAX_FILE_LINES})) == []


@pytest.mark.parametrize(("rule", "file", "text"), BAD)
def test_a_rule_sees_what_breaks_it(rule: Callable[[Source], list[str]], file: str, text: str, tmp_path: Path) -> None:
    problem, *_ = rule(write(tmp_path, {**GOOD, file: text}))
    assert f"rolecall.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") in problem
