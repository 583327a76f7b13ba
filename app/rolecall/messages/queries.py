"""Queries of rank 0 to the supervisors of all ranks, and their replies, which are JSON. `Query`, in the answer to a
heartbeat, carries them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from rolecall.messages.codec import convert

MAX_QUERY_SECONDS = 600.0
MAX_RECORDING_SECONDS = 3600.0


class ReadStats(Struct, frozen=True, tag="stats", tag_field="what"):
    """Asks for the rank's statistics (`rates.Stats`)."""


class ReadStacks(Struct, frozen=True, tag="stacks", tag_field="what"):
    """Asks for the threads of the rank's worker (`stack_query.describe`)."""


class StartTrace(Struct, frozen=True, tag="trace", tag_field="what"):
    """Starts a recording of the rank's worker, and of the workers of generations within `seconds`. The reply is the
    sizes of the rank's files before, by name."""

    seconds: Annotated[float, Meta(gt=0, le=MAX_RECORDING_SECONDS)] = 10.0


class ReadTrace(Struct, frozen=True, tag="spans", tag_field="what"):
    """Asks for the next `Chunk` of the rank's files (observe/trace/copies.py), of which the asker has the first `have`
    bytes. With `collect`, rank 0 has them on disk: the worker starts to record, and the rank may end if there is no
    more."""

    have: dict[str, int] = field(default_factory=dict)
    collect: bool = False


class Leave(Struct, frozen=True, tag="leave", tag_field="what"):
    """Makes the rank leave, as SIGTERM does."""


class ReportCrash(Struct, frozen=True, tag="crashed", tag_field="what"):
    """Tells rank 0 that the process of the rank `role` `ordinal` has exited."""

    role: str
    ordinal: int


class DescribeStacks(Struct, frozen=True, tag="stacks in words", tag_field="what"):
    """Asks rank 0 for the stacks of all ranks, or of those in `only`, as {"text": ...}."""

    only: list[str] | None = None


Question = ReadStats | ReadStacks | StartTrace | ReadTrace | Leave | ReportCrash | DescribeStacks


def read(what: str, arguments: dict[str, Any]) -> Question:
    """The question that a query or a client's request holds. Raises MessageError if there is none."""
    question: Question = convert(Question, {**arguments, "what": what})
    return question


class Reply(Struct, frozen=True):
    """The reply to the query of this number, as the question says; {"error": ...} if there is none."""

    number: str
    result: Any


class Ask(Struct, frozen=True):
    """A client's request to query the ranks named in `to`, or all, that reply within `timeout` seconds."""

    what: str
    arguments: dict[str, Any] | None = None
    to: list[str] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_QUERY_SECONDS)] = 5.0
