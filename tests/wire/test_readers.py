"""The threads that read a connection and run what arrives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rolecall.wire.frames import Frame, Kind
from rolecall.wire.readers import EAGER_CALLS, IDLE_LOOKS, Readers, Watch

DEADLINE = 20.0


class Connection:
    """Frames that are run by `run`, which is called with their number."""

    def __init__(self, run: Callable[[int], None], watch: Watch | None = None) -> None:
        self._frames: queue.Queue[int | None] = queue.Queue()
        self.ran: queue.Queue[tuple[int, int]] = queue.Queue()  # numbers, with the threads
        self._run = run
        self.readers = Readers("test", watch or Watch(), self._read, self._run_one)
        self.readers.start()

    def arrive(self, *numbers: int | None) -> None:
        for number in numbers:
            self._frames.put(number)

    def _read(self) -> Frame | None:
        number = self._frames.get()
        if number is None:
            self._frames.put(None)  # other threads find the end too
            return None
        return Frame(Kind.REQUEST, number, b"", ())

    def _run_one(self, frame: Frame) -> None:
        self._run(frame.call)
        self.ran.put((frame.call, threading.get_ident()))

    def next(self) -> tuple[int, int]:
        return self.ran.get(timeout=DEADLINE)


def test_short_calls_are_run_by_the_thread_that_reads() -> None:
    connection = Connection(lambda number: None)
    connection.arrive(*range(50), None)
    ran = [connection.next() for _ in range(50)]
    assert [number for number, _ in ran] == list(range(50))
    assert len({thread for _, thread in ran}) == 1


def test_another_thread_reads_on_while_a_call_runs_for_long() -> None:
    release = threading.Event()
    connection = Connection(lambda number: None if number else release.wait(DEADLINE) and None)
    connection.arrive(0, 1, 2)
    assert [connection.next()[0], connection.next()[0]] == [1, 2]
    release.set()
    assert connection.next()[0] == 0
    connection.arrive(3, None)
    assert connection.next()[0] == 3


def test_after_a_long_call_none_waits_for_the_one_before() -> None:
    begun, release = threading.Barrier(EAGER_CALLS // 4 + 1), threading.Event()

    def run(number: int) -> None:
        if number:
            begun.wait(DEADLINE)
        release.wait(DEADLINE)

    connection = Connection(run)
    connection.arrive(*range(EAGER_CALLS // 4 + 1))
    begun.wait(DEADLINE)  # all at a time
    release.set()
    connection.arrive(None)


def test_a_call_that_will_wait_steps_aside() -> None:
    answered = threading.Event()

    def run(number: int) -> None:
        if number:
            answered.set()
        else:
            connection.readers.step_aside()
            answered.wait(DEADLINE)

    class Blind(Watch):
        def add(self, readers: Readers) -> None: ...

    connection = Connection(run, Blind())
    connection.arrive(0, 1, None)
    assert {connection.next()[0], connection.next()[0]} == {0, 1}


def test_nobody_looks_at_a_connection_that_is_idle() -> None:
    connection = Connection(lambda number: None)
    assert [connection.readers.look() for _ in range(IDLE_LOOKS)] == [True] * (IDLE_LOOKS - 1) + [False]
    connection.arrive(1, None)
    assert connection.next()[0] == 1
