"""The containers against the code: compose.yaml, the image, and what they promise each other. Needs no Docker."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from app import config, jobs, probe, telemetry
from app.config import Settings

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE_TEXT = (ROOT / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SCRIPTS = sorted([*(ROOT / "docker").glob("*.sh"), *(ROOT / "docker").glob("*.py")])
# a container is given its number by the gang; every container has ports of its own; the image says where its volume is;
# and a file that holds the token would have to be mounted
NOT_PASSED = {
    "ORDINAL",
    "RANK",
    "WORLD_SIZE",
    "MASTER_PORT",
    "CONTROL_PORT",
    "METRICS_PORT",
    "CHECKPOINT_DIR",
    "JOB_TOKEN_FILE",
}
# what would give a container more than it needs, keep it from being scaled, or replace what the image says
UNWANTED = (
    "ports privileged network_mode pid ipc uts userns_mode cgroup_parent cap_add devices device_cgroup_rules group_add "
    "container_name hostname entrypoint command healthcheck env_file"
)


def filled(value: Any) -> str:
    """`value` with the defaults that compose puts in where the user says nothing."""
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", str(value))


def job_of(name: str) -> jobs.Job:
    return jobs.get(SERVICES[name]["profiles"][0])


def role_of(name: str) -> jobs.Role:
    return next(role for role in job_of(name).roles if role.name == SERVICES[name]["environment"]["ROLE"])


def is_first(name: str) -> bool:
    return role_of(name) == job_of(name).roles[0]


def siblings(name: str) -> list[str]:
    """The services of the same job."""
    return [other for other, service in SERVICES.items() if service["profiles"] == SERVICES[name]["profiles"]]


def networks(name: str) -> dict[str, list[str]]:
    """A service's networks with its aliases there."""
    given = SERVICES[name].get("networks", ["default"])
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
    found = [rest for word, rest in STAGES[-1] if word == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for word, rest in STAGES[-1] if word == "ENV" for pair in rest.split())


def dependencies_python() -> str:
    match = re.search(r'^PYTHON = "([\d.]+)"', (ROOT / "docker" / "dependencies.py").read_text(), re.MULTILINE)
    assert match
    return match.group(1)


# ---- compose.yaml: jobs, roles and settings


def test_every_job_has_a_profile() -> None:
    assert {profile for service in SERVICES.values() for profile in service["profiles"]} == set(jobs.JOBS)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_a_role_of_one_job(name: str) -> None:
    service = SERVICES[name]
    assert service["profiles"] == [service["environment"]["JOB"]]
    assert service["environment"]["JOB"] in jobs.JOBS
    roles = [SERVICES[other]["environment"]["ROLE"] for other in siblings(name)]
    assert sorted(roles) == sorted(role.name for role in job_of(name).roles)


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_is_passed(name: str) -> None:
    fields = {field.upper() for field in job_of(name).settings.model_fields}
    assert fields >= NOT_PASSED
    assert set(SERVICES[name]["environment"]) == fields - NOT_PASSED


@pytest.mark.parametrize("name", SERVICES)
def test_ranks_differ_in_their_role_only(name: str) -> None:
    for other in siblings(name):
        one, two = SERVICES[name]["environment"], SERVICES[other]["environment"]
        assert {**one, "ROLE": ""} == {**two, "ROLE": ""}


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_but_addresses_and_counts_has_a_value_here(name: str) -> None:
    """A default that stands in two places is wrong in one of them sooner or later."""
    counts = {role.count for role in job_of(name).roles if role.count}
    valued = {variable for variable, value in SERVICES[name]["environment"].items() if value is not None}
    assert valued == {"JOB", "ROLE", "MASTER_ADDR", "BIND_ADDR", "METRICS_BIND_ADDR"} | counts


@pytest.mark.parametrize("name", SERVICES)
def test_as_many_containers_as_the_job_waits_for(name: str) -> None:
    role, service = role_of(name), SERVICES[name]
    if not role.count:
        assert service["deploy"].get("replicas", 1) == 1
        return
    default = job_of(name).settings.model_fields[role.count.lower()].default
    assert service["deploy"]["replicas"] == f"${{{role.count}:-{default}}}"
    assert service["environment"][role.count] == f"${{{role.count}:-{default}}}"


