"""`rolecall eval` of a user's job: its checkpoint, its function, and what that may return and raise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall import __main__
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.errors import FAILED, USAGE

PI = '''"""A job of a user."""
from pathlib import Path
from typing import Annotated
import numpy
import torch
from pydantic import Field
from rolecall import Job, ProgramError, Role, Settings, UsageError

class Pi(Settings):
    points: int = 1_000
    width: int = 3

def lead(context): ...

def evaluate(settings, state, *, digits: Annotated[int, Field(ge=1, le=9, description="after the point")] = 3,
             half_up: bool = True, table: Path | None = None):
    RETURN

def complete(settings, state, prompt, *, unit=""):
    return f"{prompt} is {state['pi']}{unit}"

JOB = Job([Role("lead", lead)], settings=Pi, evaluate=evaluate, complete=complete, pinned=("width",))
'''
Evaluate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Evaluate]:
    """The exit code and the output of `rolecall eval pi.py` of a checkpoint, with an `evaluate` that returns so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "pi", raising=False)  # the example's, where another test has loaded it
    for name in ("POINTS", "WIDTH", "JOB"):
        monkeypatch.delenv(name, raising=False)
    about = {"settings": {"width": 9, "of_an_earlier_version": 1}}
    Path("run").mkdir()
    Checkpoints(Path("run"), "pi", 2).write(7, {"pi": 3.125}, about)

    def evaluate(
        returns: str,
        *arguments: str,
        checkpoint: str = "run",
        without: str = "\0",
        instead: tuple[str, str] = ("\0", ""),
    ) -> tuple[int, str, str]:
        Path("pi.py").write_text(PI.replace("RETURN", returns).replace(without, "").replace(*instead))
        code = __main__.main(["eval", "pi.py", "--checkpoint", checkpoint, *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    yield evaluate
    sys.modules.pop("pi", None)


def test_it_is_given_the_settings_of_the_checkpoint_and_its_state(
    evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTS", "5")
    monkeypatch.setenv("WIDTH", "4")  # which the checkpoint knows better
    code, out, err = evaluated(
        "return {'pi': state['pi'], 'points': settings.points, 'width': settings.width}", "--json"
    )
    assert (code, json.loads(out)) == (0, {"pi": 3.125, "points": 5, "width": 9})
    assert err == "rolecall: WIDTH=4 is ignored: checkpoint-000002-0000000007.pt was made with 9\n"


def test_one_file_is_evaluated_too(evaluated: Evaluate) -> None:
    code, out, _ = evaluated("return state", checkpoint="run/checkpoint-000002-0000000007.pt")
    assert (code, out) == (0, "checkpoint-000002-0000000007.pt: pi 3.125\n")


def test_numbers_may_come_as_tensors(evaluated: Evaluate) -> None:
    returns = "return {'a': torch.tensor(0.5), 'b': numpy.float32(0.25), 'c': numpy.int64(3), 'd': True, 5: 1}"
    assert json.loads(evaluated(returns, "--json")[1]) == {"a": 0.5, "b": 0.25, "c": 3, "d": 1, "5": 1}


def test_text_is_completed(evaluated: Evaluate) -> None:
    assert evaluated("pass", "--prompt", "pi") == (0, "pi is 3.125\n", "")
    assert evaluated("pass", "--prompt", "pi", "--json") == (0, '{"text": "pi is 3.125"}\n', "")


@pytest.mark.parametrize("returns", ["return", "return 3.5", "return {'pi': 'about 3'}", "return {'pi': [1, 2]}"])
def test_non_number_is_refused(evaluated: Evaluate, returns: str) -> None:
    code, out, err = evaluated(returns)
    assert (code, out) == (USAGE, "")
    assert err.startswith("rolecall: pi: evaluate returns what is no number (")
    assert err.endswith("; return numbers by name\n")
    assert err.count("\n") == 1


def test_a_refusal_is_one_line_with_its_place(evaluated: Evaluate) -> None:
    code, out, err = evaluated("raise UsageError('POINTS=1000: too many')")
    assert (code, out, err) == (USAGE, "", "rolecall: pi.py:17: POINTS=1000: too many\n")


def test_an_exception_is_the_users_traceback(evaluated: Evaluate, tmp_path: Path) -> None:
    code, out, err = evaluated("return {'pi': state['tau']}")
    assert (code, out) == (FAILED, "")
    assert err.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/pi.py", line 17, in evaluate\n')
    assert err.endswith("KeyError: 'tau'\n")


# ---- options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (3, 1.0, 4)),
        (("--digits", "5", "--no-half-up"), (5, 0.0, 4)),
        (("--digits=5", "--half-up", "--table", "a/b.txt"), (5, 1.0, 7)),
    ],
)
def test_keyword_only_parameters_are_options(
    evaluated: Evaluate, words: tuple[str, ...], expected: tuple[float, ...]
) -> None:
    returns = "return {'digits': digits, 'half_up': half_up, 'table': len(str(table)), 'path': isinstance(table, Path)}"
    code, out, err = evaluated(returns, *words, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == dict(zip(("digits", "half_up", "table"), expected, strict=True), path="--table" in words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--digits", "x"),
            "--digits='x': input should be a valid integer, unable to parse string as an integer (int, 1 to 9)",
        ),
        (("--digits", "10"), "--digits='10': input should be less than or equal to 9 (int, 1 to 9)"),
        (("--video", "a.gif"), "--video: pi's evaluate has no such option; it takes --digits, --half-up, --table"),
        (("--video=a.gif",), "--video: pi's evaluate has no such option; it takes --digits, --half-up, --table"),
        (("--dig", "3"), "--dig: pi's evaluate has no such option; it takes --digits, --half-up, --table"),
        (("--prompt", "x", "--digits", "3"), "--digits: pi's complete has no such option; it takes --unit"),
    ],
)
def test_unknown_option_is_refused(evaluated: Evaluate, words: tuple[str, ...], line: str) -> None:
    assert evaluated("return {}", *words) == (USAGE, "", f"rolecall: {line}\n")


