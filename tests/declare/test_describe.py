"""What supervisors know of a job: described here where it is built in, by a child process where it is a user's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rolecall import __main__, config
from rolecall.config import DESCRIPTION, __version__
from rolecall.declare import describe, registry
from rolecall.errors import UsageError
from rolecall.gang.protocol import RoleSpec
from rolecall.rank.zygote import Zygote

PI = '''"""A job of a user."""
import math
from pathlib import Path

from pydantic import Field, SecretStr
from rolecall import Context, Job, Role, Settings

class Pi(Settings):
    samplers: int = Field(2, description="members that sample")
    points: int = 1_000
    limit: float = math.inf
    sizes: tuple[int, ...] = (1, 2)
    data: Path = Path("data")
    key: SecretStr = SecretStr("")

def lead(context: Context[Pi]) -> None: ...

JOB = Job([Role("lead", lead, gpus=1), Role("sampler", count="samplers", minimum=1, gpus=0, preload=["colorsys"])],
          settings=Pi, summary="estimates pi", score="pi", unit="points", lower=True)
'''
Asked = Callable[..., describe.Description]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The test's directory, with the file pi.py, is the working directory; nothing of the environment counts."""
    for name in {field for job in registry.JOBS for field in registry.get(job).settings.model_fields} | {"points"}:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(DESCRIPTION, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "pi.py").write_text(PI)
    yield
    sys.modules.pop("pi", None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Zygote, Path]]:
    """What `rolecall run` asks: a process that has imported torch, and its working directory."""
    directory = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        # a file is written anew within the second that tells one text from another
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        zygote = Zygote()
    with zygote:
        yield zygote, directory


