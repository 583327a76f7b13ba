"""A user's file: loaded as a module of its name, and what is wrong with it said with its line."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import loader, registry
from rolecall.declare.spec import Job
from rolecall.errors import ProgramError, RemoteError, RemoteTraceback, UsageError
from rolecall.fields import FromUser
from tests.commands import forget_modules

JOB = """from rolecall import Job, Role
def lead(context): pass
JOB = Job([Role("lead", lead)])
OTHER = Job([Role("other", lead)], unit="others")
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The test's directory is the working directory; what a test imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files of one name follow each other within a second
    before = set(sys.modules)
    yield
    forget_modules(before, tmp_path)


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.absolute()


# ---- what is loaded


@pytest.mark.parametrize("target", ["circle.py", "./circle.py", "{cwd}/circle.py", "../{name}/circle.py"])
def test_a_file_is_a_module_of_its_name(tmp_path: Path, target: str) -> None:
    """So that a peer finds the functions that it is to call."""
    write("circle.py", JOB + "def area(r): return 3 * r * r\n")
    module = loader.load(target.format(cwd=tmp_path, name=tmp_path.name))
    assert module.__name__ == "circle"
    assert sys.modules["circle"] is module
    assert pickle.loads(pickle.dumps(module.area)) is module.area
    assert loader.load(target.format(cwd=tmp_path, name=tmp_path.name)) is module  # and is run once


def test_a_folder_is_its_one_file_beside_its_tests(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for name in ("notes.txt", "test_circle.py", "conftest.py"):
        write(f"jobs/{name}", "")
    problem = r"^\./jobs: a folder must hold one Python file beside its tests, and has {}; name the file$"
    with pytest.raises(UsageError, match=problem.format(0)):
        loader.load("./jobs")
    path = write("jobs/circle.py", JOB)
    assert loader.file_of("jobs/") == path
    assert loader.load("./jobs").__file__ == str(path)
    assert registry.name_of("./jobs") == "circle"
    assert registry.absolute("./jobs") == str(tmp_path / "jobs")
    write("jobs/two.py", JOB)
    with pytest.raises(UsageError, match=problem.format(2)):
        loader.load("./jobs")


def test_modules_beside_the_file_come_before_those_of_the_working_directory(tmp_path: Path) -> None:
    """As with plain Python, and wherever the command line has put the working directory."""
    write("jobs/circle.py", "import wheels\n" + JOB)
    beside, _ = write("jobs/wheels.py", ""), write("wheels.py", "")
    sys.path.append(str(tmp_path))
    assert loader.load("jobs/circle.py").wheels.__file__ == str(beside)
    del sys.modules["wheels"]
    loader.make_main(write("jobs/program.py", ""))
    assert importlib.import_module("wheels").__file__ == str(beside)


def test_modules_beside_the_file_replace_none_of_a_library(tmp_path: Path) -> None:
    write("jobs/circle.py", "import queue, colorsys, filelock\n" + JOB)
    for name in ("queue", "colorsys", "filelock"):
        write(f"jobs/{name}.py", "raise RuntimeError('of the user')\n")
    sys.modules.pop("colorsys", None)
    module = loader.load("jobs/circle.py")
    assert not any(loader.is_users(each.__file__) for each in (module.queue, module.colorsys, module.filelock))


@pytest.mark.parametrize("target", ["package.circle", "package/circle.py"])
def test_a_module_or_file_may_have_several_jobs(tmp_path: Path, target: str) -> None:
    write("package/__init__.py", "")
    write("package/circle.py", JOB)
    sys.path.append(str(tmp_path))
    assert registry.get(target).roles[0].name == "lead"
    assert registry.get(f"{target}:OTHER").unit == "others"
    names = [registry.name_of(f"{target}{name}") for name in ("", ":JOB", ":OTHER")]
    assert names == ["circle", "circle", "circle-other"]
    absolute = f"{tmp_path}/{target}" if "/" in target else target
    assert registry.absolute(f"{target}:OTHER") == f"{absolute}:OTHER"


def test_the_working_directory_replaces_no_library(tmp_path: Path) -> None:
    """A module of a setting is imported from it all the same."""

    class Custom(Settings):
        thing: Annotated[str, FromUser()] = "painter:build"

    write("painter.py", "import colorsys\ndef build(): return colorsys.__file__\n")
    write("colorsys.py", "raise RuntimeError('of the user')\n")
    sys.modules.pop("colorsys", None)
    assert not loader.is_users(config.load(Custom).build("thing"))


# ---- what is refused

NESTED = '''"""A file whose error lies in a function, and another module."""
import wheels

def spokes():
    return wheels.spokes(
        -1)

TOTAL = spokes()
'''


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ndef lead(:\n", "circle.py:2: SyntaxError: invalid syntax"),
        ("\n\nimport no_such_thing\n", "circle.py:3: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def f():\n    return 1 / 0\n\nf()\n", "circle.py:2: ZeroDivisionError: division by zero"),
        ("raise KeyError('first\\nsecond')\n", "circle.py:1: KeyError: 'first\\nsecond'"),
        ("raise ValueError('first\\nsecond')\n", "circle.py:1: ValueError: first"),
        ("import sys\nsys.exit(0)\n", "circle.py:2: SystemExit: 0"),
        ("eval('1 +')\n", "circle.py:1: SyntaxError: invalid syntax (<string>, line 1)"),
        ("x = 1\nfrom rolecall import Job\n\nJOB = Job([])\n", "circle.py:4: Job(roles=...): needs a list of"),
        ("from rolecall import UsageError\nraise UsageError('set X')\n", "circle.py:2: set X"),
        (
            "from rolecall import Settings\nclass Own(Settings):\n    points = 3\n",
            "circle.py:2: PydanticUserError: A non-annotated attribute was detected: `points = 3`. ",
        ),
    ],
)
def test_an_error_of_a_file_is_a_line_with_its_place(text: str, line: str) -> None:
    write("circle.py", text)
    with pytest.raises(UsageError) as refused:
        loader.load("circle.py")
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)
    assert "circle" not in sys.modules
    write("circle.py", JOB)
    assert isinstance(registry.get("circle.py"), Job)  # once it is right


