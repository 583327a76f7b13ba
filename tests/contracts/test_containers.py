"""The image against the code, and what builds it: the Dockerfile, its scripts and .dockerignore. Needs no Docker."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from rolecall.config import Settings
from rolecall.observe import probe
from tests.contracts.containers import (
    DOCKERFILE,
    EVERYTHING,
    ROOT,
    SCRIPTS,
    STAGES,
    image_environment,
    only,
)


def dependencies_python() -> str:
    match = re.search(r'^PYTHON = "([\d.]+)"', (ROOT / "docker" / "dependencies.py").read_text(), re.MULTILINE)
    assert match
    return match.group(1)


# ---- the image


def test_what_builds_the_image_stays_out_of_it() -> None:
    assert len(STAGES) == 3
    build, image = STAGES[1:]
    assert build[0][1].endswith(" AS build")
    assert " AS " not in image[0][1]
    assert image[0][1] == build[0][1].removesuffix(" AS build")
    copies = [rest for word, rest in image if word in ("COPY", "ADD")]
    assert copies
    assert all(rest.startswith("--from=build ") for rest in copies)
    assert not re.search(r"\bpip\b|venv|gcc|build-essential", " ".join(rest for word, rest in image if word == "RUN"))


def test_the_image_runs_a_rank() -> None:
    tini, dashes, *command = json.loads(only("ENTRYPOINT"))
    assert (Path(tini).name, dashes, command) == ("tini", "--", ["python", "-m", "rolecall"])
    installed = " ".join(rest for word, rest in STAGES[-1] if word == "RUN" and "apt-get install" in rest)
    assert re.search(r"\btini\b", installed)
    # what it runs unless it is told otherwise: a rank, whose supervisor may crash
    rank = json.loads(only("CMD"))
    assert rank[:2] == ["rank", "--restarts"]
    assert int(rank[2]) > 0
    (copied,) = [rest for word, rest in STAGES[1] if word == "COPY" and rest.startswith("app ")]
    assert copied.split()[1] == f"{only('WORKDIR')}/app"


def test_the_image_asks_after_its_health() -> None:
    flags, _, command = only("HEALTHCHECK").partition(" CMD ")
    python, dash, module = json.loads(command)
    assert (python, dash) == ("python", "-m")
    assert module == probe.__name__
    assert importlib.util.find_spec(module) is not None
    timeout = re.search(r"--timeout=(\d+)s", flags)
    assert timeout
    assert float(timeout.group(1)) > probe.TIMEOUT  # it says itself what is wrong


def test_the_images_user_is_nobody_else() -> None:
    user, _, group = only("USER").partition(":")
    runs = " ".join(rest for word, rest in STAGES[-1] if word == "RUN")
    created = re.search(r"\buseradd --uid (\d+) .* (\w+)(?: |$)", runs.partition(" && install ")[0].strip())
    assert created
    assert created.group(1) == user
    assert re.search(rf"\bgroupadd --gid {group} ", runs)
    assert int(user) >= 1000
    assert int(group) >= 1000
    # a new volume takes over its owner from the directory that it is mounted on
    directory = re.escape(image_environment()["CHECKPOINT_DIR"])
    assert re.search(rf"\binstall --directory --owner {created.group(2)} .*{directory}(?: |$)", runs)
    words = [word for word, _ in STAGES[-1]]
    assert "RUN" not in words[words.index("USER") :]


def test_one_python() -> None:
    wanted = dependencies_python()
    versions = re.findall(r"python(\d+\.\d+)", DOCKERFILE)
    assert versions
    assert set(versions) == {wanted}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{wanted}.0" in SpecifierSet(project["requires-python"])


def test_the_image_exposes_its_metrics() -> None:
    assert only("EXPOSE") == str(Settings.model_fields["metrics_port"].default)


def test_the_images_variables_are_understood() -> None:
    foreign = {"PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "NVIDIA_DRIVER_CAPABILITIES"}
    assert {name.lower() for name in set(image_environment()) - foreign} <= set(Settings.model_fields)
    assert "CHECKPOINT_DIR" in image_environment()


@pytest.mark.parametrize(
    "path",
    [ROOT / "docker" / "Dockerfile", ROOT / "compose.yaml", ROOT / "Makefile", *SCRIPTS],
    ids=lambda path: path.name,
)
def test_nothing_is_fetched_from_an_address(path: Path) -> None:
    """Only from what apt, pip and Docker are set to, which differs from place to place."""
    elsewhere = re.sub(r"http://(127\.0\.0\.1|\(localhost|\$address)", "", path.read_text())
    assert "://" not in elsewhere
    assert not re.search(r"^#\s*syntax\s*=", path.read_text(), re.MULTILINE)  # an image of its own


# ---- .dockerignore

RULES = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip() and not line.startswith("#")
]


def sent(path: str) -> bool:
    """Whether the builder gets `path`: the last rule that fits it or a directory above decides."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    kept = True
    for rule in RULES:
        pattern = re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, each) for each in above):
            kept = rule.startswith("!")
    return kept


def sources() -> list[str]:
    """What the Dockerfile takes from the repository."""
    paths = []
    for word, rest in EVERYTHING:
        if word in ("COPY", "ADD") and "--from=" not in rest:
            paths += rest.split()[:-1]
        paths += re.findall(r"type=bind,source=([^, ]+)", rest)
    return paths


@pytest.mark.parametrize("source", sources())
def test_the_builder_gets_what_it_uses(source: str) -> None:
    path = ROOT / source
    assert path.exists()
    assert sent(source)
    if path.is_dir():
        files = [*path.rglob("*.py"), path / "some-1.0-py3-none-any.whl"]
        assert [file for file in files if not sent(file.relative_to(ROOT).as_posix())] == []


def test_the_builder_gets_nothing_else() -> None:
    assert {"app", "docker/wheels", "pyproject.toml"} <= set(sources())
    assert RULES[0] == "*"
    others = {path.name for path in ROOT.iterdir()} | {".git", ".env", ".venv", "runs", "checkpoints", "secrets"}
    assert {name for name in others if sent(name)} == {source for source in sources() if "/" not in source}
    for path in ("docker/up.sh", "docker/Dockerfile", ".git/config", "tests/gang", "checkpoints/DONE"):
        assert not sent(path), path
    for path in ("app/__pycache__/config.cpython-311.pyc", "app/jobs/rl/__pycache__", "app/x.pyc"):
        assert not sent(path), path
