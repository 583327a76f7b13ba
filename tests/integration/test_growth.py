"""What `make bench-ps` measures growth with: a real server, and processes that pose as trainers."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from bench import growth_ps, posers_ps


def test_posed_trainers_push_to_a_real_server() -> None:
    points = growth_ps.measure("sync", 1, trainers=(3,), seconds=0.2)
    assert [(point.servers, point.trainers) for point in points] == [(1, 3)]
    assert points[0].pushes_per_s > 0
    assert points[0].servers_cpu_s > 0
    assert points[0].trainers_cpu_s > 0


def test_a_poser_ends_once_the_others_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronous step waits for all trainers: those that began earlier stop earlier, and the last push stays."""
    poser = posers_ps._Poser(posers_ps.settings("sync", 1), ["trainer_0"])
    answers = posers_ps.LEAST + 1

    def push(posed: Any) -> None:
        if len(posed.answered) < answers:
            poser._ready.put(posed)

    monkeypatch.setattr(poser, "_push", push)
    monkeypatch.setattr(posers_ps, "POINT_SECONDS", 4.0)
    assert poser.run(0.1) > 0
    answers = posers_ps.LEAST
    with pytest.raises(TimeoutError, match="too few answers"):
        poser.run(0.1)


def test_threads_are_bound_while_others_end() -> None:
    every = sorted(os.sched_getaffinity(0))
    done = threading.Event()

    def short_lived() -> None:
        while not done.is_set():
            threading.Thread(target=int).start()

    starter = threading.Thread(target=short_lived)
    starter.start()
    try:
        for _ in range(100):
            growth_ps.bind(every[:1])
            assert starter.native_id is not None
            assert os.sched_getaffinity(starter.native_id) == os.sched_getaffinity(0) == {every[0]}
            growth_ps.bind(every)
    finally:
        done.set()
        starter.join()
        growth_ps.bind(every)