def test_the_innermost_of_the_users_lines_is_named(tmp_path: Path) -> None:
    """Not the library's below it."""
    write("jobs/circle.py", NESTED)
    write("jobs/wheels.py", "import colorsys\ndef spokes(n):\n    return colorsys.rgb_to_hls(n, None, 0)\n")
    with pytest.raises(UsageError, match=r"^jobs/wheels\.py:3: TypeError: "):
        loader.load("jobs/circle.py")


def test_a_place_outside_the_working_directory_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("jobs/circle.py", "1 / 0\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=rf"^{tmp_path}/jobs/circle\.py:1: ZeroDivisionError"):
        loader.load(str(tmp_path / "jobs" / "circle.py"))


@pytest.mark.parametrize("target", ["no.such", "package.broken", "package"])
def test_an_error_of_a_module_is_a_line(tmp_path: Path, target: str) -> None:
    write("package/__init__.py", "")
    write("package/broken.py", "\nimport nothing_of_that_name\n")
    sys.path.append(str(tmp_path))
    says = {
        "no.such": r"no\.such cannot be imported: ModuleNotFoundError: No module named 'no'",
        "package.broken": r"package/broken\.py:2: ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "package": r"JOB='package': no such job",
    }[target]
    with pytest.raises(UsageError, match=f"^{says}"):
        registry.get(target)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-circle.py", "'my-circle' is no name for a module; rename the file"),
        ("class.py", "'class' is no name for a module; rename the file"),
        ("queue.py", "a module 'queue' exists already; rename the file"),
        ("rolecall.py", "a module 'rolecall' exists already; rename the file"),
        ("joblib.py", "a module 'joblib' exists already; rename the file"),  # whether it is imported or not
        ("circle.py", "a module 'circle' exists already; rename the file"),  # another file's
    ],
)
def test_a_file_that_cannot_be_a_module_of_its_name_is_refused(name: str, says: str) -> None:
    write("one/circle.py", JOB)
    loader.load("one/circle.py")
    write(name, JOB)
    with pytest.raises(UsageError) as refused:
        loader.load(f"./{name}")
    assert str(refused.value) == f"{name}: {says}"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothing.py", "nothing.py: no such file"),
        ("./nothing", "./nothing: no such file"),
        ("circle.py:WHEEL", "circle.py: has no WHEEL = Job(...); a program without one runs by `rolecall run FILE"),
        ("circle.py:lead", "circle.py: has no lead = Job(...)"),
        (
            "program.py",
            "program.py: has no JOB = Job(...); a program without one runs by `rolecall run FILE --ranks N`",
        ),
    ],
)
def test_a_target_without_a_job_is_refused(target: str, says: str) -> None:
    write("circle.py", JOB)
    write("program.py", "def run_worker(rank, world_size): pass\n")
    with pytest.raises(UsageError) as refused:
        registry.get(target)
    assert str(refused.value).startswith(says)


# ---- tracebacks


def test_a_traceback_begins_with_the_users_frames() -> None:
    write("circle.py", "def lead(context):\n    return area(context)\n\ndef area(r):\n    return int(r)\n")
    module = loader.load("circle.py")

    def ours() -> None:  # as the worker calls it
        registry.resolve(module.lead)("round")

    code = compile("def call(function): function()", str(loader.PACKAGE / "rank" / "worker.py"), "exec")
    scope: dict[str, object] = {}
    exec(code, scope)
    with pytest.raises(ValueError, match="invalid literal") as raised:
        scope["call"](lambda: module.lead("round"))  # type: ignore[operator]
    error = raised.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    text = loader.users_traceback(error)
    assert "rank/worker.py" not in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.index("in lead\n") < text.index("in area\n") < text.index("ValueError: invalid literal for int()")
    assert loader.locate(error) == "circle.py:5"
    failure = ProgramError("environment 3 fell over")
    assert loader.with_place(failure) == "environment 3 fell over"
    failure.__cause__ = error
    assert loader.with_place(failure) == "environment 3 fell over (circle.py:5)"


def test_what_a_peer_raised_is_told_once() -> None:
    raised = ValueError("x is wrong")
    raised.__cause__ = RemoteTraceback(
        'Traceback (most recent call last):\n  File "pi.py", line 7, in f\nValueError: x is wrong'
    )
    with pytest.raises(RemoteError) as caught:
        raise RemoteError("w_0 raised ValueError: x is wrong") from raised
    text = loader.users_traceback(caught.value)
    assert text.startswith('Traceback (most recent call last):\n  File "pi.py", line 7, in f\n')
    assert text.count("\nValueError: x is wrong\n") == 1
    assert text.endswith("w_0 raised ValueError: x is wrong\n")
