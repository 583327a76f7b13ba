"""The command line: a flag for every setting, what it overrides, and how its value reaches the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall import __main__, config
from rolecall.config import Settings
from rolecall.declare import describe, flags, registry
from rolecall.errors import USAGE, UsageError
from rolecall.fields import variables
from rolecall.gang.protocol import name_of
from rolecall.jobs.rl import RlSettings
from rolecall.launch.local import LocalRun
from rolecall.launch.rank_process import RankProcess
from rolecall.rank import fork_server

Started = list[RankProcess]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment has none of the variables, and CHECKPOINT_DIR of runs is in a directory of the test."""
    for name in {field for job in registry.JOBS for field in registry.get(job).settings.model_fields}:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Started:
    """The ranks that `rolecall run` would start."""
    planned: Started = []

    async def run(self: LocalRun) -> int:
        planned.extend(self.ranks)
        return 0

    monkeypatch.setattr(LocalRun, "run", run)
    return planned


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        __main__.main([*arguments, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("job", registry.JOBS)
def test_every_setting_has_a_flag_with_its_description(capsys: pytest.CaptureFixture[str], job: str) -> None:
    text = help_of(capsys, "run", job)
    fields = {name: field for name, field in registry.get(job).settings.model_fields.items() if name != "role"}
    for name, field in fields.items():
        flag = f"--{name.replace('_', '-')} "
        assert (flag in text) == (name not in flags.NO_FLAG), name
        assert name in flags.NO_FLAG or (field.description or "") in text, name
    jobs, shared = f"settings of {job}: ", "settings of every job: "
    first = next(name for name in fields if name not in Settings.model_fields)
    assert text.index("--plain") < text.index(jobs) < text.index(f"--{first.replace('_', '-')}")
    assert text.index(jobs) < text.index(shared) < text.index("--checkpoint-dir ")


def test_a_flag_wins_over_its_variable_and_reaches_every_rank(ranks: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_ENVS", "5")
    monkeypatch.setenv("GAMMA", "0.5")
    given = ["--num-envs", "7", "--observers=3", "--env-id", "a:b-v0,c", "--lr", "1e-3", "--resume", "0", "--plain"]
    assert __main__.main(["run", "rl", *given]) == 0
    assert [rank.name for rank in ranks] == ["agent_0", "observer_0", "observer_1", "observer_2"]
    for rank in ranks:
        for name in RlSettings.model_fields:
            monkeypatch.delenv(name.upper(), raising=False)
        for name, value in rank.environment.items():
            monkeypatch.setenv(name, value)
        settings = config.load(RlSettings)
        assert (settings.num_envs, settings.observers, settings.lr, settings.gamma) == (7, 3, 1e-3, 0.5)
        assert (settings.env_id, settings.resume, settings.job) == ("a:b-v0,c", False, "rl")
        assert name_of((settings.role, settings.ordinal)) == rank.name


def test_what_run_decides_and_secrets_have_no_flag(ranks: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["run", "ps"]) == 0
    fields = registry.get("ps").settings.model_fields
    decided = {name.lower() for name in ranks[0].environment if os.environ.get(name) != ranks[0].environment[name]}
    decided -= {"checkpoint_dir", "job_token_file"}
    assert decided & set(fields) == set(flags.NO_FLAG) - {
        "rank",
        "world_size",
        "job_token",
        "leave_code",
    }
    secrets = {row[0].lower() for row in variables(Settings) if row[1] == "secret"}
    assert secrets <= set(flags.NO_FLAG)
    for name in {*flags.NO_FLAG} - {"role"}:  # `--role` says where a role runs
        flag = f"--{name.replace('_', '-')}"
        assert __main__.main(["run", "ps", flag, "1"]) == USAGE
        assert capsys.readouterr().err.startswith(f"rolecall: {flag}: no such flag")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-iteration", " (did you mean --max-iterations?)"),
        ("--num_envs", " (did you mean --num-envs?)"),
        ("--gama=0.9", " (did you mean --gamma?)"),
        ("--quite-another", ""),
    ],
)
def test_a_misspelt_flag_is_one_line_with_the_flag_that_is_meant(
    capsys: pytest.CaptureFixture[str], flag: str, meant: str
) -> None:
    assert __main__.main(["run", "rl", flag, "3"]) == USAGE
    line = f"rolecall: {flag.partition('=')[0]}: no such flag{meant}; `rolecall run rl --help` lists them\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("arguments", [["run"], ["run", "--plain"], ["local", "rl"], ["run", "rl", "--num-envs"]])
def test_what_is_no_command_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(arguments)
    assert ended.value.code == USAGE
    assert "usage: rolecall " in capsys.readouterr().err


RANK = """
import sys
from rolecall import __main__
from rolecall.rank import fork_server

def prepare(preload, imported):
    print(*preload, *(name for name in ("aiohttp", "rolecall.rank.supervisor", "torch") if name in sys.modules))
    sys.exit(0)

fork_server.prepare = prepare
__main__.main(["rank"])
"""


def test_a_rank_starts_its_fork_server_before_the_rest_of_its_imports() -> None:
    environment = {**os.environ, "JOB": "ps", "ROLE": "trainer"}
    run = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, timeout=60, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == list(registry.get("ps").roles[1].preload), run.stderr


def test_what_a_rank_preloads_is_found_beside_the_jobs_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As its workers find it, not in the working directory first."""
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "circle.py"
    file.write_text("from rolecall import Job, Role\ndef lead(context): pass\nJOB = Job([Role('lead', lead)])\n")
    path = [*sys.path, str(tmp_path)]
    monkeypatch.setattr(sys, "path", path.copy())
    described = describe.describe(str(file))
    sys.modules.pop("circle")
    found: list[list[str]] = []

    def prepare(preload: tuple[str, ...], imported: bool) -> None:
        found.append(sys.path.copy())
        raise UsageError("far enough")

    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(describe, "of_rank", lambda target: described)
    monkeypatch.setattr(fork_server, "prepare", prepare)
    monkeypatch.setenv("JOB", str(file))
    assert __main__.main(["rank"]) == USAGE
    assert found[0][-2:] == [str(tmp_path / "jobs"), str(tmp_path)]
