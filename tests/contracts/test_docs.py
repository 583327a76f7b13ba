"""The documentation against the code: nothing documented is missing, nothing there is undocumented."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall import placement, telemetry
from rolecall.__main__ import COMMANDS, argument_parser
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.flags import RunOptions
from rolecall.torch_rpc import adopt
from tests.contracts.test_architecture import the_source
from tools import snippets, tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
GENERATED = {**tables.generate(), **snippets.generate()}
VARIABLES = {name.upper() for job in registry.JOBS for name in registry.get(job).settings.model_fields}
METRICS = {row[0] for job in registry.JOBS for row in telemetry.catalogue(registry.get(job).metrics)}
# environment variables and constants in the pages that are not settings of a rank
FILES_OF_COMPOSE = (ROOT / "compose.yaml", ROOT / "docker" / "compose.cuda.yaml")
OTHERS = (
    {"BENCH_JSON", "PIP_ARGS"}
    | {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"}
    | {"MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR", "WANDB_API_KEY"}
    | set(adopt.variables(Settings(), 0, 1, 1))
    | placement.SRUN
    | {name for file in FILES_OF_COMPOSE for name in re.findall(r"\$\{([A-Z_]+):-", file.read_text())}
    | set(re.findall(r"\bgiven-([A-Z_]+)", (ROOT / "Makefile").read_text()))
)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_pages_are_those_of_the_code(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "run `make docs`"


def test_a_snippet_is_the_code_of_a_region() -> None:
    page = "<!-- snippet: examples/pi.py -->\nold\n<!-- end of snippet -->\n"
    assert f"```python\n{(ROOT / 'examples/pi.py').read_text()}```\n<!-- end" in snippets.fill(page)
    assert "class Regression" in snippets.fill(page.replace("pi.py", "regression.py settings"))
    assert "def lead" not in snippets.fill(page.replace("pi.py", "regression.py settings"))
    with pytest.raises(ValueError, match="no region other"):
        snippets.fill(page.replace("pi.py", "pi.py other"))


@pytest.mark.parametrize("cls", [Settings, *(registry.get(job).settings for job in registry.JOBS)])
def test_every_variable_says_what_it_means(cls: type[Settings]) -> None:
    assert not [name for name, field in cls.model_fields.items() if not field.description]


@pytest.mark.parametrize("name", PAGES)
def test_variables_named_in_the_pages_exist(name: str) -> None:
    present = re.sub(r"### Removed\n.*?(?=\n###)", "", PAGES[name], flags=re.DOTALL)
    named = set(re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)(?:=[^`]*)?`", present))
    assert not named - VARIABLES - OTHERS


@pytest.mark.parametrize("name", PAGES)
def test_metrics_named_in_the_pages_exist(name: str) -> None:
    named = set(re.findall(r"`(rolecall_[a-z0-9_]+)`", PAGES[name]))
    assert not named - METRICS


@pytest.mark.parametrize("name", PAGES)
def test_links_and_make_targets_exist(name: str) -> None:
    for link in re.findall(r"\]\(((?!https?:|#)[^)#]+)", PAGES[name]):
        assert ((ROOT / name).parent / link).exists(), link
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"\bmake ([a-z][a-z0-9-]*)`", PAGES[name])) - targets


def test_every_page_is_linked_from_the_readme() -> None:
    assert {name for name in PAGES if name.startswith("docs/") and f"]({name})" not in README} == set()


@pytest.mark.parametrize("name", PAGES)
def test_flags_in_the_pages_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a job's folder is added
    others = {*RunOptions.__annotations__, "on", "role", "plain", "name", "detach"}
    for target, rest in re.findall(r"^\$? *rolecall run ([^\s-]\S*)([^#\n]*)", PAGES[name], re.MULTILINE):
        flags = {flag.replace("-", "_") for flag in re.findall(r" --([a-z-]+)", rest.partition(" -- ")[0])}
        assert flags <= {*fields_of(target), *others}, rest


def fields_of(target: str) -> dict[str, Any]:
    """The settings of a job that a page runs; one of the user's own is among the examples, or is any program."""
    if target in registry.JOBS:
        return registry.get(target).settings.model_fields
    for path in ROOT.glob(f"examples/**/{Path(target.partition(':')[0]).name}"):
        if re.search(r"^JOB = Job\(", path.read_text(), re.MULTILINE):
            return registry.get(str(path)).settings.model_fields
    return registry.get("script").settings.model_fields


def test_messages_quoted_in_the_runbook_exist() -> None:
    nodes = [node for each in the_source().nodes.values() for node in each]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    spans = re.findall(r"`([^`]+)`", PAGES["docs/runbook.md"])
    quoted = [text for text in spans if re.fullmatch(r"(?!make )[a-z]+ [a-z0-9 ,.]+", text)]
    assert len(quoted) > 10
    pieces = [piece.strip() for text in quoted for piece in text.split("...")]
    assert [piece for piece in pieces if not any(piece in text for text in texts)] == []


@pytest.mark.parametrize("job", registry.JOBS)
def test_every_job_has_its_page(job: str) -> None:
    assert PAGES[f"docs/{job}.md"].startswith(f"# The job `{job}`\n")
    assert f"](docs/{job}.md)" in README


def test_every_dependency_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    for requirement in sum(project["optional-dependencies"].values(), project["dependencies"]):
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        assert "#" in line, requirement


def test_help_lists_every_public_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))


# ---- blocks of commands

BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, block in enumerate(re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE), 1)
]
WORDS = argument_parser()  # of the command line


@pytest.mark.parametrize("block", BLOCKS)
def test_commands_in_the_pages_exist(block: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(block):
        if words[0] == "make":
            named = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
            assert named <= targets, words
        elif words[0] == "rolecall" and len(words) > 1:
            require_command(words[1:])
        elif words[0] == "kubectl" and "-k" in words and (folder := words[words.index("-k") + 1]).startswith("k8s/"):
            assert (ROOT / folder / "kustomization.yaml").exists() or "mine" in folder, folder


def commands_of(block: str) -> Iterator[list[str]]:
    """The words of each simple command of `block`, without its variables."""
    for line in block.replace("\\\n", " ").splitlines():
        with contextlib.suppress(ValueError):  # a quotation of several lines
            words: list[str] = []
            for word in [*shlex.shlex(line, posix=True, punctuation_chars=True), ";"]:
                if re.fullmatch(r"[();<>|&]+", word):
                    if words:
                        yield words
                    words = []
                elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                    words.append(word)


def require_command(words: list[str]) -> None:
    """Checks that the command line has the command of `words`, with their flags; those of a job and of its options
    have tests of their own."""
    (commands,) = [action.choices for action in WORDS._actions if isinstance(action, argparse._SubParsersAction)]
    assert words[0] in commands, words
    if words[0] in ("run", "launch", "eval", "describe"):
        return
    parser = COMMANDS[words[0]].call(COMMANDS[words[0]].parser) if words[0] in COMMANDS else commands[words[0]]
    known = {option for action in parser._actions for option in action.option_strings}
    assert {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)} <= known, words
