"""What runs the user's own: compose.yaml's profiles `job` and `script` with the script that starts them. Needs no
Docker.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.contracts.containers import COMPOSE, GENERIC, RANKS, ROOT, filled, image_environment, is_first, settings_of
from tests.contracts.test_compose import NOT_PASSED

PLACES = {"CHECKPOINT_DIR": "/checkpoints/", "DATA_DIR": "/data", "JOB_TOKEN_FILE": "/run/secrets/job-token"}
# what the shell or docker/up.sh says, and what each profile fixes
FIXED = {
    "job": {"JOB": "/job", **PLACES},
    "script": {"JOB": "script", **PLACES, "SCRIPT": "/script", "RANKS": "2"},
}
# stands in for docker: its arguments and what compose would put in, a line each
DOCKER = """#!/usr/bin/env bash
end() { tr ';' '\\n' <<<"${ENDS:-0 exited 0}" | sed -n "$(wc -l <"$TMPDIR/waits")p" | cut -d ' ' -f "$1"; }
case "$*" in
  *"describe --variables"*) printf 'SAMPLERS\\nSTEPS\\n' ;;
  *"describe --ranks"*) echo "${SAID:-3}" ;;
  "image inspect rolecall:cpu" | "image inspect mine:cpu") ;;
  "image inspect"*) exit 1 ;;
  *" up "*) echo "up folder=$JOB_FOLDER name=$JOB_NAME job=$JOB_TARGET script=$SCRIPT ranks=$RANKS others=$OTHERS" >&2
    [ -z "$JOB_VARIABLES" ] || echo "variables: $(tr '\\n' ' ' <"$JOB_VARIABLES")" >&2 ;;
  *" ps "*) echo rank0 ;;
  # ENDS: of each end of the container what `docker wait` says, its state and its exit code then
  "wait rank0") echo wait >>"$TMPDIR/waits"; end 1 ;;
  "inspect "*) echo "$(end 2) $(end 3)" ;;
  *" stop") echo stopped >&2 ;;
esac
"""


@pytest.mark.parametrize("profile", GENERIC)
def test_a_profile_has_rank_0_and_the_others(profile: str) -> None:
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


@pytest.mark.parametrize("name", RANKS)
def test_every_setting_is_passed_and_few_have_a_value_here(name: str) -> None:
    profile, environment = RANKS[name]["profiles"][0], RANKS[name]["environment"]
    known = {field.upper() for field in settings_of(name).model_fields} | set(FIXED[profile])
    extra = {"SCRIPT_ARGS"} if profile == "script" else set()
    assert set(environment) == known - {*NOT_PASSED, "ROLE"} | set(FIXED[profile]) | extra | (
        {"RANK"} if is_first(name) else set()
    )
    valued = {variable: filled(value) for variable, value in environment.items() if value is not None}
    assert {key: value for key, value in valued.items() if key not in {"MASTER_ADDR", "RANK"}} == FIXED[profile]
    assert valued["MASTER_ADDR"] == f"{profile}.rpc"
    variables = ["${JOB_VARIABLES:-/dev/null}"] if profile == "job" else None  # the names of a job's own settings
    assert RANKS[name].get("env_file") == variables


@pytest.mark.parametrize("name", RANKS)
def test_the_users_files_are_read_only_and_every_rank_may_write_beside_the_checkpoints(name: str) -> None:
    service, profile = RANKS[name], RANKS[name]["profiles"][0]
    volumes = [filled(volume).split(":") for volume in service["volumes"]]
    written = [(source, target) for source, target, *options in volumes if options != ["ro"]]
    assert written == [(f"{profile}-checkpoints", image_environment()["CHECKPOINT_DIR"])]
    assert [target for _, target, *options in volumes if options == ["ro"]] == [f"/{profile}", "/data"]
    assert service["working_dir"] == f"/{profile}"
    assert {source for source, *_ in volumes} <= set(COMPOSE["volumes"])
    said = (ROOT / "docs" / "containers.md").read_text()
    assert all(f"`{target}`" in said for _, target, *_ in volumes)


# ---- docker/up.sh


@pytest.fixture
def up(tmp_path: Path) -> Any:
    """Runs docker/up.sh, with a docker that only says what it is asked for."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    (tmp_path / "my jobs").mkdir()
    for file in ("pi.py", "my jobs/pi.py"):
        (tmp_path / file).touch()

    def run(profile: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), **variables}
        return commands.run([ROOT / "docker" / "up.sh", profile, f"{profile}-rank0"], cwd=tmp_path, env=environment)

    return run


