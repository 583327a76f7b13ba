"""Both sides of each remote call, and the parts of its time.

The time outside the handler is the client span's length minus the server span's: no clocks are compared. For a
method between two ranks, the fastest call with about as many bytes gives the time of the network, including wire format
and dispatch. The time of other calls beyond it is queueing, as is the wait for a turn.
"""

from __future__ import annotations

from typing import NamedTuple

from rolecall.record.records import Process, SpanRecord, Trace

Route = tuple[str, str, str, int]  # method, caller, called, and the bits of the number of bytes, both ways


class Served(NamedTuple):
    """The server side of a call: its rank, and when its function began and returned, and its answer left, in ns."""

    rank: str
    began: int
    ran: int
    left: int


class Parts(NamedTuple):
    """The parts of a call's time, in ns. `held` is the time from an asynchronous handler's return to its answer."""

    network: int = 0
    queueing: int = 0
    handler: int = 0
    held: int = 0


class Calls:
    """The calls of a trace, by the client spans' numbers. Reads every file once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._served: dict[str, Served] = {}
        self._matched = set[str]()  # client spans whose other side was recorded
        self._fastest: dict[Route, int] = {}
        clients = list[tuple[str, str, str, int, int]]()
        for recording in trace.recordings:
            for span in recording:
                if span.kind == "server" and span.parent:
                    self._served[span.parent] = Served(recording.process.name, span.began_ns, span.ran_ns, span.end_ns)
                elif span.kind == "client":
                    length = span.end_ns - span.start_ns
                    clients.append((span.id, span.name, recording.process.name, _bits(span), length))
        for id, method, caller, bits, length in clients:
            if served := self._served.get(id):
                self._matched.add(id)
                route, outside = (method, caller, served.rank, bits), _outside(length, served)
                self._fastest[route] = min(outside, self._fastest.get(route, outside))

    def parts(self, process: Process, span: SpanRecord) -> Parts | None:
        """The parts of the time of a client span of `process`; None if its other side was not recorded."""
        served = self._served.get(span.id)
        if served is None:
            return None
        outside = _outside(span.end_ns - span.start_ns, served)
        route = (span.name, process.name, served.rank, _bits(span))
        network = min(outside, self._fastest.get(route, outside))
        return Parts(network, outside - network, served.ran - served.began, served.left - served.ran)

    def matched(self, id: str) -> bool:
        """Whether both sides of the call with this client span were recorded."""
        return id in self._matched


def _bits(span: SpanRecord) -> int:
    sent, received = span.attributes.get("sent", 0), span.attributes.get("received", 0)
    return (sent + received).bit_length() if isinstance(sent, int) and isinstance(received, int) else 0


def _outside(length: int, served: Served) -> int:
    return max(0, length - (served.left - served.began))
