"""Maps over members that die and join, and the first answers of a role, in one process."""

from __future__ import annotations

import itertools
import queue
import random
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rolecall
from rolecall import Context, PeerLostError, RemoteError, Run, UsageError
from rolecall.context import shared
from rolecall.links.pool import Lost
from tests.inprocess.jobs import Worker, run
from tests.wire.wires import until

FACTORS = torch.ones(1000, 100)  # large enough to be sent once
SUM = FACTORS.numel()


def test_each_item_is_answered_once_while_members_die_and_join(tmp_path: Path) -> None:
    def lead(context: Any, here: Run) -> dict[str, Any]:
        chance, kills = random.Random(7), 0
        here.scale("worker", 4)
        answers = list[float]()
        for number, answer in enumerate(context.map(Worker.scale, range(1000), FACTORS, seconds=0.003)):
            answers.append(answer)
            peers = context.peers("worker")
            if number % 100 == 50 and len(peers) > 2:
                here.kill(chance.choice(peers).name)
                kills += 1
        until(lambda: not shared._values, "the members forget what they shared")
        copies = max(context.call_all(Worker.copies))
        return {"answers": answers, "kills": kills, "copies": copies, "generation": context.generation}

    result = run(lead, tmp_path)["result"]
    assert result["answers"] == [number * SUM for number in range(1000)]
    assert (result["copies"], result["generation"]) == (1, 1)
    assert result["kills"] >= 5


def test_a_map_ends_with_its_reader_its_error_and_its_iterable(tmp_path: Path) -> None:
    def lead(context: Context[Any], here: Run) -> None:
        endless = context.map_unordered(Worker.scale, itertools.count(), FACTORS)
        assert [answer == item * SUM for item, answer in itertools.islice(endless, 50)] == [True] * 50
        del endless  # dropped
        until(lambda: not shared._values, "the members forget what they shared")
        failing = context.options(window=3).map(Worker.need, [1, 2, 0, 3])
        with pytest.raises(RemoteError, match="no such luck"):
            list(failing)
        with pytest.raises(ZeroDivisionError):
            list(context.map(Worker.double, (1 // (2 - number) for number in range(5))))
        assert [*context.map(Worker.double, [])] == []
        second = context.options(to=context.peers("worker")[1:])
        assert [*second.map(Worker.name, range(3), "x")] == ["worker_1 x"] * 3
        with pytest.raises(UsageError, match="at least one call"):
            context.options(window=0)
        with pytest.raises(UsageError, match="lead_0 is no worker"):
            context.options(to=[context.rank0]).map(Worker.double, [1])

    run(lead, tmp_path)


def test_an_answer_is_given_out_before_the_next_item_is_read(tmp_path: Path) -> None:
    def lead(context: Context[Any], here: Run) -> dict[str, Any]:
        numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        numbers.put(1)
        seen = list[int]()
        for item, double in context.map_unordered(Worker.double, iter(lambda: numbers.get(timeout=5), None)):
            seen.append(item)
            numbers.put(double if double < 100 else None)
        return {"seen": seen}

    assert run(lead, tmp_path, workers=1)["result"]["seen"] == [1, 2, 4, 8, 16, 32, 64]


def test_a_member_whose_method_has_lost_another_one_stays(tmp_path: Path) -> None:
    def lead(context: Context[Any], here: Run) -> None:
        peers, anyone = context.peers("worker"), context.options(lost="answer")
        for calls in (
            lambda: [*anyone.map(Worker.miss, [1])],
            lambda: [*anyone.call_each(Worker.miss)],
            lambda: context.first(1, Worker.miss),
            lambda: context.call_any(Worker.miss).result(),
        ):
            with pytest.raises(PeerLostError, match="PeerLostError: another one does not answer"):
                calls()
            assert context.peers("worker") == peers

    run(lead, tmp_path)


def test_what_may_not_be_called_again_is_lost(tmp_path: Path) -> None:
    def lead(context: Context[Any], here: Run) -> None:
        ways: list[Lost] = ["skip", "answer", "raise"]
        for ordinal, lost in enumerate(ways):
            threading.Timer(0.1, here.kill, [f"worker_{ordinal}"]).start()
            seconds = [0.3] * len(context.peers("worker"))
            answers = context.options(lost=lost).map(Worker.hold, seconds)
            if lost == "raise":
                with pytest.raises(PeerLostError):
                    list(answers)
            else:
                kinds = [type(answer).__name__ for answer in answers]
                assert sorted(kinds) == ["NoneType"] * (len(seconds) - 1) + ["PeerLostError"] * (lost == "answer")

    run(lead, tmp_path, workers=3)


def test_a_map_goes_on_in_the_next_generation_with_what_is_left(tmp_path: Path) -> None:
    """Each answer is a step, and the state has what was answered."""
    called = list[int]()

    def lead(context: Context[Any], here: Run) -> dict[str, Any]:
        state = context.restore({"answers": {}})
        items = [item for item in range(40) if item not in state["answers"]]
        answers = context.map_unordered(Worker.double, items)
        for step, (item, answer) in zip(context.steps(40), answers, strict=False):
            called.append(item)
            state["answers"][item] = answer
            if step == 10:
                context.save()
            if step == 20 and context.generation == 1:
                here.kill("lead_0")
        return {"answers": sum(state["answers"].values()), "generation": context.generation}

    result = run(lead, tmp_path)["result"]
    assert (result["answers"], result["generation"]) == (sum(range(40)) * 2, 2)
    assert len(called) == 20 + 30


def test_the_example_of_a_pool_finds_the_best_rate(tmp_path: Path) -> None:
    pool = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pool.py"))
    assert rolecall.run(pool["JOB"], in_process=True, trials=20, checkpoint_dir=tmp_path)["loss"] < 1e-9


def test_the_first_answers_cancel_the_other_calls(tmp_path: Path) -> None:
    def lead(context: Context[Any], here: Run) -> dict[str, Any]:
        slow, peers = context.peers("worker")[0], context.peers("worker")
        context.call(slow, Worker.slow_down).result()
        assert len(context.first(2, Worker.turtle)) == 2
        until(lambda: context.call(slow, Worker.gave_up).result(), "the slow one is cancelled")
        assert context.peers("worker") == peers
        assert len(context.options(to=peers[1:]).first(2, Worker.turtle)) == 2
        for k in (0, 4):
            with pytest.raises(UsageError, match="the role worker has 3 members; ask for 1 to 3 answers"):
                context.first(k, Worker.turtle)
        threading.Timer(0.1, here.kill, ["worker_2"]).start()
        with pytest.raises(PeerLostError, match="2 members of the role worker can answer"):
            context.first(3, Worker.hold, 0.5)
        return {"generation": context.generation}

    assert run(lead, tmp_path, workers=3)["result"]["generation"] == 1
