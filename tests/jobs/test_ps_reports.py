"""The reports of a server of ps to the lead."""

from __future__ import annotations

import queue
import threading
from functools import partial
from unittest.mock import MagicMock

from structlog.testing import capture_logs

from rolecall import Context, Peer
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.reports import Reports
from rolecall.jobs.ps.server import Server
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Request

MEMBERS = (Peer("ps", 0, 0), Peer("ps", 1, 1), Peer("trainer", 0, 2), Peer("trainer", 1, 3))
KEYS = [Key("trainer_0", number) for number in range(6)]


class Transport:
    """Keeps the calls, which the test answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, list[Key]]] = []
        self.answers: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self.under_way = self.most = 0

    def call(self, to: str, request: Request, deadline: Deadline) -> Future[None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.calls.append((to, request.method, request.args[0]))
        answer: Future[None] = Future()
        self.answers.put(answer)
        return answer

    def answer(self) -> None:
        """Answers the oldest call, once there is one."""
        answer = self.answers.get(timeout=30)
        self.under_way -= 1
        answer.set_result(None)

    @property
    def keys(self) -> list[list[Key]]:
        return [keys for _, _, keys in self.calls]


def make() -> tuple[Reports, Transport]:
    context = Context(PsSettings(job="ps", servers=2), Attachment(1, MEMBERS[1], MEMBERS), MagicMock())
    transport = Transport()
    context.group.use(transport)
    return Reports(context.logger, partial(context.call, context.rank0, Server.complete)), transport


def test_an_idle_lead_hears_of_each_gradient_at_once() -> None:
    reports, transport = make()
    for key in KEYS[:3]:
        reports.add(key)
        transport.answer()
    assert transport.calls == [("ps_0", "complete", [key]) for key in KEYS[:3]]


def test_what_comes_while_a_report_is_under_way_goes_with_the_next_one() -> None:
    reports, transport = make()
    for key in KEYS[:4]:
        reports.add(key)
    assert transport.keys == [KEYS[:1]]
    transport.answer()
    reports.add(KEYS[4])
    assert transport.keys == [KEYS[:1], KEYS[1:4]]
    transport.answer()
    transport.answer()
    assert transport.keys == [KEYS[:1], KEYS[1:4], KEYS[4:5]]
    reports.add(KEYS[5])
    assert transport.keys[3:] == [KEYS[5:]], "nothing was under way"


def test_a_failed_report_is_logged_and_the_next_one_follows() -> None:
    reports, transport = make()
    with capture_logs() as logs:
        reports.add(KEYS[0])
        reports.add(KEYS[1])
        transport.answers.get_nowait().set_exception(RuntimeError("no answer\nwithin 30 s"))
        transport.answers.get_nowait().set_exception(RuntimeError())
        reports.add(KEYS[2])
    assert [line["problem"] for line in logs] == ["no answer", "RuntimeError"]
    assert transport.keys == [KEYS[:1], KEYS[1:2], KEYS[2:3]], "not repeated: the lead may have received it"


def test_threads_report_each_gradient_once_and_in_their_order() -> None:
    reports, transport = make()
    threads, each = 8, 400
    adding = [
        threading.Thread(target=lambda name=name: [reports.add(Key(name, number)) for number in range(each)])
        for name in map(str, range(threads))
    ]
    for thread in adding:
        thread.start()
    while sum(map(len, transport.keys)) < threads * each or not transport.answers.empty():
        transport.answer()  # this thread is the wire's
    for thread in adding:
        thread.join(30)
    assert transport.most == 1, "one report at a time"
    sent = [key for keys in transport.keys for key in keys]
    for name in map(str, range(threads)):
        assert [key.number for key in sent if key.trainer == name] == list(range(each))
    assert len(sent) == threads * each
