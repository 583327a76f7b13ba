"""What the tests of the containers read: compose.yaml, the Makefile, the Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.declare.spec import Job, Role
from tests.roles import counter
from tools.jobs import FAST_LOADER

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE_TEXT = (ROOT / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.load(COMPOSE_TEXT, FAST_LOADER)
MONITORING = "monitoring"  # the profile of those that watch, and are no ranks
SERVICES: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if service["profiles"] != [MONITORING]
}
# the profiles for the user's own: ranks without a role, which the gang assigns; the other profiles are one job each
GENERIC = ("job", "script")
ROLES = {name: service for name, service in SERVICES.items() if service["profiles"][0] not in GENERIC}
RANKS = {name: service for name, service in SERVICES.items() if name not in ROLES}
WATCHERS: dict[str, dict[str, Any]] = {
    name: service for name, service in COMPOSE["services"].items() if name not in SERVICES
}
SCRIPTS = sorted(
    path for folder in ("docker", "k8s") for kind in ("sh", "py") for path in (ROOT / folder).glob(f"*.{kind}")
)


def filled(value: Any) -> str:
    """`value` with the defaults that compose puts in where the user says nothing."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", str(value))


def job_of(name: str) -> Job:
    return registry.get(SERVICES[name]["profiles"][0])


def role_of(name: str) -> Role:
    return next(role for role in job_of(name).roles if role.name == SERVICES[name]["environment"]["ROLE"])


def settings_of(name: str) -> type[Settings]:
    """The settings of a service's job; of a job file, those that are known before there is one."""
    profile = SERVICES[name]["profiles"][0]
    return registry.get(profile).settings if profile in registry.JOBS else Settings


def is_first(name: str) -> bool:
    """Whether it is rank 0's service: of a first role with several members, the one that says so."""
    if name in RANKS:
        return "RANK" in SERVICES[name]["environment"]
    role = role_of(name)
    return role == job_of(name).roles[0] and (not counter(role) or "ORDINAL" in SERVICES[name]["environment"])


def siblings(name: str) -> list[str]:
    """The services of the same job."""
    return [other for other, service in SERVICES.items() if service["profiles"] == SERVICES[name]["profiles"]]


def networks(name: str) -> dict[str, list[str]]:
    """A service's networks with its aliases there."""
    given = COMPOSE["services"][name].get("networks", ["default"])
    if isinstance(given, list):
        return {network: [] for network in given}
    return {network: (options or {}).get("aliases", []) for network, options in given.items()}


def instructions() -> list[list[tuple[str, str]]]:
    """The Dockerfile's instructions as (name, arguments), by stage; the first list is what precedes the first FROM."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    stages: list[list[tuple[str, str]]] = [[]]
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages


STAGES = instructions()
EVERYTHING = [instruction for stage in STAGES for instruction in stage]


def only(name: str) -> str:
    """The arguments of the image's one instruction `name`."""
    matching = [rest for word, rest in STAGES[-1] if word == name]
    assert len(matching) == 1, f"{name}: {matching}"
    return matching[0]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for word, rest in STAGES[-1] if word == "ENV" for pair in rest.split())
