"""Who waits for whom, and what of that is a deadlock."""

from __future__ import annotations

from typing import Any

import pytest

from rolecall.observe.stacks import deadlocks, stack_report
from rolecall.observe.stacks.deadlocks import Conclusions, Wait
from rolecall.observe.stacks.threads import Call, Frame, Rank, State, Thread
from rolecall.wire.messages import MAX_RUNNING

RPC = Frame("_run_function", "torch/distributed/rpc/internal.py", 209)
WAIT = Frame("wait_all", "torch/futures/__init__.py", 334, "for fut in torch._C._collect_all(futures):")
CONDITION = Frame("Condition.wait", "threading.py", 320, "waiter.acquire()")
LOCK = Frame("locked", "job.py", 5, "with self.lock:")
MAIN = Frame("lead", "job.py", 9, "context.wait_all(calls)")
TURNS = Frame("serve_turns", "rolecall/wire/dispatch.py", 42)


def main(*frames: Frame, state: State = "waits") -> Thread:
    return Thread(1, (*frames, MAIN), state, main=True)


def idle_main() -> Thread:
    return Thread(1, (TURNS,), "waits", main=True)


def serves(method: str, *frames: Frame, number: int = 2, state: State = "waits") -> Thread:
    return Thread(number, (*frames, Frame(method, "job.py", 7), RPC), state)


def calls(to: str, method: str, thread: int = 1, seconds: float = 5.0) -> Call:
    return Call(to, method, seconds, thread)


def at_work(name: str = "trainer_9") -> Rank:
    """A rank in which something goes on."""
    return Rank(name, (main(state="computes"),))


def look(*ranks: Rank) -> Conclusions:
    return deadlocks.look(ranks)


# ---- deadlocks


def two_with_a_lock() -> tuple[Rank, Rank]:
    return (
        Rank("trainer_0", (main(WAIT), serves("report", LOCK)), (calls("ps_0", "push"),)),
        Rank("ps_0", (idle_main(), serves("push", WAIT)), (calls("trainer_0", "report", thread=2),)),
    )


def test_two_ranks_that_wait_for_each_other_with_a_lock_are_a_deadlock_whatever_others_do() -> None:
    picture = look(*two_with_a_lock(), at_work())
    assert picture.deadlocks == (("ps_0", "trainer_0", "ps_0"),)
    assert picture.active == ("trainer_9",)


def test_calls_that_are_served_within_calls_are_none() -> None:
    agent, observer = two_with_a_lock()
    for state in ("computes", "moves", "sleeps", "input", ""):
        threads = (main(WAIT), serves("report", LOCK, state=state))
        picture = look(Rank("trainer_0", threads, agent.calls), observer)
        assert picture.deadlocks == (), state
        assert picture.active == ("trainer_0",), state


def test_a_circle_of_three_ranks_is_one_deadlock() -> None:
    def rank(name: str, to: str) -> Rank:
        return Rank(name, (idle_main(), serves("turn", WAIT)), (calls(to, "turn", thread=2),))

    picture = look(rank("a_0", "b_0"), rank("b_0", "c_0"), rank("c_0", "a_0"), at_work())
    assert picture.deadlocks == (("a_0", "b_0", "c_0", "a_0"),)


def test_a_rank_that_only_waits_for_a_deadlock_is_not_in_it() -> None:
    victim = Rank("trainer_1", (main(WAIT),), (calls("ps_0", "push"),))
    picture = look(*two_with_a_lock(), victim, at_work())
    assert picture.deadlocks == (("ps_0", "trainer_0", "ps_0"),)
    assert Wait("trainer_1", "ps_0", "push", 5.0) in picture.waits


def test_a_rank_that_calls_itself_under_a_lock() -> None:
    rank = Rank("ps_0", (main(WAIT), serves("store", LOCK)), (calls("ps_0", "store"),))
    assert look(rank, at_work()).deadlocks == (("ps_0", "ps_0"),)


def test_two_locks_in_one_rank_need_no_call() -> None:
    rank = Rank("ps_0", (main(LOCK), serves("store", LOCK)))
    picture = look(rank, at_work())
    assert picture.deadlocks == (("ps_0", "ps_0"),)
    assert "deadlock: ps_0 > ps_0 (threads of its process wait for each other)" in [*stack_report.conclusions(picture)]


