"""`rolecall.run` and `rolecall.start`: a job is run from Python, by ranks of either kind; `JOB.main()`; notebooks."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import Field, SecretStr

import rolecall
from rolecall import Context, Drained, Job, ProgramError, RemoteError, Role, UsageError
from rolecall.declare import flags, loader, registry
from rolecall.errors import RankError
from rolecall.launch.ended import program_error
from rolecall.launch.process_run import ProcessRun, directory_of
from rolecall.launch.run import _given
from tests.inprocess import jobs
from tests.inprocess.jobs import Worker, Workers

DEADLINE = 120.0  # seconds; a fail-safe
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"worker": 3}, r"^worker=: .* \(did you mean workers\?\)$"),
    ({"workers": "many"}, r"^wrong settings: WORKERS='many'"),
    ({"workers": 0}, r"^wrong settings: WORKERS=0"),
    ({"role": "lead"}, r"^role=: "),
    ({"name": "a/b"}, r"^--name 'a/b': must be "),
    ({"name": "a", "checkpoint_dir": "b"}, r"^--name a: is the folder runs/a; "),
]


def lead(context: Context[Workers]) -> dict[str, Any]:
    state = context.restore({"total": 0})
    for _ in context.steps(10**6 if context.settings.workers == 3 else 2):
        state["total"] += sum(context.call_all(Worker.double, 1))
        context.log(score=state["total"])
        if context.settings.workers == 4:
            next(iter(context.call_each(Worker.fail)))[1].result()
    return {"total": state["total"]}


JOB = jobs.job(lead)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)  # ranks find this module


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(("settings", "problem"), SETTINGS)
def test_wrong_settings_are_refused_before_anything_starts(
    settings: dict[str, Any], problem: str, in_process: bool
) -> None:
    with pytest.raises(UsageError, match=problem):
        rolecall.start(JOB, in_process=in_process, **settings)
    assert not [*Path.cwd().iterdir()]


def test_results_in_one_process() -> None:
    assert rolecall.run(JOB, in_process=True, name="mine")["total"] == 8
    assert rolecall.run(Job(JOB.roles, settings=Workers), in_process=True)["total"] == 8  # which no variable holds
    assert Path("runs/mine/summary.json").exists()
    assert len([*Path("runs").iterdir()]) == 2  # a directory each


def test_a_run_in_one_process() -> None:
    with rolecall.start(JOB, in_process=True, workers=3, checkpoint_dir=Path("kept")) as run:
        points = (row["value"] for row in run.history if row.get("name") == "score")
        assert next(points) == 6.0
        run.scale("worker", 4)
        run.kill("worker_1")
        with pytest.raises(UsageError, match=r"^nobody_0"):
            run.kill("nobody_0")
        assert [rank.name for rank in run.ranks][:2] == ["lead_0", "worker_0"]
        with pytest.raises(TimeoutError):
            run.wait(0.01)
        assert run.status == "running"
        run.drain()
        assert run.wait(DEADLINE) == "drained"
        with pytest.raises(Drained) as drained:
            _ = run.result
        assert drained.value.step > 0
        assert next(points) > 6.0
        run.drain()  # a second one changes nothing
    assert (run.ranks, run.page, run.directory) == ([], str(Path("kept/page.html").absolute()), Path("kept").absolute())
    with pytest.raises(UsageError, match="is over"):
        run.kill("worker_1")
    with rolecall.start(JOB, in_process=True, workers=3) as run:
        run.scale("worker", 3)  # waits until it is under way
    assert run.status == "drained"


def test_ctrl_c_drains() -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        end = time.monotonic() + DEADLINE
        while signal.getsignal(signal.SIGINT) is before and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Drained, match="drained at step"):
        rolecall.run(JOB, in_process=True, workers=3)


class Sent(Workers):
    key: SecretStr = SecretStr("")
    keys: list[SecretStr] = Field([])
    table: dict[str, int] = Field({})
    note: str | None = "note"
    other: str | None = None


class Started(ProcessRun):
    """Runs another program in the place of `rolecall run`."""

    def __init__(self, program: str, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        command = [sys.executable, "-c", program]
        popen = subprocess.Popen
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", lambda _, **options: popen(command, **options))
            super().__init__("pi.py", [], {"CHECKPOINT_DIR": directory}, lambda line: None)


@pytest.mark.parametrize("known", [Job(JOB.roles, settings=Sent), None])
def test_values_are_given_as_variables(known: Job | None) -> None:
    given = {"key": SecretStr("s3cret"), "keys": [SecretStr("other")], "table": {"a": 1}, "workers": 3}
    words, variables = _given(given, known)
    assert words == ["--given-settings=key,keys,table,workers"]
    assert variables == {"KEY": "s3cret", "KEYS": '["other"]', "TABLE": '{"a":1}', "WORKERS": "3"}
    with pytest.raises(UsageError, match=r"^note=None"):
        _given({"note": None}, known)
    with pytest.raises(UsageError, match=r"^note=''"):
        _given({"note": ""}, known)
    assert _given({"other": None}, Job(JOB.roles, settings=Sent))[1] == {"OTHER": ""}
    assert flags.parse(Job(JOB.roles, settings=Sent), "job", words).variables == {}
    for name in ("nonsense", "job_token"):
        with pytest.raises(UsageError, match=rf"^{name}=: the job has no such setting"):
            flags.parse(JOB, "job", [f"--given-settings=workers,{name}"])


def test_how_a_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code, an earlier run's summary, and another working directory."""
    (tmp_path / "kept").mkdir()
    with pytest.raises(RankError, match=str(tmp_path / "kept" / "summary.json")):
        Started("", "kept", monkeypatch).run().result()
    write = (
        """import pathlib; pathlib.Path("kept/summary.json").write_text('{"state": "finished", "result": {"n": 1}}')"""
    )
    finished = Started(write, "kept", monkeypatch)
    monkeypatch.chdir("/")
    assert finished.run().result() == {"n": 1}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Drained):
        Started("raise SystemExit(130)", "kept", monkeypatch).run().result()
    early = Started("import time; time.sleep(60)", "kept", monkeypatch)
    early.drain()
    with pytest.raises(Drained):
        early.run().result()
    assert early.ranks() == []
    Path("runs").symlink_to("nowhere")
    with pytest.raises(UsageError, match="set checkpoint_dir"):
        directory_of("pi")


