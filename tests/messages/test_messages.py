"""Every message of the engine: it arrives as it was sent, and what is none is refused by one error in one line."""

from __future__ import annotations

import math
import pickle
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rolecall.declare.task import Attachment, Peer
from rolecall.gang.protocol import Answer, Beat, Directive, Heartbeat, Join, LostPeer, Query, WorkerStatus
from rolecall.messages import control, hosts, queries, sinks, tunnel, worker
from rolecall.messages.codec import MessageError, convert, decode, decode_line, encode, encode_line
from rolecall.messages.worker import FromWorker, ToWorker
from rolecall.record.files import FileWork
from rolecall.record.history import Event, Goal, Point, Stall, Start
from tests import commands

ME, OTHER = Peer("agent", 0, 0), Peer("observer", 2, 1, 3)
PART = Attachment(3, ME, (ME, OTHER), ("observer_7",))
ROWS = (Start(1, 0), Point("score", 3, 1.5, 2.0), Goal(3.0), Stall("lost", 0.5), Event("joined", 1, count=2))
LOST = (LostPeer(Join("observer", 2, 3)), LostPeer(Join("observer", 5), replace=True))
ENDED = WorkerStatus(2, "ended", "finished", step=9, summary={"score": math.inf, "steps": 9}, lost_peers=LOST)
HEARTBEAT = Heartbeat("agent", 0, "x", 4, node="node", epoch=3, worker=ENDED, leaving=True, job="rl")
ORDER = Directive("run", 1, 7, 2, drain=True, reason="why", role="agent", joined=(Join("b", 1, 1),))
RANKS = (control.ListedRank("agent", 0, 7, "up"), control.ListedRank("observer", 1, 0, "down", "host"))
WANTED = tunnel.Destination("agent_0", "host", 29400, "wire")
PACKETS: dict[Any, list[Any]] = {  # the types that a reader decodes, and messages
    Beat: [
        Beat("x", 4, since=3, known="lead:7", listed="lead:2"),
        Beat("x", 4, heartbeat=Heartbeat("", None, "x", 4, settings={"lease": 6.0})),
        Beat("x", 4, heartbeat=HEARTBEAT),
    ],
    Answer: [
        Answer(),
        Answer(again=True, queries=(Query("7", "trace", {"seconds": 2.0}),)),
        Answer("lead", ORDER, (("agent", ((0, 2), (5, 5))),), (("b", ((1, 1),)),)),
        Answer("lead", Directive("failed", 0, 7, code=3, role="agent")),
    ],
    FromWorker: [
        worker.Report(3, "saving", ROWS, (("ps_0", "pull", 2.0, 2),), FileWork("x", 1.0)),
        worker.Loaded(),
        worker.Connected(3, 1),
        worker.Detached(3, 1, "rank 0 is gone"),
        worker.PeerLost(OTHER, replace=True),
        worker.DrainRefused(),
        worker.Stuck("has been loading", "in main"),
        worker.Result("failed", "x" * 100_000 + "\n", 7, {"a": [1.5, math.inf], "b": None}),
    ],
    ToWorker: [
        worker.Drain(),
        worker.Attach(PART),
        worker.Update(PART),
        worker.Detach(),
        worker.RecordTrace("/tmp/trace", None),
        worker.End(),
    ],
    tunnel.Place: [tunnel.Place("agent_0")],
    tunnel.Figures: [tunnel.Figures(3, 2**40, {"closed": 2})],
    tunnel.Request: [
        tunnel.Announce(29400),
        tunnel.Reach(WANTED, 3, 5),
        tunnel.GetCertificate(),
        tunnel.GetTicket(WANTED),
        tunnel.Receive("wire"),
    ],
    tunnel.Certificate: [tunnel.Certificate("a", "b", False)],
    str | tunnel.Problem: ["0123456789abcdef", tunnel.Problem("it is gone")],
}
LINES: dict[Any, list[Any]] = {
    sinks.Open: [sinks.Open({"title": "rl"}, 70)],
    sinks.End: [sinks.End("stopped")],
    hosts.ToHost: [
        hosts.Files({"job.py": b"\0\xff"}),
        hosts.Start("agent 0", {"JOB_TOKEN": "a secret"}, alone=True),
        hosts.Drain("agent 0"),
        hosts.Kill("agent 0"),
        hosts.KillPart("agent 0", "worker"),
        hosts.Alive(),
    ],
    hosts.FromHost: [
        hosts.Ready("0.2.0", 1, 2, "3.11.4", "2.13.0"),
        hosts.Started("agent 0", 7),
        hosts.Output("agent 0", b"\xff\n"),
        hosts.PartKilled("agent 0", "worker", hosts.Killed(("worker 7",), ("worker",))),
        hosts.Ended("agent 0", -9),
    ],
    control.Request: [control.ListRanks(), control.ScaleRole("observer", 3), control.KillRank("observer", 1, "")],
    control.Reply: [control.Reply(RANKS), control.Reply(done="killed"), control.Reply(error="no such role")],
    queries.Reply: [queries.Reply("7", {"a": [1, None]}), queries.Reply("7", {"error": "why"})],
    queries.Ask: [queries.Ask("stacks"), queries.Ask("trace", {"seconds": 2.0}, ["agent_0"], 30.0)],
}
CODECS = [(kind, sent, encode, decode) for kind, sent in PACKETS.items()]
CODECS += [(kind, sent, encode_line, decode_line) for kind, sent in LINES.items()]
every_codec = pytest.mark.parametrize(("kind", "sent", "write", "read"), CODECS)


