"""Files from elsewhere, whose checksums are right: none is used as code, as a place outside, or as it is."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolecall import __main__, fields
from rolecall.checkpoint import checkpoint
from rolecall.checkpoint.checkpoint import CheckpointError
from rolecall.declare import registry
from rolecall.errors import USAGE
from rolecall.jobs import rl
from rolecall.observe import targets
from rolecall.observe.trace import perfetto
from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.summary import Summary
from rolecall.record import files, history, records, rundir
from tests.checkpoint import forged
from tests.export import exports

EVIL = "import pathlib\npathlib.Path('ran').touch()\ndef build(*_): ...\n"
Command = Callable[..., tuple[int, str]]
SOME = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder with a module that must not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in ("JOB", "POLICY", "WRAPPERS", "ENV_ID", "DATASET", "MODEL", "CORPUS"):
        monkeypatch.delenv(name, raising=False)
    Path("evilmod.py").write_text(EVIL)
    yield
    for name in ("evilmod", "own"):
        sys.modules.pop(name, None)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """The exit code of `rolecall WORDS`, and what it says on standard error."""

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = __main__.main(list(words))
        return code, capsys.readouterr().err

    return run


def about(job: str, **pinned: Any) -> dict[str, Any]:
    return {"settings": pinned, "layout": registry.get(job).layout, "seconds": 1.0, "done": 1.0}


# ---- what names code


@pytest.mark.parametrize("words", [["eval"], ["export", "--format", "torch"]])
@pytest.mark.parametrize(
    ("job", "name", "value"),
    [
        ("rl", "policy", "evilmod:build"),
        ("rl", "policy", "evilmod"),
        ("rl", "wrappers", "evilmod:build"),
        ("rl", "env_id", "evilmod:CartPole-v1"),
        ("ps", "dataset", "evilmod:build"),
        ("ps", "model", "evilmod:build"),
        ("hybrid", "dataset", "evilmod:build"),
        ("rnn", "corpus", "/etc"),
        ("rnn", "corpus", "evilmod.py"),
    ],
)
def test_code_that_a_checkpoint_names_does_not_run(
    command: Command, job: str, name: str, value: str, words: list[str]
) -> None:
    state = {"learner": {"model": {}}}
    path = forged.write(Path("run"), job, {"state": state, "about": about(job, **{name: value})})
    code, said = command(words[0], job, *words[1:], "--checkpoint", str(path))
    assert code == USAGE
    flag = f"--{name.replace('_', '-')}={value}"
    assert said.startswith(f"rolecall: {path.name}: names code or a file, {name.upper()}={value}; ")
    assert said.endswith(f"{flag}\n")
    assert not Path("ran").exists()
    code, said = command(words[0], job, *words[1:], "--checkpoint", str(path), flag)
    assert "names code" not in said  # the user has named it too
    assert Path("ran").exists() == (job == "rl")  # of the others, the state is looked at before


OWN = '''"""A job of a user."""
from typing import Annotated
from rolecall import FromUser, Job, Role, Settings

class Own(Settings):
    shape: Annotated[str, FromUser(unless="round|square")] = "flat"
    width: int = 3

def lead(context): ...

def evaluate(settings, state):
    return {"shape": len(settings.shape), "width": settings.width, "token": settings.job_token_file is not None,
            "addr": settings.master_addr == "evil"}

JOB = Job([Role("lead", lead)], settings=Own, evaluate=evaluate, pinned=("shape", "width"))
'''


@pytest.fixture
def own(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `rolecall eval` of a user's job prints of a checkpoint with these settings, or its last line."""
    Path("own.py").write_text(OWN)

    def evaluate(pinned: dict[str, Any], *words: str) -> Any:
        path = forged.write(Path("run"), "own", {"state": {}, "about": {"settings": pinned}})
        code = __main__.main(["eval", "own.py", "--checkpoint", str(path), "--json", *words])
        output = capsys.readouterr()
        return (json.loads(output.out), output.err) if code == 0 else output.err

    return evaluate


