"""Declarations of settings: type, bounds, whether ranks must agree, and whether a checkpoint may set the value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

T = TypeVar("T")
MAX_SHOWN_CHARACTERS = 200  # of a value in a message


@dataclass(frozen=True)
class MustAgree:
    """Marks a setting: whether every rank must have rank 0's value."""

    needed: bool


Agreed = Annotated[T, MustAgree(True)]  # of the settings that all jobs share; a job's settings agree by default
PerRank = Annotated[T, MustAgree(False)]  # a job's setting that may differ from rank to rank, such as a path


def agrees(field: FieldInfo, default: bool) -> bool:
    """Whether every rank must have rank 0's value of the setting; `default` if its declaration does not say."""
    return next((mark.needed for mark in field.metadata if isinstance(mark, MustAgree)), default)


@dataclass(frozen=True)
class FromUser:
    """Marks a setting whose value names code to import, or a file. It is never taken from a checkpoint, except for the
    default and for values that match the pattern `unless` as a whole. A setting of type Path is always marked.
    """

    unless: str = ""


def is_from_user(field: FieldInfo) -> bool:
    """Whether the setting is marked as `FromUser`."""
    return any(isinstance(mark, FromUser) for mark in field.metadata) or "Path" in str(field.annotation)


def is_harmless(field: FieldInfo, value: Any) -> bool:
    """Whether `value` (a JSON value), which a file has for the setting, may be used; see `FromUser`."""
    default = str(field.default) if isinstance(field.default, Path) else field.default
    if not is_from_user(field) or value == default:
        return True
    pattern = next((mark.unless for mark in field.metadata if isinstance(mark, FromUser)), "")
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def shown(value: Any, most: int = MAX_SHOWN_CHARACTERS) -> str:
    """A value in a message: in one line, without control characters, of at most `most` characters."""
    text = str(value)
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def is_secret(field: FieldInfo) -> bool:
    """Whether a field holds a secret of pydantic's, in whatever container."""
    return "Secret" in str(field.annotation)


def type_of(field: FieldInfo) -> str:
    """A field's type for the user, such as `int` or `exit|linger`."""
    annotation = str(field.annotation if not isinstance(field.annotation, type) else field.annotation.__name__)
    literal = re.search(r"Literal\[([^]]*)\]", annotation)
    if literal:
        return "|".join(part.strip(" '") for part in literal.group(1).split(","))
    return annotation.replace(" | None", "").replace("SecretStr", "secret").replace("Path", "path").rsplit(".", 1)[-1]


def bounds_of(field: FieldInfo) -> str:
    """A field's bounds, such as `1 to 65535`; empty if it has none."""
    lows: list[tuple[float, str]] = []
    highs: list[tuple[float, str]] = []
    for rule in field.metadata:
        match rule:
            case Ge(ge=int() | float() as value):
                lows.append((value, f"{value}"))
            case Gt(gt=int() | float() as value):
                lows.append((value, f"above {value}"))
            case Le(le=int() | float() as value):
                highs.append((value, f"{value}"))
            case Lt(lt=int() | float() as value):
                highs.append((value, f"below {value}"))
            case MinLen():
                return "not empty"
    low, high = max(lows, default=(0, ""))[1], min(highs, default=(0, ""))[1]  # the narrowest of each
    if low and high:
        return f"{low} to {high}"
    if low:
        return low if low.startswith("above") else f"at least {low}"
    return f"at most {high}" if high else ""


def problems(cls: type[BaseModel], error: ValidationError, called: Callable[[str], str] = str.upper) -> Iterator[str]:
    """The problems of settings of `cls`, each with its variable, value (unless secret) and bounds. `called` maps a
    field's name to the name that the user knows.
    """
    for details in error.errors(include_url=False):
        message = details["msg"].removeprefix("Value error, ")
        if not details["loc"]:
            yield message
            continue
        name = str(details["loc"][0])
        field = cls.model_fields.get(name)
        given = "***" if field is not None and is_secret(field) else repr(str(details["input"])[:MAX_SHOWN_CHARACTERS])
        expected = f" ({type_of(field)}{', ' + bounds_of(field) if bounds_of(field) else ''})" if field else ""
        yield f"{called(name)}={given}: {message[0].lower() + message[1:]}{expected}"


def variables(cls: type[BaseModel]) -> list[tuple[str, str, str, str, str]]:
    """Every variable of `cls` as (name, type, default, bounds, meaning)."""
    rows = []
    for name, field in cls.model_fields.items():
        default = "" if field.default is None else str(field.default)
        rows.append((name.upper(), type_of(field), default, bounds_of(field), field.description or ""))
    return rows