@pytest.fixture
def asked(prepared: tuple[Zygote, Path], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """`describe.ask` of the file pi.py in the working directory, as `rolecall run` asks, without another interpreter's
    imports for each test.
    """
    zygote, directory = prepared
    monkeypatch.chdir(directory)
    Path("pi.py").write_text(PI)
    return lambda arguments=(): describe.ask("pi.py", arguments, zygote.call)


def described(text: str) -> describe.Description:
    """The description of pi.py with this text."""
    sys.modules.pop("pi", None)
    Path("pi.py").write_text(text)
    return describe.describe("pi.py")


# ---- what is said of a job


def test_a_built_in_job_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    job = describe.ask("rl", ["--observers", "3", "--plain"])
    assert (job.name, job.target, job.version, job.identity) == ("rl", "rl", __version__, f"rl ({__version__})")
    assert job.roles == (RoleSpec("agent", 1, 1, 1, False), RoleSpec("observer", 3, 1, 64, True, stays=True))
    assert (job.ranks, job.score, job.unit, job.lower, job.plain) == (4, "return", "steps", False, True)
    assert (job.flags, job.settings["observers"]) == ({"OBSERVERS": "3"}, 3)
    assert job.preload("agent") == tuple(registry.get("rl").roles[0].preload)


def test_a_users_job_is_described_by_a_process_of_its_own(tmp_path: Path) -> None:
    before = set(sys.modules)
    job = describe.ask("./pi.py", ["--points", "7", "--samplers=5", "--data", "x/y"])
    assert "pi" not in set(sys.modules) - before
    assert (job.name, job.target, job.summary) == ("pi", f"{tmp_path}/pi.py", "estimates pi")
    assert job.roles == (RoleSpec("lead", 1, 1, 1, False), RoleSpec("sampler", 5, 1, 1024, True))
    assert {role: needs.gpus for role, needs in job.needs.items()} == {"lead": 1, "sampler": 0}
    assert {needs.gpus for needs in describe.describe("pi.py", ["--device", "cpu"]).needs.values()} == {0}
    assert (job.preload("lead"), job.preload("sampler"), job.preload("")) == ((), ("colorsys",), ("colorsys",))
    assert (job.score, job.unit, job.lower) == ("pi", "points", True)
    assert describe.of_rank("pi.py") == describe.describe("pi.py")  # a rank of an engine asks too
    assert job.settings == {"samplers": 5, "points": 7, "limit": math.inf, "sizes": [1, 2], "data": "x/y"}
    assert job.flags == {"POINTS": "7", "SAMPLERS": "5", "DATA": "x/y"}
    assert describe.describe("pi.py", ["--points", "7", "--samplers=5", "--data", "x/y"]) == job


def test_a_worker_makes_the_settings_of_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret is not among it: the worker takes it from its environment, as every process does."""
    monkeypatch.setenv("KEY", "sesame")
    job = describe.describe("pi.py", ["--points", "7"])
    text = job.to_json()
    assert "sesame" not in text
    assert job.variables == ("SAMPLERS", "POINTS", "LIMIT", "SIZES", "DATA", "KEY")
    values = describe.ADAPTER.validate_json(text).settings
    settings: Any = config.load(registry.get("pi.py").settings, **values)
    assert (settings.points, settings.limit, settings.sizes, settings.data) == (7, math.inf, (1, 2), Path("data"))
    assert settings.key.get_secret_value() == "sesame"


def test_the_version_is_that_of_the_file(tmp_path: Path) -> None:
    first = described(PI)
    assert first.identity == f"pi ({first.version})"
    assert len(first.version) == 12
    assert described(PI + "\n# another comment\n").version != first.version
    assert described(PI) == first
    assert describe.describe("pi.py", ["--samplers", "9"]).version == first.version  # settings are not the file's
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "pi.py").write_text(PI)
    sys.modules.pop("pi", None)
    assert describe.describe("copy/pi.py").identity == first.identity  # wherever it lies


def test_variables_count_too_and_flags_win(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POINTS", "11")
    monkeypatch.setenv("SAMPLERS", "3")
    Path("pi.py").write_text("print('hello')\n" + PI)
    job = asked(["--samplers", "4"])
    assert capfd.readouterr() == ("", "hello\n")  # what a file prints is no description
    assert (job.settings["points"], job.settings["samplers"], job.flags) == (11, 4, {"SAMPLERS": "4"})


# ---- what goes wrong


def test_help_is_the_jobs(asked: Asked, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        asked(["--help"])
    assert ended.value.code == 0
    text = " ".join(capfd.readouterr().out.split())
    assert (
        "usage: rolecall run pi.py [--on ENGINE] [--name NAME] [--detach] [--in-process] [--plain] [--SETTING VALUE]..."
        in text
    )
    assert "settings of pi.py: --samplers int members that sample" in text
    assert "--checkpoint-dir" in text
    assert "--key" not in text  # a secret, which every user of the machine could read among the arguments


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        (PI, ["--points", "many"], "rolecall: wrong settings: POINTS='many': input should be a valid integer"),
        (PI, ["--samplers", "0"], "rolecall: wrong settings: SAMPLERS=0 must lie between minimum=1 and maximum=1024"),
        ("import nothing_there\n", [], "rolecall: pi.py:1: ModuleNotFoundError: No module named 'nothing_there'"),
        (PI.replace("1_000", ""), [], "rolecall: pi.py:10: SyntaxError: invalid syntax"),
        (PI.replace("minimum=1", "minimum='few'"), [], "rolecall: pi.py:18: role sampler: Pi has no setting 'few'"),
        ("import sys\nsys.exit()\n", [], "rolecall: pi.py:2: SystemExit"),
        ("def lead(context): ...\n", [], "rolecall: pi.py: has no JOB = Job(...); a program without one runs by "),
    ],
)
def test_what_is_wrong_is_said_by_the_process(
    asked: Asked,
    capfd: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    line: str,
) -> None:
    Path("pi.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        asked(arguments)
    assert ended.value.code == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith(line)
    assert output.err.count("\n") == 1


def test_a_file_whose_import_ends_the_process_or_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pi.py").write_text("import os\nos.abort()\n")
    with pytest.raises(UsageError, match=r"^JOB=pi\.py: its import ended by SIGABRT$"):
        describe.ask("pi.py")
    Path("pi.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(describe, "DEADLINE", 0.05)
    with pytest.raises(UsageError, match=r"^JOB=pi\.py: its import took over 0\.05 s$"):
        describe.ask("pi.py")


def test_a_list_has_no_flag() -> None:
    Path("pi.py").write_text(PI.replace("    points:", "    names: list[str] = []\n    points:"))
    with pytest.raises(UsageError, match="--names: a list or a table has no flag; set NAMES, as JSON"):
        describe.describe("pi.py", ["--names", "a"])


def test_a_supervisor_imports_nothing_of_the_file() -> None:
    """Nor torch for itself, which the file would."""
    Path("pi.py").write_text("import sched\n" + PI)
    program = (
        "import sys\nfrom rolecall.declare import describe\nfrom rolecall.rank import supervisor\n"
        "describe.ask('pi.py')\n"
        "print({'torch', 'sched', 'pi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"


# ---- what ranks are told


def test_ranks_of_a_run_need_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    job = describe.describe("pi.py", ["--points", "7"])
    (tuple_of_one,) = describe.passed_on(job).items()
    assert tuple_of_one[0] == DESCRIPTION
    monkeypatch.setenv(*tuple_of_one)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert describe.of_rank(job.target) == job


# ---- the command


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert __main__.main(["describe", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_describes_a_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = json.loads(printed(capsys, "pi.py", "--samplers", "4"))
    assert [(role["name"], role["count"]) for role in job["roles"]] == [("lead", 1), ("sampler", 4)]
    assert printed(capsys, "--ranks", "pi.py", "--samplers", "4") == "5\n"
    assert printed(capsys, "--variables", "pi.py") == "SAMPLERS\nPOINTS\nLIMIT\nSIZES\nDATA\nKEY\n"
    assert printed(capsys, "--output", "here", "pi.py") == ""
    assert describe.ADAPTER.validate_json(Path("here").read_bytes()) == describe.describe("pi.py")


def test_the_commands_list_a_users_settings_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["config", "pi.py", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert "| SAMPLERS | int | 2 |  | members that sample |\n" in table
    assert "| KEY | secret |" in table
    assert "| PORT | int | 29400 |" in table
    assert __main__.main(["metrics", "pi.py"]) == 0
    assert "rolecall_value" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("SecretStr | None", "None"),
        ("SecretStr", "SecretStr('')"),
        ("list[SecretStr]", "[]"),
        ("dict[str, SecretStr]", "{}"),
    ],
)
def test_a_secret_is_one_in_any_container(kind: str, default: str) -> None:
    Path("pi.py").write_text(PI.replace("    points:", f"    passphrase: {kind} = {default}\n    points:"))
    job = describe.describe("pi.py")
    assert "passphrase" in job.secrets
    assert "passphrase" not in job.settings


def test_a_wrong_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    field = "    passphrase: SecretStr = Field(SecretStr('123456789'), min_length=8)\n    points:"
    Path("pi.py").write_text(PI.replace("    points:", field))
    monkeypatch.setenv("PASSPHRASE", "hunter2")
    with pytest.raises(UsageError, match=r"PASSPHRASE=\*\*\*") as refused:
        describe.describe("pi.py")
    assert "hunter2" not in str(refused.value)
