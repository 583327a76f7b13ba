"""`rolecall run --on slurm`: the script that it submits, how it follows the job, and what it says if it cannot."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rolecall import __main__, config, placement
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.errors import USAGE
from rolecall.launch import followed, on_batch_host

ROOT = Path(__file__).resolve().parents[2]
SBATCH = """#!/bin/bash
[ "$1" = --parsable ] || exit 1
[ -z "$REFUSED" ] || { echo "sbatch: error: $REFUSED" >&2; exit 1; }
printf '0: one\\n2: two\\nsrun: error: three\\n' > "$(dirname "$2")/slurm-71.out"
dirname "$2" > "$0.folder"
echo "71;cluster"
"""
# prints an answer after the other, and then the job has ended
SQUEUE = """#!/bin/bash
answers=$(dirname "$0")/answers
head -n 1 "$answers"
[ "$(wc -l < "$answers")" -gt 1 ] && sed -i 1d "$answers" && exit
[ -e "$answers.last" ] || echo 3 > "$(cat "$(dirname "$0")/sbatch.folder")/slurm-exit-code"
"""
SCONTROL = "#!/bin/bash\necho NodeName=$3 NodeAddr=10.0.0.7\n"
# a guard ends at once, and the step as soon as there were enough of them
SRUN = """#!/bin/bash
here=$(dirname "$0")
case "$*" in *--guard*) echo "$@" >> "$here/guards"; exit;; esac
touch "$here/guards"
for _ in {1..1000}; do [ "$(wc -l < "$here/guards")" -ge "$GUARDS" ] && exit 5; sleep 0.02; done
"""
# the step is there at the second look
SATTACH = """#!/bin/bash
[ -e "$0.asked" ] || { touch "$0.asked"; exit 1; }
echo "  Node 0 (a1), 1 task(s): 0"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {field for job in registry.JOBS for field in registry.get(job).settings.model_fields}:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins of Slurm's commands on the PATH, in this folder."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{config.exported('PATH')}")
    monkeypatch.setattr(followed, "POLL_SECONDS", 0.01)
    return folder


