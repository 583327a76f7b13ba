"""`make doctor` and the component of pods: who is examined, and with which settings. Needs no Docker."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rolecall.observe.doctor import command
from tests import commands
from tests.contracts.containers import ROOT
from tests.contracts.manifests import K8S, component, extended, rendering, validate
from tools.jobs import Object

PAGE = (ROOT / "docs" / "doctor.md").read_text()
KINDS = ("StatefulSet", "Job")
# of a rank alone
OF_THE_RANK = {"name", "ports", "startupProbe", "livenessProbe", "readinessProbe"}


def templates(objects: list[Object]) -> dict[str, dict[str, Any]]:
    """The pods' specifications, by the name of what makes them."""
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects if one["kind"] in KINDS}


@pytest.mark.parametrize("name", ["ps-trainers-cuda", "hybrid-indexed"])
def test_the_component_examines_each_rank_as_it_is(name: str, tmp_path: Path) -> None:
    plain, objects = rendering(name).objects, extended(tmp_path, K8S / name, **component(tmp_path, "doctor"))
    assert [one for one in plain if one["kind"] not in KINDS] == [one for one in objects if one["kind"] not in KINDS]
    assert templates(objects).keys() == templates(plain).keys()
    for one in objects:
        validate(one)
    assert "components:\n  - ../k8s/components/doctor\n" in PAGE
    for key, spec in templates(objects).items():
        (doctor,) = spec.pop("initContainers")
        assert spec == templates(plain)[key]
        (rank,) = spec["containers"]
        assert doctor.pop("name") == "doctor"
        shell, flag, script = doctor.pop("command")
        assert (shell, flag) == ("sh", "-c")
        assert doctor == {field: value for field, value in rank.items() if field not in OF_THE_RANK}
        words = re.fullmatch(r"python -m rolecall doctor (.*); true", script)  # the rank starts whatever it says
        assert words
        assert command.parser().parse_args(words[1].split()).wait == 60.0


# ---- make doctor

DOCKER = """#!/bin/sh
# stands for docker: lists the containers, and says what it is asked to run
case "$*" in
  *" ps --all "*) cat {containers} ;;
  exec*) echo "docker $*"; exit {running} ;;
  *) echo "docker $*"; exit {ended} ;;
esac
"""


def doctor(directory: Path, containers: str, running: int = 0, ended: int = 0) -> subprocess.CompletedProcess[str]:
    (directory / "containers").write_text(containers)
    script = DOCKER.format(containers=directory / "containers", running=running, ended=ended)
    environment = commands.stand_in(directory / "bin", "docker", script=script)
    return commands.run([ROOT / "docker" / "ranks.sh", "doctor", "rl"], env=environment)


def test_make_doctor_examines_in_the_place_of_containers_that_have_ended(tmp_path: Path) -> None:
    listed = "".join(f"observer restarting i{number} rolecall-observer-{number}\n" for number in (1, 2))
    done = doctor(tmp_path, listed + "agent running i0 rolecall-agent-1\n", ended=2)
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("docker")] == [
        "docker exec i0 python -m rolecall doctor",
        "docker compose --profile rl run --rm --no-deps --no-TTY --use-aliases observer doctor",
    ]


def test_make_doctor_without_containers(tmp_path: Path) -> None:
    done = doctor(tmp_path, "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rolecall: there is no container of rl: make up-rl\n"
