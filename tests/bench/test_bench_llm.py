"""How `make bench-llm` counts and compares; no rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import llm_events, llm_lines
from bench.bench_llm import Kills, Measured
from bench.llm_events import Events, Member, Score, Update

LOST = [Update(0.0, 1, 100), Update(1.0, 2, 200), Update(2.0, 3, 300), Update(4.0, 2, 200), Update(5.0, 3, 300)]


def test_updates_that_were_lost_do_not_count() -> None:
    assert llm_events.updates_per_second(LOST, 0.0, 5.0) == pytest.approx(2 / 5)
    assert llm_events.updates_per_second(LOST, 1.5, 4.5) == 0.0
    assert llm_events.updates_per_second(LOST[1:], 0.0, 5.0) == 0.0  # there was none at the beginning


def test_tokens_are_counted_from_the_first_update_to_the_last() -> None:
    assert llm_events.tokens_per_second(llm_events.between(LOST, 0.5, 2.5)) == 100.0
    assert llm_events.tokens_per_second(LOST[:1]) == 0.0


def test_accuracy_is_that_of_the_same_number_of_updates() -> None:
    scores = [Score(step, step / 10) for step in (1, 2, 3, 4, 3)]
    scores.append(Score(4, 0.9))  # made again
    assert llm_events.accuracy(scores, 3, count=2) == pytest.approx(0.25)
    assert llm_events.accuracy(scores, 9, count=1) == 0.9
    assert llm_events.accuracy([], 9) is None


def test_a_load_that_no_death_of_that_member_explains_is_a_reload_because_of_another() -> None:
    loads = [Member(0.0, "generator", number, 7, False) for number in (0, 0, 1)]
    assert llm_events.reloads_of_others(loads, [0, 0, 1]) == 0
    assert llm_events.reloads_of_others(loads, [0, 1, 1]) == 1
    assert llm_events.reloads_of_others(loads, []) == 3


def test_processes_append_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / llm_events.FILE
    monkeypatch.setenv(llm_events.FOLDER, str(tmp_path))
    events = Events(path)
    events.read()  # there is no file yet
    llm_events.made("generator", 1)
    events.read()
    assert events.pid("generator", 1) is None
    llm_events.active("generator", 1)
    llm_events.append(LOST[0])
    with path.open("ab") as file:
        file.write(b'{"kind": "Upd')  # one that is being written
    events.read()
    assert events.pid("generator", 1) == events.loads("generator")[0].pid
    assert events.updates == LOST[:1]


SOURCE = '''"""Docstring."""
import ray


class Generator:
    """Samples."""

    @remote
    def sample(self):  # a comment

        """Docstring."""
        llm_events.made("generator", 0)
        return [
            1,
        ]


LIMIT = 2
'''


def test_lines_of_code_are_those_of_statements() -> None:
    assert llm_lines.count(SOURCE) == 7
    assert llm_lines.count(SOURCE, ["Generator"]) == 6
    with pytest.raises(ValueError, match="Learner"):
        llm_lines.count(SOURCE, ["Generator", "Learner"])


def test_bars() -> None:
    found = Measured(
        kills=Kills(updates_per_s=2.0, updates_per_s_killed=1.9),
        rates={"asynchronous": {1: 80.0, 2: 95.0}, "synchronous": {1: 500.0}},
        single={1: 90.0, 2: 100.0},
    )
    known = found.to_json()
    assert known["goodput"] == known["async_over_single"] == 0.95
    assert known["reloads_of_others"] == 0
    assert all(met for *_, met in found.bars())
    assert not Measured().bars()
    assert "goodput" not in Measured(kills=Kills(updates_per_s=2.0)).to_json()  # the second run is still to come