@pytest.mark.parametrize("serving", [MAX_RUNNING, MAX_RUNNING - 1])
def test_a_call_beyond_the_last_needs_one_to_end(serving: int) -> None:
    threads = [serves("ask", WAIT, number=2 + number) for number in range(serving)]
    lead = Rank("lead_0", (idle_main(), *threads), tuple(calls("ps_0", "get", each.number) for each in threads))
    back = Rank("ps_0", (idle_main(), serves("get", WAIT)), (calls("lead_0", "more", thread=2),))
    picture = look(lead, back, at_work())
    assert bool(picture.deadlocks) == (serving == MAX_RUNNING)
    assert picture.exhausted == (("lead_0",) if serving == MAX_RUNNING else ())
    answering = Rank("ps_0", (idle_main(), serves("get", state="computes")))  # an answer needs no thread
    assert look(lead, answering, at_work()).deadlocks == ()


def test_any_answer_releases_a_thread_with_two_calls() -> None:
    trainer, server = two_with_a_lock()
    both = Rank("trainer_0", trainer.threads, (*trainer.calls, calls("trainer_9", "compute")))
    busy = Rank("trainer_9", (idle_main(), serves("compute", state="computes")))
    assert look(both, server, busy).deadlocks == ()
    assert look(both, server, busy).active == ("trainer_9",)
    assert look(both, server, at_work()).deadlocks == ()  # nothing serves it yet, or any more


def test_a_condition_may_be_fulfilled_by_any_rank_that_is_at_work() -> None:
    trainer = Rank("trainer_0", (main(WAIT),), (calls("ps_0", "exchange"),))
    server = Rank("ps_0", (idle_main(), serves("exchange", CONDITION)), ())
    back = Rank("ps_0", (idle_main(), serves("exchange", CONDITION)), (calls("trainer_0", "ready", thread=3),))
    assert look(trainer, server, at_work()).deadlocks == ()
    assert look(trainer, back, at_work()).deadlocks == ()
    two = Rank("ps_0", (main(CONDITION), serves("exchange", CONDITION)))
    assert look(trainer, two, at_work()).deadlocks == ()
    # nothing goes on anywhere
    assert look(trainer, back).deadlocks == (("ps_0", "trainer_0", "ps_0"),)
    assert [*stack_report.conclusions(look(trainer, server))][-1] == "standstill: no rank has any activity"


def test_an_answer_that_comes_later_may_come_from_any_rank_that_is_at_work() -> None:
    """No thread serves `exchange`: its answer is a future that another call sets."""
    trainers = [Rank(f"trainer_{number}", (main(WAIT),), (calls("ps_0", "exchange"),)) for number in range(2)]
    server = Rank("ps_0", (idle_main(),))
    assert look(*trainers, server, at_work()).deadlocks == ()
    picture = look(*trainers, server)
    assert picture.deadlocks == ()
    assert picture.active == ()


def test_unknown_rank_counts_as_active() -> None:
    trainer, server = two_with_a_lock()
    silent = Rank("ps_0", error="did not answer within 12 s")
    assert look(trainer, silent).deadlocks == ()
    assert look(trainer, silent).active == ("ps_0",)
    assert look(server).deadlocks == ()  # whom it waits for has left


def test_a_collective_operation_waits_for_all_that_are_missing() -> None:
    reduce = Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2800)
    reducing = [Rank(f"trainer_{number}", (main(reduce),)) for number in (0, 1)]
    missing = Rank("trainer_2", (main(WAIT), serves("get")), (calls("trainer_0", "turn"),))
    turn = Rank("trainer_0", (main(reduce), serves("turn", LOCK)))
    picture = look(*reducing, missing)
    assert Wait("trainer_0", "trainer_2", "all_reduce") in picture.waits
    assert str(Wait("trainer_0", "trainer_2", "all_reduce")) == "trainer_0 waits for trainer_2 (all_reduce)"
    assert look(turn, reducing[1], missing, at_work("ps_0")).deadlocks == (("trainer_0", "trainer_2", "trainer_0"),)
    assert look(turn, reducing[1], at_work("trainer_2")).deadlocks == ()


