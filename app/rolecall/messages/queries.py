"""Queries of rank 0 to the supervisors of all ranks, and their replies, which are JSON. `Query`, in the answer to a
heartbeat, carries them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from rolecall.messages.codec import convert

MAX_QUERY_SECONDS = 600.0


class ReadStats(Struct, frozen=True, tag="stats", tag_field="what"):
    """Asks for the rank's statistics (`rates.Stats`)."""


class ReadStacks(Struct, frozen=True, tag="stacks", tag_field="what"):
    """Asks for the threads of the rank's worker (`stack_query.describe`)."""


class StartTrace(Struct, frozen=True, tag="trace", tag_field="what"):
    """Starts a recording of the rank's worker, and of the workers of generations within `seconds`. The reply is the
    `Cursor` at which the recording begins."""

    seconds: float = 10.0


class ReadSpans(Struct, frozen=True, tag="spans", tag_field="what"):
    """Asks for the `Spans` at the cursor (`file`, `offset`). With `collect`, rank 0 has written everything before the
    cursor: the rank deletes earlier files, and its worker starts to record."""

    file: str
    offset: int
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


Question = ReadStats | ReadStacks | StartTrace | ReadSpans | Leave | ReportCrash | DescribeStacks


def read(what: str, arguments: dict[str, Any]) -> Question:
    """The question that a query or a client's request holds. Raises MessageError if there is none."""
    question: Question = convert(Question, {**arguments, "what": what})
    return question


class Cursor(Struct, frozen=True):
    """A place in a rank's records. `Cursor()` is the beginning of the oldest file."""

    file: str = ""
    offset: int = 0


class Spans(Struct, frozen=True):
    """The records at a cursor.

    `file` and `offset` are the cursor of `data`, in a later file if the given one has ended. `data` has whole lines,
    `tracing.MAX_DATA_BYTES` at most; `next` is the offset behind it, and `more` says whether there is more already.
    `process` is the first line of the file, {} if there is none; `ended` says whether the rank has no worker that adds
    to it.
    """

    file: str
    offset: int
    data: str
    next: int
    more: bool
    process: dict[str, Any]
    ended: bool


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
