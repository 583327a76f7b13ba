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
    image_environment,
    only,
)


def dependencies_python() -> str:
    match = re.search(r'^PYTHON = "([\d.]+)"', (ROOT / "docker" / "dependencies.py").read_text(), re.MULTILINE)
    assert match
    return match.group(1)


# ---- the image


def test_the_image_asks_after_its_health() -> None:
    flags, _, command = only("HEALTHCHECK").partition(" CMD ")
    python, dash, module = json.loads(command)
    assert (python, dash) == ("python", "-m")
    assert module == probe.__name__
    assert importlib.util.find_spec(module) is not None
    timeout = re.search(r"--timeout=(\d+)s", flags)
    assert timeout
    assert float(timeout.group(1)) > probe.TIMEOUT  # it says itself what is wrong


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
