"""The image: what is in it, and what it does with wrong settings."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from rolecall.declare import registry
from tests import commands
from tests.e2e.containers import DEADLINE, IMAGE, ROOT, docker
from tests.integration.cluster import until

TOKEN = {"JOB_TOKEN": "a-token-of-more-than-128-bits"}
LOCKED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def start(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = [part for name, value in settings.items() for part in ("--env", f"{name}={value}")]
    return commands.run(["docker", "run", "--rm", *LOCKED, *variables, IMAGE, *arguments], timeout=DEADLINE)


def test_it_is_small_and_says_what_it_is() -> None:
    image = json.loads(docker("image", "inspect", IMAGE))[0]
    assert image["Size"] < 1.25e9
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "rolecall"
    assert labels["org.opencontainers.image.version"]
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Entrypoint"] == ["/usr/bin/tini", "--", "python", "-m", "rolecall"]
    assert image["Config"]["Cmd"] == ["rank", "--restarts", "5"]


def test_it_holds_no_compiler_no_pip_and_no_cache() -> None:
    script = (
        "for tool in gcc cc g++ ld make pip pip3 curl wget; do command -v $tool; done;"
        "find ~root/.cache /var/lib/apt/lists /var/cache/apt /usr/include/c++ /wheels -type f 2>/dev/null;"
        "python -c 'import pip' 2>/dev/null && echo pip; grep 10001 /etc/passwd"
    )
    found = docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", script, check=False)
    assert found == "rolecall:x:10001:10001::/tmp:/usr/sbin/nologin"


def test_its_commands_run() -> None:
    jobs = start("jobs")
    assert jobs.returncode == 0, jobs.stderr
    assert "observer x OBSERVERS" in jobs.stdout
    assert "trainer x TRAINERS" in jobs.stdout


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, f"rolecall: JOB='': is missing ({', '.join(registry.JOBS)}, FILE.py or package.module)"),
        ({"JOB": "rl", "ROLE": "agent"}, "rolecall: JOB_TOKEN is not set: "),
        ({"JOB": "rl", "ROLE": "observer", "ENV_ID": "Nope-v0", **TOKEN}, "rolecall: ENV_ID=Nope-v0: cannot be made "),
        (
            {"JOB": "rl", "ROLE": "agent", **TOKEN},
            "rolecall: CHECKPOINT_DIR=/checkpoints: cannot be written (Read-only file system)",
        ),
    ],
)
def test_wrong_settings_are_one_line_and_code_2(settings: dict[str, str], line: str) -> None:
    done = start(**settings)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1, done.stderr


# ---- pushed


@pytest.fixture(scope="module")
def registry_address() -> Iterator[str]:
    """An empty registry on loopback, where the engine asks for no TLS."""
    recipe = (ROOT / "tests" / "e2e" / "registry.Dockerfile").read_bytes()
    build = ["docker", "build", "--quiet", "--tag", "rolecall-test-registry", "-"]
    done = subprocess.run(build, input=recipe, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    container = docker("run", "--detach", "--rm", "--publish", "127.0.0.1::5000", "rolecall-test-registry")
    try:
        address = docker("port", container, "5000")
        until(lambda: "not found" in inspected(f"{address}/nothing:here").stderr, "the registry's answer")
        yield address
    finally:
        docker("rm", "--force", "--volumes", container)


def inspected(reference: str) -> subprocess.CompletedProcess[str]:
    """What a registry has under a name."""
    return commands.run(
        ["docker", "buildx", "imagetools", "inspect", reference, "--format", "{{json .Manifest}}"], timeout=DEADLINE
    )


def attests() -> bool:
    """Whether the selected builder can attach an SBOM. One that cannot refuses `make push` without `ATTEST=`."""
    driver = re.search(r"^Driver: *(.*)", docker("buildx", "inspect"), re.MULTILINE)
    assert driver
    return driver.group(1) != "docker" or "io.containerd.snapshotter" in docker("info", "--format", "{{.DriverStatus}}")


@pytest.mark.timeout(1200)
def test_a_pushed_image_runs_from_its_digest(registry_address: str) -> None:
    name = f"{registry_address}/team/rolecall"
    platform = docker("version", "--format", "{{.Server.Os}}/{{.Server.Arch}}")
    command = [
        "make",
        "--silent",
        "push",
        f"IMAGE={name}",
        f"PLATFORMS={platform}",
        *([] if attests() else ["ATTEST="]),
    ]
    done = commands.run(command, timeout=900)
    assert done.returncode == 0, done.stderr
    (line,) = yaml.safe_load(done.stdout)["images"]
    pinned = f"{name}@{line['digest']}"
    assert line == {"name": "rolecall", "newName": name, "digest": pinned.partition("@")[2]}
    index = json.loads(inspected(f"{name}:cpu").stdout)
    assert index["digest"] == line["digest"]
    if attests():  # one platform without an attestation needs no index
        built = {"/".join((one["platform"]["os"], one["platform"]["architecture"])) for one in index["manifests"]}
        assert built - {"unknown/unknown"} == {platform}  # attestations are of no platform
    docker("pull", "--quiet", pinned)
    try:
        usage = docker("run", "--rm", "--entrypoint", "python", pinned, "-m", "rolecall", "--help")
        assert usage.startswith("usage: rolecall")
        labels = json.loads(docker("image", "inspect", pinned))[0]["Config"]["Labels"]
        assert labels["org.opencontainers.image.title"] == "rolecall"
    finally:
        docker("image", "rm", "--force", pinned)