def test_only_pinned_settings_are_taken(own: Callable[..., Any]) -> None:
    Path("token").write_text("x" * 64)
    result, said = own({"width": 9, "job_token_file": "token", "master_addr": "evil", "no_setting": 1})
    assert (result, said) == ({"shape": 4, "width": 9, "token": 0, "addr": 0}, "")


@pytest.mark.parametrize("value", ["flat", "round", "square"])
def test_a_harmless_value_is_taken(own: Callable[..., Any], value: str) -> None:
    assert own({"shape": value})[0]["shape"] == len(value)


@pytest.mark.parametrize("value", ["rounded", "round\n", 5, None, ["round"]])
def test_another_is_the_users_to_give(own: Callable[..., Any], value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own({"shape": value}).startswith(f"rolecall: {forged.NAME}: names code or a file, SHAPE=")
    result, said = own({"shape": value}, "--shape", "of mine")
    assert result["shape"] == len("of mine")
    assert said == f"rolecall: SHAPE=of mine is used: {forged.NAME} was made with {fields.shown(value)}\n"
    monkeypatch.setenv("SHAPE", "of mine")
    assert own({"shape": value})[0]["shape"] == len("of mine")


def test_a_path_is_the_users_to_give() -> None:
    path = rl.RlSettings.model_fields["checkpoint_dir"]
    assert not fields.is_harmless(path, "/etc")
    assert fields.is_harmless(path, "checkpoints")


# ---- a wrong inside


GOOD = {"state": {}, "about": {}}
WRONG: dict[str, Any] = {
    "nothing": None,
    "no state": {"about": {}},
    "no about": {"state": {}},
    "a list": [1],
    "a tensor": torch.zeros(3),
    "a state of another type": {**GOOD, "state": [1, 2]},
    "names that are none": {**GOOD, "state": {5: 1}},
    "settings of another type": {**GOOD, "about": {"settings": [1]}},
    "settings that are tensors": {**GOOD, "about": {"settings": {"env_id": torch.zeros(2**20)}}},
    "seconds that are no number": {**GOOD, "about": {"seconds": "1"}},
    "seconds that are NaN": {**GOOD, "about": {"seconds": float("nan")}},
    "negative work": {**GOOD, "about": {"done": -1.0}},
    "endless work": {**GOOD, "about": {"done": float("inf")}},
    "a layout that is no number": {**GOOD, "about": {"layout": "2"}},
    "no zip": b"\x80\x02}q\x00.",
    "no bytes": b"",
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
}
NESTED: list[Any] = []
NESTED.append(NESTED)
WRONG["settings without an end"] = {**GOOD, "about": {"settings": {"env_id": NESTED}}}
many: list[Any] = ["ha"]
for _ in range(60):
    many = [many, many]
WRONG["a state without an end"] = {**GOOD, "state": {"a": NESTED}}
WRONG["a state of 2**60 values"] = {**GOOD, "state": {"a": many}}
WRONG["2**60 settings"] = {**GOOD, "about": {"settings": {"env_id": many}}}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_inside_is_one_line(command: Command, what: str) -> None:
    path = forged.write(Path("run"), "rl", WRONG[what])
    with pytest.raises(CheckpointError):
        checkpoint.read(path, "rl")
    code, said = command("eval", "rl", "--checkpoint", str(path))
    assert (code, said.count("\n")) == (USAGE, 1)
    assert said.startswith(f"rolecall: {path.name} cannot be loaded: ")


def test_a_first_line_with_impossible_numbers_is_refused() -> None:
    for name, values in {"manifest": ("1", -1, 10**9), "generation": (10**300,), "format": (-3,)}.items():
        for value in values:
            path = forged.write(Path("run"), "rl", GOOD, **{name: value})
            with pytest.raises(CheckpointError, match=r"first line cannot be read|is torn"):
                checkpoint.read(path, "rl")


def test_what_is_no_file_is_not_waited_for() -> None:
    Path("run").mkdir()
    os.mkfifo(Path("run") / forged.NAME)
    with pytest.raises(CheckpointError, match="is no file"):
        checkpoint.read(Path("run") / forged.NAME, "rl")


def test_a_line_has_no_control_characters(command: Command) -> None:
    for job, pinned in (("rl\x1b[2J\nx", {}), ("rl", {"env_id": "a\x1b[2J\nb"}), ("rl", {"policy": "a\x1b[2J\nb"})):
        path = forged.write(Path("run"), job, {"state": {}, "about": about("rl", **pinned)})
        code, said = command("eval", "rl", "--checkpoint", str(path))
        assert (code, said.count("\n"), said.rstrip("\n").isprintable()) == (USAGE, 1, True), said


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("columns", "weight", "shape"), [-2, 3]),
        (("columns", "weight", "shape"), [float("nan"), 3]),
        (("columns", "weight", "shape"), [2**70, 3]),
        (("columns", "weight", "shape"), []),
        (("columns", "weight", "total"), 2**61),
        (("columns", "weight", "total"), 1),
        (("columns", "weight", "step"), 0),
        (("columns", "weight", "first"), -1),
        (("columns", "weight", "dtype"), "F9"),
        (("name",), "../../outside"),
        (("name",), ".."),
        (("name",), "a\0b"),
        (("name",), 5),
        (("length",), 2**61),
        (("length",), -1),
        (("columns",), []),
        (("checksum",), None),
    ],
)
def test_a_shard_that_cannot_be_is_one_line(command: Command, place: tuple[str, ...], value: Any) -> None:
    path = exports.hybrid(Path("run"))
    body = path.read_bytes().partition(b"\n")
    head = json.loads(body[0])
    content, manifest = body[2][: -head["manifest"]], json.loads(body[2][-head["manifest"] :])
    for each in manifest["embeddings"]:
        for name in place[:-1]:
            each = each[name]
        each[place[-1]] = value
    moved = forged.write(Path("run"), "hybrid", content, manifest)
    path.unlink()
    (Path("run") / "shards" / path.stem).rename(Path("run") / "shards" / moved.stem)
    code, said = command("eval", "hybrid", "--checkpoint", str(moved), "--dataset", "tests.export.exports:lines")
    assert (code, said.count("\n")) == (USAGE, 1), said
    assert said.startswith(f"rolecall: {moved.name}")


