"""A user's program: how it is named, loaded and called, what is wrong with it in one line, and how it may end."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolecall.config import Settings
from rolecall.context.context import Context
from rolecall.context.watchdog import Watchdog
from rolecall.declare import loader
from rolecall.errors import ProgramError, UsageError
from rolecall.torch_rpc import program
from rolecall.torch_rpc.program import Program
from tests.commands import forget_modules

Write = Callable[[str], Path]
GONE = "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The working directory is the test's; modules, path and arguments are afterwards as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before, main = set(sys.modules), sys.modules["__main__"]
    yield
    multiprocessing.set_start_method(None, force=True)
    sys.modules["__main__"] = main
    forget_modules(before, tmp_path)


@pytest.fixture(autouse=True)
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Torch is not touched: the ranks and world sizes for which it would have been."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(program.adopt, "adopt", lambda settings, rank, size, *_: calls.append((rank, size)))
    monkeypatch.setattr(program.ScriptCalls, "watch", lambda _: None)
    return calls


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (tmp_path / "prog.py").write_text(text)
        return Path("prog.py")

    return write


def context(rank: int = 0, size: int = 2) -> Any:
    return SimpleNamespace(
        settings=Settings(lease_seconds=2),
        me=SimpleNamespace(rank=rank),
        members=[None] * size,
        generation=1,
        torch=SimpleNamespace(store=lambda: None),
        files=Path(),
        watchdog=Watchdog(600, 300),
    )


def problem(script: str, arguments: str = "") -> str:
    with pytest.raises(UsageError) as refused:
        Program(script, arguments).check(Settings(), 2)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---- what is named


@pytest.mark.parametrize("script", ["", ":run", "a.py:", "a.py:b c", "module"])
def test_a_name_that_names_nothing(script: str) -> None:
    assert problem(script).startswith(f"SCRIPT={script!r}: name ")
    assert problem("a.py", "'a") == """SCRIPT_ARGS="'a": no closing quotation"""


def test_errors_of_a_file_have_their_place(write: Write, tmp_path: Path) -> None:
    assert problem("none.py") == "none.py: no such file"
    write("x = 1\n\nimport nothing_of_that_name\n")
    assert problem("prog.py:run") == "prog.py:3: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert problem(f"{tmp_path}/prog.py:run").startswith("prog.py:3: ModuleNotFoundError: ")
    write("def run(:\n")
    assert problem("prog.py") == problem("prog.py:run") == "prog.py:1: SyntaxError: invalid syntax"


def test_a_function_that_cannot_be_called(write: Write) -> None:
    write("one = 1\n\ndef run(rank): pass\n\ndef three(rank, world_size, queue): pass\n")
    assert problem("prog.py:main") == "prog.py: the function main is missing"
    assert problem("prog.py:one") == "prog.py: the function one is not callable"
    assert problem("prog.py:run").startswith("prog.py:3: run(rank) must take a rank and a world size")
    assert problem("prog.py:three").startswith("prog.py:5: three(rank, world_size, queue) must take")
    assert "missing a required argument: 'queue'" in problem("prog.py:three")
    assert "a world size, and 4, 'a': too many positional arguments" in problem("prog.py:three", "4 a")
    assert "must take a rank and a world size, and 4: too many" in problem("prog.py:run", "-- 4")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the definition evaluates the annotations")
def test_annotations_may_name_what_is_not_imported(write: Write) -> None:
    write("def run(rank: Rank, world_size: Size): pass\n\ndef one(rank: Rank): pass\n")
    Program("prog.py:run").check(Settings(), 2)
    assert problem("prog.py:one").startswith("prog.py:3: one(rank: Rank) must take a rank and a world size")


def test_a_module(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "prog.py").write_text("def run(rank, world_size): pass\n")
    Program("package_of_mine.prog:run").check(Settings(), 2)
    assert problem("package_of_mine.prog:main") == "package_of_mine.prog: the function main is missing"
    assert (
        problem("no_package:run") == "no_package cannot be imported: ModuleNotFoundError: No module named 'no_package'"
    )


def test_a_check_does_not_run_a_main_program(write: Write, adopted: list[tuple[int, int]]) -> None:
    write("raise ValueError\n")
    Program("prog.py").check(Settings(), 2)
    assert adopted == []


# ---- what is run


def test_a_function_is_called_with_rank_and_world_size(write: Write, adopted: list[tuple[int, int]]) -> None:
    write("import sys\nloaded = sys.argv[1:]\ndef run(*ranks): sys.called = (*ranks, __name__, loaded)\n")
    arguments = "--rank={rank} --world_size '{world_size}' 'a b'"
    Program("prog.py:run", arguments).check(Settings(), 5)
    assert sys.modules["prog"].loaded == ["--rank=0", "--world_size", "5", "a b"]
    del sys.modules["prog"]
    Program("prog.py:run", arguments).run(context(rank=3, size=4))
    assert sys.called == (3, 4, "prog", ["--rank=3", "--world_size", "4", "a b"])
    assert sys.argv[0] == "prog.py"
    assert adopted == [(0, 5), (3, 4)]
    assert sys.path[-1] == str(Path.cwd())
    assert loader.load_file(Path("prog.py")) is sys.modules["prog"]


@pytest.mark.parametrize(
    ("arguments", "called", "argv"),
    [
        ("4 True", (4, True, "last"), []),
        ("0.5 'a b' {rank}", (0.5, "a b", 3), []),
        ("--gamma 0.9 -- 4 x None", (4, "x", None), ["--gamma", "0.9"]),
        ("-- -1 --flag", (-1, "--flag", "last"), []),
    ],
)
def test_further_parameters_have_values(
    write: Write, arguments: str, called: tuple[object, ...], argv: list[str]
) -> None:
    write("import sys\nargv = sys.argv[1:]\ndef run(rank, size, a, b, c='last'): sys.called = (a, b, c)\n")
    Program("prog.py:run", arguments).check(Settings(), 2)
    Program("prog.py:run", arguments).run(context(rank=3, size=4))
    assert sys.called == called
    assert sys.modules["prog"].argv == argv


def test_parameters_with_defaults_need_no_values(write: Write) -> None:
    write("import sys\nargv = sys.argv[1:]\ndef run(rank, size, log=True): sys.called = log\n")
    Program("prog.py:run", "a b").run(context())
    assert (sys.called, sys.modules["prog"].argv) == (True, ["a", "b"])
    Program("prog.py:run", "-- False").run(context())
    assert sys.called is False


def test_a_modules_function_has_further_parameters_too(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    (tmp_path / "prog_of_module.py").write_text("import sys\ndef run(rank, size, splits): sys.called = splits\n")
    Program("prog_of_module:run", "4").run(context())
    assert sys.called == 4


@pytest.mark.parametrize("script", ["prog.py", "prog.py:run"])
def test_a_program_may_set_the_start_method(write: Write, script: str) -> None:
    write("import multiprocessing\nmultiprocessing.set_start_method('spawn')\ndef run(rank, world_size): pass\n")
    multiprocessing.set_start_method("forkserver", force=True)  # as in a worker
    Program(script).check(Settings(), 2)
    sys.modules.pop("prog", None)
    Program(script).run(context())
    assert multiprocessing.get_start_method() == "spawn"


def test_a_file_is_run_as_main(write: Write) -> None:
    write("import sys\nclass Mine: pass\nsys.called = (__file__, Mine.__module__, sys.argv[1:])\n")
    Program("prog.py", "{rank}").run(context(rank=1))
    assert sys.called == (str(Path("prog.py").resolve()), "__main__", ["1"])
    assert sys.modules["__main__"].Mine.__name__ == "Mine"


def test_a_rank_with_nowhere_to_write_runs_the_program_all_the_same(write: Write, tmp_path: Path) -> None:
    write("import sys\nsys.called = True\n")
    (tmp_path / "file").write_text("")

    class Unwritable(SimpleNamespace):
        files = Context.files

    rank = context(rank=1)
    Program("prog.py").run(
        Unwritable(
            settings=Settings(lease_seconds=2, checkpoint_dir=tmp_path / "file"),
            me=rank.me,
            members=rank.members,
            generation=1,
            torch=SimpleNamespace(store=lambda: None),
            watchdog=rank.watchdog,
        )
    )
    assert sys.called


@pytest.mark.parametrize("code", ["", "0", "None", "143"])
def test_an_exit_that_is_no_error_is_a_return(write: Write, code: str) -> None:
    write(f"import sys\nsys.exit({code})\n")
    Program("prog.py").run(context())


@pytest.mark.parametrize("code", ["1", "'no data'"])
def test_an_exit_code_is_an_error(write: Write, code: str) -> None:
    write(f"import sys\nsys.exit({code})\n")
    with pytest.raises(ProgramError) as failed:
        Program("prog.py").run(context())
    assert str(failed.value) == f"prog.py ended by sys.exit({code})"


@pytest.mark.parametrize("script", ["prog.py", "prog.py:run"])
def test_an_exception_is_the_programs_own_traceback(write: Write, script: str) -> None:
    write("def run(rank, world_size):\n    1 / 0\nif __name__ == '__main__':\n    run(0, 1)\n")
    with pytest.raises(ProgramError) as failed:
        Program(script).run(context())
    head, place, *_, last, end = str(failed.value).split("\n")
    assert (head, last, end) == ("Traceback (most recent call last):", "ZeroDivisionError: division by zero", "")
    assert place == f'  File "{Path("prog.py").resolve()}", line ' + (
        "2, in run" if ":" in script else "4, in <module>"
    )


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (f"RuntimeError({GONE!r})", True),
        ("RuntimeError('RPCErr:1:RPC ran for more than set timeout (5000 ms)')", True),
        ("torch.distributed.DistNetworkError('Connection was likely closed')", True),
        ("ValueError('no')", False),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_where_a_peer_may_be_gone_the_gang_has_time_to_say_so(
    write: Write, monkeypatch: pytest.MonkeyPatch, error: str, waits: bool, wrapped: bool
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(program, "time", SimpleNamespace(sleep=waited.append))
    raised = f"raise {error}"
    if wrapped:
        raised = f"try:\n    {raised}\nexcept Exception as error:\n    raise KeyError('lost') from error"
    write(f"import torch\n{raised}\n")
    with pytest.raises(ProgramError):
        Program("prog.py").run(context())
    assert waited == ([3.0] if waits else [])
