"""`rolecall logs` and `rolecall fetch` of a run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall import __main__
from rolecall.errors import USAGE
from rolecall.launch import logs
from rolecall.observe import targets
from rolecall.observe.targets import Address
from rolecall.record import rundir

RUN = Path("runs") / "mine"
LEAD = "{t}:01.5Z [info] began\n  detail\n{t}:04.5Z [info] ended\n".replace("{t}", "2026-01-01T00:00")
WORKER = '{"event": "began", "timestamp": "2026-01-01T00:00:02.500000Z"}\nlast'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are in the test's folder; `mine` has logs."""
    monkeypatch.chdir(tmp_path)
    (RUN / "logs").mkdir(parents=True)
    (RUN / "logs" / "lead_0.log").write_text(LEAD)
    (RUN / "logs" / "worker_0.log").write_text(WORKER)


def test_the_lines_of_all_ranks_are_in_the_order_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["logs", "mine"]) == 0
    lines = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [rank for rank, _ in lines] == ["lead_0:", "lead_0:", "worker_0:", "worker_0:", "lead_0:"]
    assert [line for rank, line in lines if rank == "lead_0:"] == LEAD.splitlines()
    assert lines[3][1] == "last"


def test_the_log_of_one_rank_is_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["logs", str(RUN), "worker-0"]) == 0
    assert capsys.readouterr().out == f"{WORKER}\n"


@pytest.mark.parametrize(("words", "said"), [(["mine", "nobody"], "there are lead_0, worker_0"), (["none"], "RUN")])
def test_what_is_not_there_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["logs", *words]) == USAGE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_what_is_followed_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets.publish(RUN, [Address("lead_0", "http://127.0.0.1:7/metrics")])
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.01)
    read = logs.Logs.read

    def read_and_write(self: logs.Logs, is_last: bool) -> Iterator[tuple[bytes, str, str]]:
        yield from read(self, is_last)
        if not is_last:
            with (RUN / "logs" / "worker_0.log").open("a") as file:
                file.write(" line\nthe end\n")
            (RUN / "logs" / "worker_1.log").write_text("added\n")
            targets.conclude(RUN, 0, "finished")

    monkeypatch.setattr(logs.Logs, "read", read_and_write)
    assert __main__.main(["logs", "mine", "--follow"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"worker_0: last line", "worker_0: the end", "worker_1: added"} <= {*shown}
    assert len(shown) == 7


def test_what_a_run_has_written_is_named_and_copied(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["fetch", "mine"]) == USAGE
    names = ["summary.json", "history.jsonl", "checkpoint-000002-0000000007.pt"]
    for name in [*names, "checkpoint-000001-0000000009.pt", "page.html"]:
        (RUN / name).write_text(name)
    shards = RUN / rundir.SHARDS / "checkpoint-000002-0000000007"
    shards.mkdir(parents=True)
    (shards / "one").touch()
    assert __main__.main(["fetch", "mine"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        *(str(RUN / name) for name in names),
        str(shards),
    ]
    for _ in range(2):  # again, over what is there
        assert __main__.main(["fetch", "mine", "--to", "a/copy"]) == 0
    copied = {str(path.relative_to("a/copy")) for path in Path("a/copy").rglob("*") if path.is_file()}
    assert copied == {*names, str(shards.relative_to(RUN) / "one")}
    assert __main__.main(["fetch", "mine", "--to", str(RUN)]) == USAGE
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rolecall: --to {RUN}: cannot be written")
