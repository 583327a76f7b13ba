"""compose.yaml against the code and the image: jobs, roles, settings, networks, limits. Needs no Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolecall import config, new
from rolecall.config import Settings
from rolecall.declare import registry
from tests.contracts.containers import (
    COMPOSE,
    COMPOSE_TEXT,
    DOCKERFILE,
    EVERYTHING,
    GENERIC,
    MAKEFILE,
    RANKS,
    ROLES,
    ROOT,
    SERVICES,
    WATCHERS,
    filled,
    image_environment,
    is_first,
    job_of,
    networks,
    only,
    role_of,
    settings_of,
    siblings,
)
from tests.roles import counter

# a container is given its number by the gang; every container has ports of its own; the image says where its volume is;
# `docker inspect` would show a token; a user's own certificates would have to be mounted; and no container is a host
NOT_PASSED = {"INSTANCE", "LEAVE_CODE", "ORDINAL", "RANK", "WORLD_SIZE", "PORT", "MASTER_PORT", "METRICS_PORT"}
NOT_PASSED |= {"CHECKPOINT_DIR", "JOB_TOKEN", "TLS_CERT", "TLS_KEY", "TLS_CA", "HOST_TIMEOUT"}
PLACES = {"CHECKPOINT_DIR": "/checkpoints/", "DATA_DIR": "/data"}
FIXED = {
    "job": {"JOB": "/job", **PLACES},
    "script": {"JOB": "script", **PLACES, "SCRIPT": "/script", "RANKS": "2"},
}
SECRET = "job-token"
TOKEN = "a-token-of-more-than-128-bits"
# what would give a container more than it needs, keep it from being scaled, or replace what the image says
UNWANTED = (
    "ports privileged network_mode pid ipc uts userns_mode cgroup_parent cap_add devices device_cgroup_rules group_add "
    "container_name hostname entrypoint command healthcheck env_file"
)


# ---- compose.yaml: jobs, roles and settings


@pytest.mark.parametrize("name", ROLES)
def test_a_service_is_a_role_of_one_job(name: str) -> None:
    service = SERVICES[name]
    assert service["profiles"] == [service["environment"]["JOB"]]
    assert service["environment"]["JOB"] in registry.JOBS
    roles = {SERVICES[other]["environment"]["ROLE"] for other in siblings(name)}
    assert roles == {role.name for role in job_of(name).roles}
    # rank 0 has a service of its own: it alone keeps something
    first = job_of(name).roles[0]
    assert len([other for other in siblings(name) if is_first(other)]) == 1
    assert len(siblings(name)) == len(roles) + bool(counter(first))


@pytest.mark.parametrize("profile", GENERIC)
def test_a_users_own_has_rank_0_and_the_others(profile: str) -> None:
    services = {name: service for name, service in RANKS.items() if service["profiles"] == [profile]}
    first, others = sorted(services, key=is_first, reverse=True)
    assert (first, others) == (f"{profile}-rank0", f"{profile}-ranks")
    assert services[first]["deploy"].get("replicas", 1) == 1
    assert services[others]["deploy"]["replicas"] == "${OTHERS:-1}"
    # nothing else tells them apart: the gang assigns roles and ordinals
    one, two = services[first], services[others]
    assert one["environment"] == {**two["environment"], "RANK": "0"}
    assert not {"ROLE", "ORDINAL", "RANK"} & set(two["environment"])
    apart = dict.fromkeys(("environment", "networks", "deploy"))
    assert one | apart == two | apart


@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_is_passed_and_few_have_a_value_here(name: str) -> None:
    """A default that stands in two places is wrong in one of them sooner or later."""
    environment, profile = SERVICES[name]["environment"], SERVICES[name]["profiles"][0]
    valued = {variable: filled(value) for variable, value in environment.items() if value is not None}
    passed = {field.upper() for field in settings_of(name).model_fields} - NOT_PASSED
    assert valued.pop("MASTER_ADDR").endswith(".rpc")
    assert valued.pop("JOB_TOKEN_FILE") == f"/run/secrets/{SECRET}"  # the path at which compose mounts it
    if name in RANKS:  # what the shell or docker/up.sh says, and what the profile fixes
        fixed = {**FIXED[profile], **({"RANK": "0"} if is_first(name) else {})}
        assert valued == fixed
        assert set(environment) == passed - {"ROLE"} | set(fixed) | ({"SCRIPT_ARGS"} if profile == "script" else set())
        variables = ["${JOB_VARIABLES:-/dev/null}"] if profile == "job" else None  # the names of a job's own settings
        assert SERVICES[name].get("env_file") == variables
        return
    counts = {counter(role) for role in job_of(name).roles} - {""}
    extra = {"ORDINAL"} if is_first(name) and counter(role_of(name)) else set()
    assert set(environment) == passed | extra
    assert environment.get("ORDINAL", "0") == "0"
    assert set(valued) == {"JOB", "ROLE"} | counts | extra | {"DATA_DIR"} & set(environment)
    shared = [SERVICES[other]["environment"] | {"ROLE": "", "ORDINAL": ""} for other in siblings(name)]
    assert all(one == shared[0] for one in shared), "ranks differ in their role only"


@pytest.mark.parametrize("name", ROLES)
def test_as_many_containers_as_the_job_waits_for(name: str) -> None:
    role, service = role_of(name), SERVICES[name]
    count = counter(role)
    default = job_of(name).settings.model_fields[count.lower()].default if count else role.count
    if count:
        assert service["environment"][count] == f"${{{count}:-{default}}}"
    if is_first(name):
        assert service["deploy"].get("replicas", 1) == 1
    elif role == job_of(name).roles[0]:
        # the others of rank 0's role: one less, which compose cannot compute
        assert re.fullmatch(rf"\$\{{[A-Z]+:-{default - 1}\}}", service["deploy"]["replicas"])
    elif count:
        assert service["deploy"]["replicas"] == f"${{{count}:-{default}}}"
    else:
        assert service["deploy"].get("replicas", 1) == role.count


def test_every_value_from_outside_has_a_default() -> None:
    """Compose warns of a variable that is not set, and puts in nothing."""
    assert "$" not in filled(re.sub(r"^\s*#.*$", "", COMPOSE_TEXT, flags=re.MULTILINE))


@pytest.mark.parametrize("name", ROLES)
def test_the_values_are_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    for field in job_of(name).settings.model_fields:
        monkeypatch.delenv(field.upper(), raising=False)
    for variable, value in SERVICES[name]["environment"].items():
        if value is not None:
            monkeypatch.setenv(variable, filled(value))
    for variable, value in image_environment().items():
        if variable.lower() in Settings.model_fields:
            monkeypatch.setenv(variable, value)
    monkeypatch.setenv("JOB_TOKEN_FILE", str(tmp_path / "token"))
    job, settings = registry.load()
    assert job is job_of(name)
    assert config.load(job.settings) == settings
    identity = registry.identity(registry.roles(job, settings), settings, "3b40cf1c355c")
    assert identity.role == role_of(name).name
    assert [role.count for role in registry.roles(job, settings)] == [
        role.count for role in registry.roles(job, job.settings.model_construct())
    ]


# ---- compose.yaml: who reaches whom


@pytest.mark.parametrize("name", SERVICES)
def test_networks_lead_nowhere_else_and_the_masters_name_is_known_on_one_only(name: str) -> None:
    """Ranks meet on the network that rank 0's name leads to, so it must stand for nothing on another network."""
    address = SERVICES[name]["environment"]["MASTER_ADDR"]
    assert address not in SERVICES  # a service's own name is known on all of its networks
    known = [
        (other, network) for other in SERVICES for network, aliases in networks(other).items() if address in aliases
    ]
    assert known == [(next(filter(is_first, siblings(name))), "rpc")]
    assert set(networks(name)) == {"rpc", "metrics"}
    for network in networks(name):
        assert COMPOSE["networks"][network]["internal"] is True
        assert "external" not in COMPOSE["networks"][network]
    assert SERVICES[name]["extra_hosts"] == {"loopback": "::ffff:127.0.0.1"}, "known without DNS"