def test_an_error_of_several_lines() -> None:
    error = "RuntimeError: one\n two\nthree"
    text = f"lead_0: Traceback (most recent call last):\n  File 'a.py', line 1, in f\n    g()\n{error}"
    assert str(program_error(text)) == error


def test_ctrl_c_while_a_file_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")

    def interrupt(run: rolecall.Run) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rolecall.Run, "await_up", interrupt)
    before = {*psutil.Process().children(recursive=True)}
    with pytest.raises(KeyboardInterrupt):
        rolecall.start("slow.py")
    assert not {*psutil.Process().children(recursive=True)} - before


def test_a_file_that_is_edited_is_loaded_again(tmp_path: Path) -> None:
    text = "from tests.launch.test_run import JOB as J, Job\nJOB = Job(J.roles, settings=J.settings, summary={!r})\n"
    (tmp_path / "edited_job.py").write_text(text.format("one"))
    first = registry.get("edited_job.py")
    loader.forget_changed("edited_job.py")
    assert registry.get("edited_job.py") is first
    (tmp_path / "edited_job.py").write_text(text.format("two"))
    loader.forget_changed("edited_job.py")
    assert registry.get("edited_job.py").summary == "two"


def test_a_run_that_the_end_of_the_program_stops() -> None:
    program = "import rolecall; from tests.launch.test_run import JOB; rolecall.start(JOB, in_process=True, workers=3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")


