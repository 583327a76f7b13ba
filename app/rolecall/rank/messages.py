"""Heartbeats and answers as JSON, without fields that have their default."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from rolecall.gang.protocol import Answer, Beat

_BEATS, _ANSWERS = TypeAdapter(Beat), TypeAdapter(Answer)


def read_beat(body: bytes) -> Beat:
    """The beat of `write_beat`. Raises ValueError if `body` holds none."""
    return _BEATS.validate_json(body)


def write_beat(beat: Beat) -> bytes:
    """`beat` as JSON; with NaN and infinity, which a worker's summary may hold."""
    return json.dumps(_changes(beat), separators=(",", ":")).encode()


def read_answer(body: bytes) -> Answer:
    """The answer of `write_answer`. Raises ValueError if `body` holds none."""
    return _ANSWERS.validate_json(body)


def write_answer(answer: Answer) -> bytes:
    """`answer` as JSON."""
    return _ANSWERS.dump_json(answer, exclude_defaults=True)


def _changes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, also of the dataclasses in it."""
    changes = {}
    for field in fields(value):
        current = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if current != default or type(current) is not type(default):
            changes[field.name] = _changes(current) if is_dataclass(current) else current
    return changes
