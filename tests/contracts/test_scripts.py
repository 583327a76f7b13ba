"""The scripts of docker/, which make calls, with programs that stand in for Docker: the token, the user's own."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rolecall import config, telemetry
from rolecall.config import Settings
from rolecall.declare import registry
from tests import commands
from tests.contracts.containers import COMPOSE, MAKEFILE, ROOT, SCRIPTS, filled

TOKEN_SCRIPT = ROOT / "docker" / "token.sh"
TOOLS = "bash env head base64 tr sed tail dirname mkdir ls mktemp chmod ln rm"  # of every system


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.suffix == ".sh"], ids=lambda path: path.name)
def test_make_can_run_the_scripts(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert f"{script.relative_to(ROOT)}" in MAKEFILE
    metrics = {row[0] for job in registry.JOBS for row in telemetry.catalogue(registry.get(job).metrics)}
    assert set(re.findall(r"\brolecall_[a-z0-9_]+", script.read_text())) <= metrics


# ---- docker/token.sh


def make_token(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return commands.run([TOKEN_SCRIPT, *arguments], cwd=folder, env={"PATH": os.environ["PATH"], **variables})


def is_protected(file: Path) -> bool:
    """Whether a container's user can read the mounted file, and no other user of the host gets at it."""
    return (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o444, 0o700)


@pytest.mark.parametrize("variables", [{}, {"JOB_TOKEN_SOURCE": "a/b/token"}], ids=["default", "chosen"])
def test_a_token_is_made_once(tmp_path: Path, variables: dict[str, str]) -> None:
    """Compose reads `.env`, so the script does too; it needs no OpenSSL; and of several at once, one makes the file."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / ".env").write_text("".join(f"OBSERVERS=3\n{name}={value}\n" for name, value in variables.items()))
    file = tmp_path / (variables.get("JOB_TOKEN_SOURCE") or filled(COMPOSE["secrets"]["job-token"]["file"]))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: make_token(tmp_path, PATH=str(tools)), range(2)))
    done = max(both, key=lambda one: len(one.stdout))
    assert [one.returncode for one in both] == [0, 0]
    token = file.read_text()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"rolecall: the ranks' token is in {file.relative_to(tmp_path)}\n"
    assert is_protected(file)
    config.load(Settings, job_token=token)  # which refuses a short one
    assert len(token) >= 43
    assert make_token(tmp_path).stdout == ""
    assert file.read_text() == token
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_token_is_never_where_others_can_read_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = make_token(tmp_path, JOB_TOKEN_SOURCE="token")
    assert done.returncode == 2
    assert done.stderr.startswith("rolecall: JOB_TOKEN_SOURCE=token: others on this machine can enter its folder; ")
    assert not list(tmp_path.iterdir())


def test_a_token_for_a_pipe_is_another_each_time(tmp_path: Path) -> None:
    one, two = make_token(tmp_path, "-"), make_token(tmp_path, "-")
    assert re.fullmatch(r"\S{43,}", one.stdout)  # no end of line either
    assert one.stdout != two.stdout
    assert not list(tmp_path.iterdir())


# ---- docker/up.sh

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


@pytest.fixture
def up(tmp_path: Path) -> Any:
    """Runs docker/up.sh, with a docker that only says what it is asked for."""
    program = commands.stand_in(tmp_path / "bin", "docker", script=DOCKER)
    (tmp_path / "my jobs").mkdir()
    for file in ("pi.py", "my jobs/pi.py"):
        (tmp_path / file).touch()

    def run(profile: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**program, "TMPDIR": str(tmp_path), **variables}
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