# ---- compose.yaml: the token


def test_the_token_is_given_to_every_rank_and_as_a_file_only() -> None:
    source = "${JOB_TOKEN_SOURCE:-.secrets/job-token}"
    assert COMPOSE["secrets"] == {SECRET: {"file": source}}
    assert ".secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "**/.secrets" in (ROOT / ".dockerignore").read_text().splitlines()
    for name, service in COMPOSE["services"].items():
        given = service.get("environment", {})
        assert not {"JOB_TOKEN", "JOB_TOKEN_SOURCE"} & set(given), name
        assert not [value for value in given.values() if "TOKEN" in str(value)], name
        assert service.get("secrets", []) == ([SECRET] if name in SERVICES else []), name
        assert name not in SERVICES or given["TLS"] is None  # the default, `require`, unless the user sets it


def test_the_new_jobs_compose_file_gives_its_ranks_the_token_as_a_file(tmp_path: Path) -> None:
    (path,) = [file for file in new.write("fresh_job", tmp_path) if file.name == "compose.yaml"]
    text = path.read_text()
    fresh: dict[str, Any] = yaml.safe_load(text)
    assert fresh["secrets"] == {SECRET: {"file": ".secrets/job-token"}}
    command = re.search(r"^#   (mkdir .*)$", text, re.MULTILINE)
    assert command
    assert re.fullmatch(
        r"mkdir -m 700 -p (\S+) && rolecall token > (\1/job-token) && chmod 444 \2", command.group(1)
    ), "the command that the user is told makes that file"
    for service in fresh["services"].values():
        assert service["secrets"] == [SECRET]
        assert service["extra_hosts"] == SERVICES["agent"]["extra_hosts"]
        environment = service["environment"]
        assert environment["JOB_TOKEN_FILE"] == f"/run/secrets/{SECRET}"
        assert environment["TLS"] is None
        assert {key.lower() for key in environment} - {"workers"} <= set(Settings.model_fields)
        assert not {"JOB_TOKEN", "BIND_ADDR", *NOT_PASSED} & set(environment)