@pytest.mark.parametrize("name", SERVICES)
def test_the_values_are_understood(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for field in job_of(name).settings.model_fields:
        monkeypatch.delenv(field.upper(), raising=False)
    for variable, value in SERVICES[name]["environment"].items():
        if value is not None:
            monkeypatch.setenv(variable, filled(value))
    for variable, value in image_environment().items():
        if variable.lower() in Settings.model_fields:
            monkeypatch.setenv(variable, value)
    job, settings = jobs.load()
    assert job is job_of(name)
    assert config.load(job.settings) == settings
    identity = jobs.identity(job, settings, "3b40cf1c355c")
    assert identity.role == role_of(name).name
    assert [role.count for role in jobs.roles(job, settings)] == [
        role.count for role in jobs.roles(job, job.settings.model_construct())
    ]


def test_every_value_from_outside_has_a_default() -> None:
    """Compose warns of a variable that is not set, and puts in nothing."""
    text = re.sub(r"^\s*#.*$", "", COMPOSE_TEXT, flags=re.MULTILINE)
    assert "${" in text
    assert "$" not in filled(text)


# ---- compose.yaml: who reaches whom


@pytest.mark.parametrize("name", SERVICES)
def test_the_masters_name_is_known_on_the_rpc_network_only(name: str) -> None:
    """What rank 0 listens on is what its name stands for, so it must stand for nothing on another network."""
    environment = SERVICES[name]["environment"]
    address = environment["MASTER_ADDR"]
    assert environment["BIND_ADDR"] == address
    assert address not in SERVICES  # a service's own name is known on all of its networks
    known = [
        (other, network) for other in SERVICES for network, aliases in networks(other).items() if address in aliases
    ]
    assert known == [(next(filter(is_first, siblings(name))), "rpc")]


@pytest.mark.parametrize("name", SERVICES)
def test_networks_lead_nowhere_else(name: str) -> None:
    assert set(networks(name)) == {"rpc", "metrics"}
    for network in networks(name):
        assert COMPOSE["networks"][network]["internal"] is True
        assert "external" not in COMPOSE["networks"][network]


@pytest.mark.parametrize("name", SERVICES)
def test_metrics_listen_beside_the_rpc_network(name: str) -> None:
    """BIND_ADDR, which would be taken otherwise, is not this rank's, or is known on the rpc network only."""
    assert SERVICES[name]["environment"]["METRICS_BIND_ADDR"] == "0.0.0.0"


# ---- compose.yaml: what a container may do


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_may_do_no_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == only("USER")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not [option for option in service["security_opt"] if "unconfined" in option]
    assert not set(UNWANTED.split()) & set(service)
    temporary = {path: options for path, _, options in (entry.partition(":") for entry in service["tmpfs"])}
    assert set(temporary) == {"/tmp"}
    assert {"noexec", "nosuid", "nodev"} <= set(temporary["/tmp"].split(","))
    assert re.search(r"\bsize=\d+[mg]\b", temporary["/tmp"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_bounded(name: str) -> None:
    service = SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert float(filled(limits["cpus"])) > 0
    assert re.fullmatch(r"[1-9]\d*[mg]", filled(limits["memory"]))
    assert int(filled(limits["pids"])) > 0
    assert re.fullmatch(r"on-failure:[1-9]\d*", filled(service["restart"]))
    assert "restart_policy" not in service["deploy"]  # it would win
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_stop_leaves_the_time_to_drain(name: str) -> None:
    fields = job_of(name).settings.model_fields
    grace = re.fullmatch(r"(\d+)s", filled(SERVICES[name]["stop_grace_period"]))
    assert grace
    # the supervisor itself gives up after the first two (app/supervisor.py); then it ends its worker
    least = fields["drain_timeout"].default + fields["lease_seconds"].default / 2 + 5
    assert int(grace.group(1)) > least


@pytest.mark.parametrize("name", SERVICES)
def test_rank_0_alone_keeps_something(name: str) -> None:
    volumes = SERVICES[name].get("volumes", [])
    if not is_first(name):
        assert volumes == []
        return
    (volume,) = volumes
    source, target, *options = volume.split(":")
    assert source in COMPOSE["volumes"]
    assert target == image_environment()["CHECKPOINT_DIR"]
    assert options == []
    assert not [other for other in SERVICES if other != name and source in str(SERVICES[other].get("volumes"))]


# ---- compose.yaml, the Makefile and the Dockerfile


@pytest.mark.parametrize("name", SERVICES)
def test_the_image_is_the_one_that_make_builds(name: str) -> None:
    service = SERVICES[name]
    made = dict(re.findall(r"^(IMAGE|TORCH) \?= (\S+)$", MAKEFILE, re.MULTILINE))
    assert filled(service["image"]) == f"{made['IMAGE']}:{made['TORCH']}"
    declared = {rest.partition("=")[0]: rest.partition("=")[2] for word, rest in EVERYTHING if word == "ARG"}
    assert set(service["build"]["args"]) <= set(declared)
    for argument, value in service["build"]["args"].items():
        assert filled(value) == declared[argument], argument
    assert ROOT / service["build"]["context"] == ROOT
    assert (ROOT / service["build"]["dockerfile"]).read_text() == DOCKERFILE
    assert set(re.findall(r"--build-arg ([A-Z_]+)", MAKEFILE)) <= set(declared)


@pytest.mark.parametrize(
    "profile", sorted({profile for service in SERVICES.values() for profile in service["profiles"]})
)
def test_make_starts_every_profile(profile: str) -> None:
    recipe = re.search(rf"^up-{profile}: image ## .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe, f"no target up-{profile} that builds the image first"
    (first,) = [name for name, service in SERVICES.items() if service["profiles"] == [profile] and is_first(name)]
    assert f"docker/up.sh {profile} {first}\n" in recipe.group(1)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.suffix == ".sh"], ids=lambda path: path.name)
def test_make_can_run_the_scripts(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert f"docker/{script.name}" in MAKEFILE
    metrics = {row[0] for job in jobs.JOBS for row in telemetry.catalogue(jobs.metrics(jobs.get(job)))}
    assert set(re.findall(r"\brolecall_[a-z0-9_]+", script.read_text())) <= metrics


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
    assert (Path(tini).name, dashes, command) == ("tini", "--", ["python", "-m", "app"])
    installed = " ".join(rest for word, rest in STAGES[-1] if word == "RUN" and "apt-get install" in rest)
    assert re.search(r"\btini\b", installed)
    assert "CMD" not in [word for word, _ in STAGES[-1]]
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
    made = re.search(r"\buseradd --uid (\d+) .* (\w+)(?: |$)", runs.partition(" && install ")[0].strip())
    assert made
    assert made.group(1) == user
    assert re.search(rf"\bgroupadd --gid {group} ", runs)
    assert int(user) >= 1000
    assert int(group) >= 1000
    # a new volume takes over its owner from the directory that it is mounted on
    directory = re.escape(image_environment()["CHECKPOINT_DIR"])
    assert re.search(rf"\binstall --directory --owner {made.group(2)} .*{directory}(?: |$)", runs)
    words = [word for word, _ in STAGES[-1]]
    assert "RUN" not in words[words.index("USER") :]


def test_one_python() -> None:
    wanted = dependencies_python()
    found = re.findall(r"python(\d+\.\d+)", DOCKERFILE)
    assert found
    assert set(found) == {wanted}
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
    assert "://" not in path.read_text()
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
    found = []
    for word, rest in EVERYTHING:
        if word in ("COPY", "ADD") and "--from=" not in rest:
            found += rest.split()[:-1]
        found += re.findall(r"type=bind,source=([^, ]+)", rest)
    return found


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
    for path in ("docker/up.sh", "docker/Dockerfile", ".git/config", "tests/unit", "checkpoints/DONE"):
        assert not sent(path), path
    for path in ("app/__pycache__/config.cpython-311.pyc", "app/jobs/rl/__pycache__", "app/x.pyc"):
        assert not sent(path), path
