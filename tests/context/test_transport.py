"""What a transport adds to its wire."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rolecall.context.progress import StepLogged
from rolecall.context.transport import Transport
from rolecall.errors import CallTimeoutError
from rolecall.wire.future import Future


def test_an_event_that_could_not_be_forwarded_holds_up_no_later_one() -> None:
    answers = list[Future[None]]()

    def call(*_: Any) -> Future[None]:
        answers.append(Future())
        return answers[-1]

    wire: Any = SimpleNamespace(call=call, in_flight=None, has_lost=None, on_disconnect=None)
    watchdog: Any = None
    transport = Transport(wire, None, watchdog, rank0="lead_0", rpc_timeout=1.0)
    transport.forward(StepLogged(1))
    answers[0].end(None, CallTimeoutError("busy"))
    with pytest.raises(CallTimeoutError):
        transport.forward(StepLogged(2))
    transport.forward(StepLogged(3))
    assert len(answers) == 2
    answers[1].end(None, None)
    timer = threading.Timer(0.05, lambda: answers[2].end(None, CallTimeoutError("busy")))
    timer.start()
    with pytest.raises(CallTimeoutError):
        transport.forward(StepLogged(4, score=1.0))  # which waits for its answer
    timer.join()
    transport.forward(StepLogged(5))