# ---- compose.yaml: what a container may do


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_may_do_no_more_than_it_needs(name: str) -> None:
    service = COMPOSE["services"][name]
    assert int(service["user"].split(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not [option for option in service["security_opt"] if "unconfined" in option]
    # of a job file, the variables' names; a watcher has an image of its own, and is read by a browser
    given = {"ports", "command", "healthcheck"} if name in WATCHERS else {"env_file"} if name in RANKS else set()
    assert not set(UNWANTED.split()) & set(service) - given
    temporary = {path: options for path, _, options in (entry.partition(":") for entry in service["tmpfs"])}
    assert set(temporary) == {"/tmp"}
    assert {"noexec", "nosuid", "nodev"} <= set(temporary["/tmp"].split(","))
    assert re.search(r"\bsize=\d+[mg]\b", temporary["/tmp"])
    limits = service["deploy"]["resources"]["limits"]
    assert float(filled(limits["cpus"])) > 0
    assert re.fullmatch(r"[1-9]\d*[mg]", filled(limits["memory"]))
    assert int(filled(limits["pids"])) > 0
    assert re.fullmatch(r"on-failure:[1-9]\d*", filled(service["restart"]))
    assert "restart_policy" not in service["deploy"]  # it would win
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", filled(port)), "published on loopback only"


@pytest.mark.parametrize("name", SERVICES)
def test_a_stop_leaves_the_time_to_drain(name: str) -> None:
    fields = settings_of(name).model_fields
    grace = re.fullmatch(r"(\d+)s", filled(SERVICES[name]["stop_grace_period"]))
    assert grace
    # the supervisor itself gives up after the first two (app/rolecall/rank/supervisor.py); then it ends its worker
    least = fields["drain_timeout"].default + fields["lease_seconds"].default / 2 + 5
    assert int(grace.group(1)) > least


@pytest.mark.parametrize("name", SERVICES)
def test_rank_0_keeps_its_checkpoints_and_all_else_is_read_only(name: str) -> None:
    """The root file system is read-only, so data can come from nowhere but a volume."""
    service, profile = SERVICES[name], SERVICES[name]["profiles"][0]
    volumes = [filled(volume).split(":") for volume in service.get("volumes", [])]
    assert {source for source, *_ in volumes} <= set(COMPOSE["volumes"])
    written = [(source, target) for source, target, *options in volumes if options != ["ro"]]
    mounted = [target for _, target, *options in volumes if options == ["ro"]]
    keeps = is_first(name) or name in RANKS  # every rank of the user's own may write beside the checkpoints
    assert [target for _, target in written] == ([image_environment()["CHECKPOINT_DIR"]] if keeps else [])
    for source, _ in written:
        others = [other for other in SERVICES if source in str(SERVICES[other].get("volumes"))]
        assert others == (siblings(name) if name in RANKS else [name])
    if name in RANKS:
        assert mounted == [f"/{profile}", "/data"]
        assert service["working_dir"] == f"/{profile}"
    places = {value for variable, value in service["environment"].items() if variable == "DATA_DIR"}
    assert places <= set(mounted)
    said = (ROOT / "docs" / f"{'containers' if name in RANKS else profile}.md").read_text()
    assert all(target in places or f"`{target}`" in said for target in mounted)


# ---- compose.yaml, the Makefile and the Dockerfile


@pytest.mark.parametrize("name", SERVICES)
def test_the_image_is_the_one_that_make_builds(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == only("USER")
    defaults = dict(re.findall(r"^(IMAGE|TORCH) \?= (\S+)$", MAKEFILE, re.MULTILINE))
    assert filled(service["image"]) == f"{defaults['IMAGE']}:{defaults['TORCH']}"
    declared = {rest.partition("=")[0]: rest.partition("=")[2] for word, rest in EVERYTHING if word == "ARG"}
    assert set(service["build"]["args"]) <= set(declared)
    for argument, value in service["build"]["args"].items():
        assert filled(value) == declared[argument], argument
    assert ROOT / service["build"]["context"] == ROOT
    assert (ROOT / service["build"]["dockerfile"]).read_text() == DOCKERFILE
    assert set(re.findall(r"--build-arg ([A-Z_]+)", MAKEFILE)) <= set(declared)


def test_make_has_a_target_for_every_job_and_profile() -> None:
    """Those with containers build the image first, unless it is the user's, and make the token."""
    profiles = {service["profiles"][0] for service in SERVICES.values()}
    assert profiles == {*registry.JOBS, *GENERIC}
    for profile in profiles:
        recipe = re.search(rf"^up-{profile}: .*\$\(BUILT\) ## .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        assert recipe, f"no target up-{profile} that builds the image first"
        (first,) = [name for name, service in SERVICES.items() if service["profiles"] == [profile] and is_first(name)]
        assert f"docker/up.sh {profile} {first}\n" in recipe.group(1)
    for job in set(registry.JOBS) - set(GENERIC):
        recipe = re.search(rf"^run-{job}: .* ## .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        assert recipe, f"no target run-{job}"
        assert f"/rolecall run {job}\n" in recipe.group(1)
    assert re.search(r"^BUILT := \$\(if \$\(filter rolecall,\$\(IMAGE\)\),image\)$", MAKEFILE, re.MULTILINE)
    assert re.search(r"^token: ## .*\n\t@docker/token\.sh$", MAKEFILE, re.MULTILINE)
    text = (ROOT / "docker" / "up.sh").read_text()
    assert 0 < text.index('/token.sh"') < text.index("describe --variables")