@pytest.mark.parametrize(
    ("variables", "folder", "said"),
    [
        ({"JOB_FILE": "pi.py"}, "", "name=pi job=/job/pi.py script= ranks= others=2"),
        (
            {"JOB_FILE": "./my jobs/pi.py:OTHER"},
            "/my jobs",
            "name=pi-other job=/job/pi.py:OTHER script= ranks= others=2",
        ),
        ({"JOB_FILE": "pi.py", "SAID": "1"}, "", "name=pi job=/job/pi.py script= ranks= others=0"),
        ({"JOB_FILE": "package.pi:OTHER"}, None, "name=pi-other job=package.pi:OTHER script= ranks= others=2"),
        ({"SCRIPT": "./pi.py:run"}, "", "name=pi-run job= script=/script/pi.py:run ranks=2 others=1"),
        ({"SCRIPT": "pi.py", "RANKS": "4"}, "", "name=pi job= script=/script/pi.py ranks=4 others=3"),
    ],
)
def test_up_mounts_the_file_and_counts_the_ranks(
    up: Any, tmp_path: Path, variables: dict[str, str], folder: str | None, said: str
) -> None:
    done = up("job" if "JOB_FILE" in variables else "script", **variables)
    assert done.returncode == 0, done.stderr
    mounted = "" if folder is None else f"{tmp_path}{folder}"
    assert f"up folder={mounted} {said}\n" in done.stderr
    assert ("variables: SAMPLERS STEPS" in done.stderr) == ("JOB_FILE" in variables)
    # no file is left but the token
    assert sorted(path.name for path in tmp_path.iterdir()) == [".secrets", "bin", "my jobs", "pi.py", "waits"]


@pytest.mark.parametrize(
    ("ends", "code", "waits"),
    [
        ("0 exited 0", 0, 1),
        ("2 running 0", 2, 1),
        ("1 restarting 1;137 running 0;0 exited 0", 0, 3),
        ("0 running 0;2 exited 2", 2, 2),  # it was restarted before it was asked for
    ],
)
def test_up_ends_as_rank_0_does(up: Any, tmp_path: Path, ends: str, code: int, waits: int) -> None:
    done = up("script", SCRIPT="pi.py", ENDS=ends)
    assert done.returncode == code, done.stderr
    assert ("stopped" in done.stderr) == (code != 0)
    assert len((tmp_path / "waits").read_text().splitlines()) == waits


@pytest.mark.parametrize(
    ("profile", "variables", "line"),
    [
        ("job", {}, "JOB_FILE is missing: it names a file, such as ./pi.py"),
        ("script", {}, "SCRIPT is missing: it names a file, such as ./pi.py"),
        ("job", {"JOB_FILE": "./e.py"}, "JOB_FILE=./e.py: there is no such file"),
        (
            "job",
            {"JOB_FILE": "pi.py", "IMAGE": "none"},
            "there is no image none:cpu: make image builds rolecall:cpu, and IMAGE= names one of your own",
        ),
        ("script", {"SCRIPT": "pi.py", "RANKS": "two"}, "RANKS='two': is no number of ranks"),
    ],
)
def test_what_cannot_be_started_is_one_line_and_code_2(
    up: Any, profile: str, variables: dict[str, str], line: str
) -> None:
    done = up(profile, **variables)
    assert (done.returncode, done.stderr) == (2, f"rolecall: {line}\n")


def test_make_asks_for_the_file_before_it_builds() -> None:
    for profile, variable in (("job", "JOB_FILE"), ("script", "SCRIPT")):
        mine = (variable, "MAKEFLAGS", "MAKELEVEL")  # of the make that runs the tests
        environment = {key: value for key, value in os.environ.items() if key not in mine}
        done = commands.run(["make", f"up-{profile}"], env=environment)
        assert done.returncode == 2
        assert done.stderr.splitlines()[0] == f"rolecall: {variable} is missing: it names a file, such as ./pi.py"
        assert not done.stdout
