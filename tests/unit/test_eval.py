"""`rolecall eval` of a user's job: its checkpoint, its function, and what that may return and raise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolecall import __main__
from rolecall.gang.protocol import FAILED, USAGE
from rolecall.job.checkpoint import Checkpoints

PI = '''"""A job of a user."""
import numpy
import torch
from rolecall import Job, Role, Settings, UsageError

class Pi(Settings):
    points: int = 1_000
    width: int = 3

def lead(context): ...

def evaluate(settings, state):
    RETURN

def complete(settings, state, prompt):
    return f"{prompt} is {state['pi']}"

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
    for name in ("POINTS", "WIDTH", "JOB"):
        monkeypatch.delenv(name, raising=False)
    about = {"settings": {"width": 9, "of_an_earlier_version": 1}}
    Path("run").mkdir()
    Checkpoints(Path("run"), "pi", 2).write(7, {"pi": 3.125}, about)

    def evaluate(returns: str, *arguments: str, checkpoint: str = "run", without: str = "\0") -> tuple[int, str, str]:
        Path("pi.py").write_text(PI.replace("RETURN", returns).replace(without, ""))
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
    code, out, _ = evaluated("return {'pi': state['pi'], 'points': settings.points, 'width': settings.width}", "--json")
    assert (code, json.loads(out)) == (0, {"pi": 3.125, "points": 5, "width": 9})


def test_it_is_printed_with_the_checkpoints_name(evaluated: Evaluate) -> None:
    code, out, _ = evaluated("return {'pi': state['pi'], 'points': 12345}")
    assert (code, out) == (0, "checkpoint-000002-0000000007.pt: pi 3.125, points 12345\n")


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
def test_what_is_no_number_is_one_line(evaluated: Evaluate, returns: str) -> None:
    code, out, err = evaluated(returns)
    assert (code, out) == (USAGE, "")
    assert err.startswith("rolecall: pi: evaluate returns what is no number (")
    assert err.endswith("; return numbers by name\n")
    assert err.count("\n") == 1


def test_a_refusal_is_one_line_with_its_place(evaluated: Evaluate) -> None:
    code, out, err = evaluated("raise UsageError('POINTS=1000: too many')")
    assert (code, out, err) == (USAGE, "", "rolecall: pi.py:13: POINTS=1000: too many\n")


def test_an_exception_is_the_users_traceback(evaluated: Evaluate, tmp_path: Path) -> None:
    code, out, err = evaluated("return {'pi': state['tau']}")
    assert (code, out) == (FAILED, "")
    assert err.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/pi.py", line 13, in evaluate\n')
    assert err.endswith("KeyError: 'tau'\n")


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


@pytest.mark.parametrize(
    ("checkpoint", "line"),
    [
        ("nowhere", "--checkpoint nowhere: no such file or directory"),
        ("empty", "--checkpoint empty: holds no checkpoint"),
        ("others", "no usable checkpoint in CHECKPOINT_DIR=others (checkpoint-000001-0000000001.pt is of job tau"),
        ("others/checkpoint-000001-0000000001.pt", "checkpoint-000001-0000000001.pt is of job tau, not of pi"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_of_the_job_is_refused(evaluated: Evaluate, checkpoint: str, line: str) -> None:
    for folder in ("empty", "others"):
        Path(folder).mkdir()
    Checkpoints(Path("others"), "tau", 1).write(1, {})
    code, out, err = evaluated("return state", checkpoint=checkpoint)
    assert (code, out) == (USAGE, "")
    assert err.startswith(f"rolecall: {line}")
    assert err.count("\n") == 1