def test_runs_at_once_whose_ranks_are_processes() -> None:
    """In an event loop; one finishes, one fails, one is stopped."""
    before = {*psutil.Process().children(recursive=True)}

    async def play() -> None:
        with (
            rolecall.start(JOB, log_level="error", checkpoint_dir=Path("kept")) as finished,
            rolecall.start(JOB, workers=4, max_failures=1) as failed,
            rolecall.start(JOB, workers=3) as stopped,
        ):
            assert (await finished)["total"] == 8
            with pytest.raises(ProgramError, match="no such luck") as raised:
                await failed
            remote = raised.value.__cause__
            assert isinstance(remote, RemoteError)
            assert "in fail" in str(remote.__cause__)
            history = iter(stopped.history)
            await asyncio.to_thread(next, history)
            assert stopped.page.startswith("http://127.0.0.1:")
            stopped.kill(rolecall.Peer("worker", 1, 2))
            stopped.scale("worker", 4)
            assert {rank.name for rank in stopped.ranks} == {"lead_0", *(f"worker_{number}" for number in range(4))}
        assert (finished.status, failed.status, stopped.status) == ("finished", "failed", "drained")
        assert finished.page == str(finished.directory / "page.html")
        assert len({run.directory for run in (finished, failed, stopped)}) == 3

    asyncio.run(asyncio.wait_for(play(), DEADLINE))
    assert not {*psutil.Process().children(recursive=True)} - before


# ---- what names a job


def test_a_job_is_named_by_the_module_that_holds_it() -> None:
    assert registry.target_of(JOB) == f"{__name__}"
    assert registry.target_of(registry.get("rl")) == "rolecall.jobs.rl"
    with pytest.raises(UsageError, match="%%writefile"):
        registry.target_of(Job([Role("lead", lead)], settings=Workers))


def test_a_package_names_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `__init__` and others import the job, too; and its folder may be installed."""
    folder = tmp_path / "src" / "holds_a_job"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .job import JOB, make\nHERE = make()\n")
    (folder / "job.py").write_text(
        "from rolecall import Job\nfrom tests.launch.test_run import JOB as J\n"
        "def make(): return Job(J.roles, settings=J.settings)\nJOB = make()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    package = importlib.import_module("holds_a_job")
    with pytest.raises(UsageError, match="set PYTHONPATH"):
        registry.target_of(package.JOB)
    monkeypatch.setattr(registry, "_is_found", lambda name, place: (name, place) == ("holds_a_job", folder.parent))
    assert registry.target_of(package.JOB) == "holds_a_job.job"
    assert registry.target_of(package.HERE) == "holds_a_job:HERE"


@pytest.mark.parametrize("arguments", [["../job_here.py"], ["-m", "package.job_here"]])
def test_main(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, or as a module: exit codes, flags, and roles of `__main__`."""
    for folder in (tmp_path, tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "job_here.py").write_text((Path(__file__).parents[2] / "examples" / "pi.py").read_text())
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "other").mkdir()
    folder = tmp_path / "other" if arguments[0] != "-m" else tmp_path
    done = subprocess.run(
        [sys.executable, *arguments, "--rounds", "2", "--points", "10", "--checkpoint-dir", "kept", "--plain"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "kept" / "summary.json").exists()


@pytest.mark.parametrize("line", ["rolecall.run(JOB)", "JOB.main()"])
def test_a_file_that_starts_a_run_when_it_is_imported_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "unguarded.py"
    file.write_text(f"import rolecall\nfrom tests.launch.test_run import JOB\n{line}\n")
    with pytest.raises(UsageError, match=r"^unguarded.py:3: unguarded.py starts a run"):
        registry.get(str(file))


# ---- notebooks


CELLS = """import rolecall
from pi import JOB
run = rolecall.start(JOB, rounds=3, points=10)
===
assert run.wait(120) == "finished", run.result
run.result["saved"]
===
rolecall.run(JOB, rounds=3, points=10, in_process=True)["saved"]
===
HERE = rolecall.Job(JOB.roles, settings=JOB.settings)
try:
    rolecall.start(HERE)
except rolecall.UsageError as error:
    print(error)
"""


def test_a_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "pi.py").write_text((Path(__file__).parents[2] / "examples" / "pi.py").read_text())
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.split("===\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=int(DEADLINE), resources={"metadata": {"path": str(tmp_path)}}).execute()
    (shown,) = [each for each in notebook.cells[0].outputs if each.output_type == "display_data"]
    html = shown["data"]["text/html"]
    assert "lead_0" in html
    assert "sampler_1" in html
    assert "gang finished" in html
    assert notebook.cells[1].outputs[-1]["data"]["text/plain"] == "True"
    assert "%%writefile" in notebook.cells[3].outputs[-1]["text"]