def test_a_lock_is_not_held_by_a_thread_that_waits_for_work() -> None:
    trainer, server = two_with_a_lock()
    writer = Thread(7, (CONDITION, Frame("run", "writer.py", 3), Frame("Thread.run", "threading.py", 982)), "waits")
    beat = Thread(8, (Frame("Pipe.heartbeat_forever", "rolecall/rank/worker.py", 81),), "moves")
    crowded = Rank("trainer_0", (*trainer.threads, writer, beat), trainer.calls)
    assert look(crowded, server, at_work()).deadlocks == (("ps_0", "trainer_0", "ps_0"),)
    busy = Thread(7, (Frame("run", "writer.py", 3),), "computes")  # which may hold it
    assert look(Rank("trainer_0", (*trainer.threads, busy), trainer.calls), server).deadlocks == ()


# ---- what the threads say


def reply(**values: Any) -> dict[str, Any]:
    worker = {"state": "running", "generation": 2, "step": 118, "phase": "saving", "phase_seconds": 12.34}
    stacks = {"note": "", "threads": [], "calls": []}
    return {**worker, "silent_seconds": 0.3, **stacks, **values}


def thread(number: int, *frames: tuple[str, str, int, str], **values: Any) -> dict[str, Any]:
    return {"number": number, "name": "", "main": False, "gil": False, "state": "waits", "frames": [*frames], **values}


LEAD = ("lead", "job.py", 9, "context.wait_all(calls)")
OUTER = ("main", "rolecall/rank/worker.py", 150, "")
HANDLER = ("Dispatcher._call", "rolecall/wire/dispatch.py", 190, "")
BOOT = ("Thread._bootstrap", "threading.py", 1002, "")


def test_the_report_shows_what_matters_first_and_sums_up_the_rest() -> None:
    replies = {
        "lead_0": reply(
            threads=[
                thread(7, ("heartbeat_forever", "rolecall/rank/worker.py", 81, ""), BOOT, state="moves"),
                thread(3, ("store", "job.py", 5, "with self.lock:"), HANDLER),
                thread(4, ("store", "job.py", 5, "with self.lock:"), HANDLER),
                thread(1, LEAD, OUTER, main=True),
                thread(5, ("write", "job.py", 3, ""), BOOT, name="writer", state="computes"),
                thread(6),
            ],
            calls=[("trainer_0", "train", 3.21, 1), ("trainer_0", "train", 1.0, 1)],
        ),
        "trainer_0": reply(phase="", threads=[thread(1, TURN, OUTER, main=True)], calls=[("lead_0", "store", 2.0, 9)]),
        "trainer_1": {"error": "did not answer within 12 s"},
    }
    assert stack_report.text(replies) == TEXT
    assert "lead_0: running" not in stack_report.text(replies, ["trainer_1"])


TURN = ("Dispatcher.serve_turns", "rolecall/wire/dispatch.py", 42, "")
TEXT = """\
lead_0: running, generation 2, step 118, saving for 12.3 s
  main thread: waits 3.2 s for trainer_0 (2 calls of train)
    lead (job.py:9)  context.wait_all(calls)
  2 threads: serves store for trainer_0: waits for the lock self.lock
    store (job.py:5)  with self.lock:
  thread 'writer': computes
    write (job.py:3)

trainer_0: running, generation 2, step 118
  main thread: idle

trainer_1: did not answer within 12 s

who waits for whom:
  lead_0 waits 3.2 s for trainer_0 (train)
  trainer_0 waits 2.0 s for lead_0 (store)"""


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"state": "none"}, "ps_0: no worker"),
        ({"state": "stopped", "silent_seconds": 4.21}, "its worker is stopped (SIGSTOP)"),
        ({"silent_seconds": 4.21}, "no heartbeat for 4.2 s: a thread holds the GIL, or the process gets no CPU"),
        ({"silent_seconds": 4.21, "threads": [thread(1, LEAD, gil=True, state="computes")]}, "computes, holds the GIL"),
        ({"note": "py-spy: Permission denied"}, "no stacks (py-spy: Permission denied)"),
        (
            {"threads": [thread(1, ("_meet", "rolecall/context/meeting.py", 70, ""), main=True)]},
            "waits for the other ranks' workers",
        ),
        ({"threads": "no list"}, "ps_0: its reply cannot be read; run the same version in every rank"),
        ({}, "no rank waits long for another"),
    ],
)
def test_the_report_says(values: dict[str, Any], text: str) -> None:
    assert text in stack_report.text({"ps_0": reply(**values)})