@pytest.mark.parametrize("job", ["rl", "ps", "rnn", "hybrid"])
@pytest.mark.parametrize("words", [["eval"], ["export", "--format", "safetensors"]])
def test_a_state_that_is_none_of_the_jobs_is_one_line(command: Command, job: str, words: list[str]) -> None:
    for state in (
        {},
        {"learner": {"model": [1]}},
        {"learner": {"model": {"x": "y"}}},
        {"model": 5, "ledger": None},
        {"text": {"vocabulary": [1], "digest": 0}, "embedding": {}},
    ):
        path = forged.write(Path("run"), job, {"state": state, "about": about(job)})
        code, said = command(words[0], job, *words[1:], "--checkpoint", str(path))
        assert (code, said.count("\n")) == (USAGE, 1), said


# ---- whatever is inside

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.zeros(0), torch.full((2, 3), float("nan")), torch.zeros(1).expand(2**40), torch.float16]),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), each, max_size=4),
    max_leaves=12,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("9" * 400),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=8), each, max_size=4),
    max_leaves=12,
)


@SOME
@given(
    content=PLAIN
    | st.fixed_dictionaries(
        {
            "state": PLAIN,
            "about": PLAIN
            | st.fixed_dictionaries({}, optional={"settings": PLAIN, "seconds": PLAIN, "done": PLAIN, "layout": PLAIN}),
        }
    ),
    manifest=JSON,
)
def test_a_checkpoint_is_read_or_refused(content: Any, manifest: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = forged.write(Path(folder), "rl", content, manifest)
        try:
            snapshot = checkpoint.read(path, "rl").whole()
        except CheckpointError:
            return
        assert all(isinstance(name, str) for name in snapshot.state)
        json.dumps(snapshot.pinned)


@SOME
@given(st.data())
def test_a_damaged_checkpoint_with_a_right_checksum_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(BODY)
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = forged.write(Path(folder), "rl", bytes(body))
        with contextlib.suppress(CheckpointError):
            checkpoint.read(path, "rl")


BODY = forged.packed({"state": {"a": torch.ones(3, 2), "n": [5, 2.5, "x"]}, "about": {"settings": {"seed": 1}}})
KINDS = ["start", "point", "score", "low", "goal", "end", "lost", "stall", "event", "x"]
NAMES = ["name", "generation", "step", "seconds", "time", "after", "value", "cause", "reason", "what"]
NAMES += ["generations", "began", "ends", "lost"]
PARTS = ["job", "state", "reason", "generations", "world", "curve", "settings", "throughput"]
PARTS += ["version", "training_seconds"]
ROW = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS) | JSON}, optional=dict.fromkeys(NAMES, JSON | st.integers(0, 9))
)
SUMMARY = JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(PARTS, JSON))
OF_A_PROCESS = ["job", "role", "ordinal", "rank", "generation", "pid", "host", "monotonic_ns", "unix_ns"]
PROCESS = JSON | st.fixed_dictionaries(dict.fromkeys(OF_A_PROCESS, JSON | st.integers(0, 5) | st.just("ps")))
ATTRIBUTES = st.dictionaries(st.sampled_from(["began_ns", "to", "step", "x"]), JSON, max_size=3)
TEXT, TIME = st.text(max_size=4), st.integers()
SPAN = st.tuples(st.just("span"), TEXT, TEXT, TEXT, st.sampled_from(records.KINDS), TIME, TIME, TIME, ATTRIBUTES, TEXT)