def test_only_the_types_of_options_are_evaluated(evaluated: Evaluate) -> None:
    """Those of other parameters may name what only type checkers import."""
    code, out, _ = evaluated(
        "return {'digits': digits}", "--json", instead=("settings, state, *, d", "settings: 'Missing', state, *, d")
    )
    assert (code, json.loads(out)) == (0, {"digits": 3})


def test_an_option_cannot_be_one_of_the_commands_arguments(evaluated: Evaluate) -> None:
    code, out, err = evaluated("return {}", instead=("table: Path", "json: Path"))
    assert (code, out, err) == (USAGE, "", "rolecall: pi: --json means something else; choose another name\n")


# ---- what is refused


@pytest.mark.parametrize(
    ("without", "arguments", "line"),
    [
        (", evaluate=evaluate", (), "pi has nothing to evaluate: give its Job evaluate=function"),
        (", complete=complete", ("--prompt", "pi"), "--prompt: pi writes no text; leave it out"),
    ],
)
def test_a_job_without_the_function_is_refused(
    evaluated: Evaluate, without: str, arguments: tuple[str, ...], line: str
) -> None:
    assert evaluated("pass", *arguments, without=without) == (USAGE, "", f"rolecall: {line}\n")


@pytest.mark.parametrize(("before", "now", "version"), [(1, 2, "an earlier"), (3, 2, "a newer")])
def test_a_checkpoint_of_another_layout_is_refused(evaluated: Evaluate, before: int, now: int, version: str) -> None:
    Path("run", "checkpoint-000002-0000000007.pt").unlink()
    about = {"settings": {"width": 9}, **({} if before == 1 else {"layout": before})}  # which none had at first
    Checkpoints(Path("run"), "pi", 2).write(7, {"pi": 3.125}, about)
    code, out, err = evaluated("return state", instead=("pinned=", f"layout={now}, pinned="))
    problem = f"checkpoint-000002-0000000007.pt: was written by {version} version of this job"
    assert (code, out, err) == (USAGE, "", f"rolecall: {problem}; evaluate it with that version\n")


@pytest.mark.parametrize(
    ("checkpoint", "line"),
    [
        ("nowhere", "--checkpoint nowhere: no such file or directory"),
        ("empty", "--checkpoint empty: holds no checkpoint"),
        ("others", "no usable checkpoint in CHECKPOINT_DIR=others (checkpoint-000001-0000000001.pt is of job tau"),
        ("others/checkpoint-000001-0000000001.pt", "checkpoint-000001-0000000001.pt is of job tau, not of pi"),
    ],
)
def test_other_files_are_refused(evaluated: Evaluate, checkpoint: str, line: str) -> None:
    for folder in ("empty", "others"):
        Path(folder).mkdir()
    Checkpoints(Path("others"), "tau", 1).write(1, {})
    code, out, err = evaluated("return state", checkpoint=checkpoint)
    assert (code, out) == (USAGE, "")
    assert err.startswith(f"rolecall: {line}")
    assert err.count("\n") == 1