def squeue(folder: Path, *answers: str, ends: bool = True) -> None:
    """Has squeue give these answers; the job ends with the last one, if it `ends` by itself."""
    (folder / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    if not ends:
        (folder / "answers.last").touch()


def script(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert __main__.main(["run", *words[:1], "--on=slurm", "--dry-run", *words[1:]]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return text


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def exports(text: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert __main__.main(["run", *words[:1], "--on=slurm", *words[1:]]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_script_has_a_task_for_each_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = script(capsys, "rl", "--observers", "4", "--nodes=2", "--sbatch", "--time=1:00:00 -p gpu")
    assert options(text)[:2] == ["--ntasks=5", "--job-name=rl"]
    assert re.fullmatch(rf"--output={tmp_path}/runs/rl-[\d-]+/slurm-%j.out", options(text)[2])
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
    parts = [f" --het-group={number} --ntasks={number + 1} .* -- .* rank --restarts 5 " for number in range(2)]
    assert re.search(":".join(parts), text)


def test_ranks_of_a_lost_node_move_to_the_emptiest_of_their_component() -> None:
    layout = """Job step layout:
  3 tasks, 2 nodes (a1,a2)

  Node 0 (a1), 2 task(s): 0 1
  Node 1 (a2), 1 task(s): 2
"""
    places = on_batch_host.places_of([layout, "  Node 0 (b1), 1 task(s): 0\n"])
    assert places == [("a1", 0), ("a1", 0), ("a2", 0), ("b1", 1)]
    said = "71|a[1,3]\n72|b1\n"
    nodes = on_batch_host.nodes_of(["71", "72"], said)
    assert on_batch_host.moves_of(places, nodes) == {2: "a3"}
    assert on_batch_host.moves_of(places, [["a2", "a3"], ["b1"]]) == {0: "a3", 1: "a2"}
    words = ["-c", "2", "--", "rank", "5", ":", "--", "rank"]
    assert on_batch_host.parts_of(words) == [(["-c", "2"], ["rank", "5"]), ([], ["rank"])]


@pytest.mark.parametrize(("guards", "seconds"), [(1, 1e9), (2, 0.0)], ids=["from the first look", "again if it ended"])
def test_a_guard_starts_on_another_node(
    monkeypatch: pytest.MonkeyPatch, slurm: Path, guards: int, seconds: float
) -> None:
    for name, text in {"srun": SRUN, "sattach": SATTACH}.items():
        (slurm / name).write_text(text)
        (slurm / name).chmod(0o755)
    squeue(slurm, "71|a[1-2]", ends=False)
    monkeypatch.setenv("GUARDS", str(guards))
    for name, value in {"ASK_SECONDS": seconds, "START_SECONDS": 0.01, "POLL_SECONDS": 0.01}.items():
        monkeypatch.setattr(on_batch_host, name, value)
    assert on_batch_host.Batch(["71"], "a1", ["--ntasks=1", "--", "rank"]).run() == 5
    for line in (slurm / "guards").read_text().splitlines():
        assert "--overlap --nodes=1 --ntasks=1 --nodelist=a2 " in line
        assert line.endswith(" --guard 71 a1")


def test_a_rank_that_has_moved_has_its_place() -> None:
    variables = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    variables |= {"SLURM_STEP_NODELIST": "a3", "SLURMD_NODENAME": "a3", "SLURM_HET_SIZE": "2"}
    command = [*on_batch_host.moved(2, 4, "71", "a1"), "env"]
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    place = placement.find(dict(line.split("=", 1) for line in printed.splitlines()))
    first = variables | {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "a[1-2]",
    }
    assert place == placement.find({name: value for name, value in first.items() if name != "SLURM_HET_SIZE"})


def test_needs_of_roles_are_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    roles = "Role('lead', lead), Role('worker', lead, count=2, cpus=1.5, memory_mb=4096)"
    (tmp_path / "needy.py").write_text(f"from rolecall import Job, Role\ndef lead(c): ...\nJOB = Job([{roles}])\n")
    lead, worker = " ".join(options(script(capsys, "needy.py"))).split(" hetjob ")
    assert "cpus" not in lead
    assert worker.endswith("--cpus-per-task=2 --mem-per-cpu=1954M")
    assert options(script(capsys, "needy.py", "--role=worker=--mem=8G"))[-1] == "--mem=8G"  # sbatch refuses both
    (tmp_path / "alone.py").write_text(
        "from rolecall import Job, Role\ndef lead(c): ...\nJOB = Job([Role('lead', lead, cpus=2)])\n"
    )
    text = script(capsys, "alone.py", "--nodes=1")
    assert "--cpus-per-task=2" in options(text)
    assert "het" not in text  # srun finds no component in a job of one


def test_the_job_is_submitted_and_followed(capfd: pytest.CaptureFixture[str], slurm: Path, tmp_path: Path) -> None:
    squeue(slurm, "PENDING|Resources||71|", "RUNNING|None|node7|71|node[7-8]")
    assert __main__.main(["run", "rl", "--on=slurm", "--plain", "--checkpoint-dir=kept"]) == 3
    said = capfd.readouterr().out.splitlines()
    kept = tmp_path / "kept"
    assert f"rolecall: submitted job 71 of Slurm; its script and output are in {kept}" in said
    assert "waiting: job 71 of Slurm is pending (Resources)" in said
    assert any(line.startswith("rolecall: this run as a page: http://10.0.0.7:") for line in said)
    assert {"agent_0: one", "observer_1: two", "slurm: srun: error: three"} <= {*said}
    assert said[-1] == f"rolecall: failed (exit code 3); logs in {kept}"
    assert sorted(path.name for path in kept.iterdir()) == ["logs", "slurm-71.out"]


def test_a_job_that_slurm_has_ended_says_so(
    capfd: pytest.CaptureFixture[str], slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.launch.slurm.SETTLE_SECONDS", 0.0)
    squeue(slurm, "TIMEOUT|None|node7|71|node7", ends=False)
    assert __main__.main(["run", "rl", "--on=slurm", "--plain", "--name=kept"]) == 1
    assert "rolecall: job 71 of Slurm is timeout; the same command resumes it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rl", "--nodes=4"], "--nodes=4: the job has 3 ranks, at least one on each node"),
        (["rl", "--nodes=0"], "--nodes=0: the job has 3 ranks"),
        (["rl", "--nodes=2", "--role=agent=--mem=1G"], "--nodes: roles have options or needs of their own"),
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
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch: cannot be run (No such file or directory); use --on slurm on a node" in refused(capfd, "rl")


def test_what_sbatch_refuses_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, slurm: Path
) -> None:
    monkeypatch.setenv("REFUSED", "Batch job submission failed: Invalid account")
    assert re.search(r"sbatch --parsable \S+job\.sh: .*Invalid account", refused(capfd, "rl"))


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
