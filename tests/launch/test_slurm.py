"""`rolecall launch slurm`: the script that it writes, and what it says if it cannot submit one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rolecall import __main__, config
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.errors import USAGE

ROOT = Path(__file__).resolve().parents[2]
SBATCH = """#!/bin/bash
[ "$1" = --parsable ] || exit 1
[ -z "$REFUSED" ] || { echo "sbatch: error: $REFUSED" >&2; exit 1; }
cp "$2" "$0.got"
echo "71;cluster"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {field for job in registry.JOBS for field in registry.get(job).settings.model_fields}:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in on the PATH; the script that it was given."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{config.exported('PATH')}")
    return program.with_name("sbatch.got")


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert __main__.main(["launch", "slurm", "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return text


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def exports(text: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert __main__.main(["launch", "slurm", *words]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_script_has_a_task_for_each_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = script(capsys, "rl", "--observers", "4", "--nodes=2", "--sbatch", "--time=1:00:00 -p gpu")
    assert options(text)[:2] == ["--ntasks=5", "--job-name=rl"]
    assert {"--nodes=2", "--time=1:00:00 -p gpu", "--requeue", "--signal=TERM@60"} <= {*options(text)}
    variables = exports(text)
    assert (variables["JOB"], variables["OBSERVERS"]) == ("rl", "4")
    assert re.fullmatch(rf"{tmp_path}/runs/rl-[\d-]+", variables["CHECKPOINT_DIR"])
    assert variables["JOB_TOKEN_FILE"] == f"{variables['CHECKPOINT_DIR']}/job-token"
    assert not [*tmp_path.iterdir()]


def test_the_job_has_the_settings_of_the_environment_and_of_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OBSERVERS", "3")
    monkeypatch.setenv("ENV_ID", "Acrobot-v1")
    monkeypatch.setenv("PORT", "30000")  # of this process
    variables = exports(script(capsys, "rl", "--env-id=it's", "--checkpoint-dir", "kept", "--tls=off"))
    assert (variables["OBSERVERS"], variables["ENV_ID"]) == ("3", "'it'\"'\"'s'")
    assert variables["CHECKPOINT_DIR"] == str(tmp_path / "kept")
    assert not {"PORT", "JOB_TOKEN_FILE"} & variables.keys()


def test_a_program_without_a_job_is_launched_too(capsys: pytest.CaptureFixture[str]) -> None:
    program = ROOT / "examples" / "rnn.py"
    text = script(capsys, f"{program}:run_worker", "--ranks", "3", "--", "--steps", "2")
    variables = exports(text)
    assert options(text)[0] == "--ntasks=3"
    assert (variables["JOB"], variables["SCRIPT"]) == ("script", f"{program}:run_worker")
    assert variables["SCRIPT_ARGS"] == "'--steps 2'"


def test_roles_with_options_are_components(capsys: pytest.CaptureFixture[str]) -> None:
    text = script(capsys, "rl", "--role=observer=--mem=4G", "--role", "observer=-c 2", "--sbatch=--time=5")
    agent, observer = " ".join(options(text)).split(" hetjob ")
    assert agent.startswith("--ntasks=1 ")
    assert observer.startswith("--ntasks=2 ")
    assert "--time=5" in agent
    assert "--mem" not in agent
    assert observer.endswith("--time=5 --mem=4G -c 2")
    assert re.search(r"srun .*--het-group=0 .* rank --restarts 5 : --het-group=1 .* rank --restarts 5 ", text)


def test_the_script_is_written_and_submitted(capsys: pytest.CaptureFixture[str], sbatch: Path, tmp_path: Path) -> None:
    assert __main__.main(["launch", "slurm", "rl", "--checkpoint-dir=kept"]) == 0
    assert "submitted job 71; checkpoints and script in" in capsys.readouterr().out
    assert sbatch.read_text() == (tmp_path / "kept" / "job.sh").read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rl", "--nodes=4"], "--nodes=4: the job has 3 ranks, at least one on each node"),
        (["rl", "--nodes=0"], "--nodes=0: the job has 3 ranks"),
        (["rl", "--nodes=2", "--role=agent=--mem=1G"], "--nodes: with --role, name the nodes of each role"),
        (["rl", "--role=trainer=--mem=1G"], r"--role=trainer=--mem=1G: no role 'trainer' in rl \(agent, observer\)"),
        (["rl", "--role=agent"], "--role=agent='': is no option of sbatch, such as --time"),
        (["rl", "--sbatch=time"], "--sbatch='time': is no option of sbatch"),
        (["rl", "--sbatch=--time=1\nrm x"], "is no option of sbatch"),
        (["rl", "--observer=4"], "--observer: no such flag .did you mean --observers"),
        (["rl", "--tls-cert=a"], "TLS_KEY and TLS_CA missing"),
        (["unknown"], "JOB='unknown': no such job"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], problem: str) -> None:
    assert re.match(f"rolecall: .*{problem}", refused(capsys, *words))


def test_a_token_in_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_TOKEN", "x" * 16)
    assert "JOB_TOKEN: Slurm keeps the environment of a job" in refused(capsys, "rl", "--dry-run")


def test_without_sbatch_nothing_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch: no such program; run this on a node of a Slurm cluster" in refused(capsys, "rl")


def test_what_sbatch_refuses_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sbatch: Path
) -> None:
    monkeypatch.setenv("REFUSED", "Batch job submission failed: Invalid account")
    assert re.search(r"sbatch \S+job\.sh: .*Invalid account", refused(capsys, "rl"))


def test_a_rank_that_srun_has_not_started_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_STEP_ID", config.DESCRIPTION):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"JOB": "rl", "TLS": "off", "SLURM_JOB_ID": "12"}.items():
        monkeypatch.setenv(name, value)
    assert __main__.main(["rank"]) == USAGE
    assert "SLURM_JOB_ID=12: srun has not started this rank; run `srun rolecall rank`" in capsys.readouterr().err
    assert Settings().role == ""