@every_codec
def test_a_message_arrives_as_it_was_sent(kind: Any, sent: list[Any], write: Any, read: Any) -> None:
    for message in sent:
        assert read(kind, write(message)) == message


def problem_of(read: Any, kind: Any, body: bytes) -> str:
    """Why `body` is refused; empty for one that happens to be a message."""
    try:
        read(kind, body)
    except MessageError as error:
        return str(error)
    return ""


@every_codec
@example(data=b"\xdd\xff\xff\xff\xff", place=0, piece=b"")  # an array of four billion
@example(data=b"\x91" * 100_000, place=0, piece=b"")
@example(data=b"[" * 100_000, place=0, piece=b"")
@example(data=b"\xa1\xff", place=0, piece=b"")
@given(data=st.binary(max_size=200), place=st.integers(0, 2**16), piece=st.binary(min_size=1, max_size=4))
def test_what_is_no_message_is_refused_in_a_line(
    kind: Any, sent: list[Any], write: Any, read: Any, data: bytes, place: int, piece: bytes
) -> None:
    whole = write(sent[place % len(sent)])
    place %= len(whole)
    for body in (data, whole[:place], whole[:place] + piece + whole[place + len(piece) :]):
        assert "\n" not in problem_of(read, kind, body)


@every_codec
def test_a_message_has_a_bound(kind: Any, sent: list[Any], write: Any, read: Any) -> None:
    body = write(sent[0])
    with pytest.raises(MessageError, match=f"{len(body)} bytes, more than 0"):
        read(kind, body, 0)


def test_what_no_message_can_hold_is_refused() -> None:
    deep: list[Any] = []
    deep.append(deep)
    for value in (object(), 2**70, deep, pickle):
        with pytest.raises(MessageError, match="no message can hold it"):
            encode(worker.Result("finished", summary={"value": value}))


def test_text_that_is_none_is_sent_with_question_marks() -> None:
    sent = worker.Result("failed", "no file \udcff", summary={"a\udcff": ["\udcff", b"\xff"]})
    assert decode(FromWorker, encode(sent)) == worker.Result("failed", "no file ?", summary={"a?": ["?", b"\xff"]})
    assert decode_line(queries.Reply, encode_line(queries.Reply("7", "\udcff"))).result == "?"


def test_a_question_has_a_kind() -> None:
    assert queries.read("trace", {"seconds": 2.0}) == queries.StartTrace(2.0)
    for what, arguments in (("tea", {}), ("trace", {"seconds": "long"}), ("trace", {"seconds": 0})):
        with pytest.raises(MessageError):
            queries.read(what, arguments)
    with pytest.raises(MessageError):
        convert(queries.Ask, {"what": "stacks", "timeout": 0})


def test_a_token_is_in_no_log() -> None:
    assert "a secret" not in repr(hosts.Start("agent 0", {"JOB_TOKEN": "a secret"}, alone=True))


THREADS = """
import sys, threading, msgspec
from rolecall.messages import codec
sys.setswitchinterval(1e-6)
for number in range(100):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int)])
    fields = [*((f"field_{n}", int | None, 3) for n in range(30)), ("inner", inner | None, None)]
    kind, gate = msgspec.defstruct(f"Outer{number}", fields), threading.Barrier(6)
    def read(kind=kind, gate=gate):
        gate.wait()
        assert codec.decode(kind, codec.encode({"field_1": 2, "inner": {"a": 1}})).inner.a == 1
    threads = [threading.Thread(target=read) for _ in range(6)]
    for each in threads: each.start()
    for each in threads: each.join()
"""


def test_threads_read_the_first_messages_of_a_type_at_once() -> None:
    assert commands.run([sys.executable, "-c", THREADS]).returncode == 0