@SOME
@given(rows=st.lists(ROW, max_size=8), summary=SUMMARY, generation=JSON, done=JSON, ranks=JSON)
def test_a_runs_directory_is_shown_or_refused(
    rows: list[Any], summary: Any, generation: Any, done: Any, ranks: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        written = {rundir.SUMMARY: summary, rundir.GENERATION: generation, rundir.FAILED: done, targets.RANKS: ranks}
        for file, content in written.items():
            (folder / file).write_text(json.dumps(content))
        read = history.read(folder)
        perfetto.write_file(Calls(records.Trace([])), folder / "trace.json", read)
        assert targets.ranks_of(folder) == []
        assert targets.final_state(folder).isprintable()


@SOME
@given(
    st.lists(st.tuples(st.sampled_from(["process", "span", "clock"]), PROCESS), max_size=4), st.lists(SPAN, max_size=6)
)
def test_a_trace_is_read_or_left_out(first: list[Any], spans: list[Any]) -> None:
    process = ["process", dict(zip(OF_A_PROCESS, ("ps", "ps", 0, 0, 1, 5, "a", 5, 9), strict=True))]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [process, *first, *spans]))
        (Path(name) / "b.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*first, *spans]))
        trace = records.read(Path(name))
        perfetto.write_file(Calls(trace), Path(name) / "trace.json")
        Summary(Calls(trace)).render()


# ---- places outside


def test_nothing_is_written_through_a_link() -> None:
    Path("outside").write_text("mine")
    Path("run").mkdir()
    (Path("run") / ".page.html.tmp").symlink_to(Path("outside").absolute())
    files.write_atomically(Path("run") / "page.html", b"theirs")
    assert Path("outside").read_text() == "mine"
    assert (Path("run") / "page.html").read_bytes() == b"theirs"
    (Path("run") / ".trace.json.tmp").symlink_to(Path("outside").absolute())
    perfetto.write_file(Calls(records.Trace([])), Path("run") / "trace.json")
    assert Path("outside").read_text() == "mine"
