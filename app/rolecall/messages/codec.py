"""The codec of the engine's messages: MessagePack, or a line of JSON where text surrounds it. Decoding runs no code of
a message, and checks its size and types."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import msgspec

MAX_BYTES = 2**24  # of a message, unless its reader says another bound; a worker's `Result` has about 50,000 bytes
MAX_PROBLEM_CHARS = 200
# msgspec shows other threads a type that it has half read, and decoding by that ends the process with SIGSEGV
_reading_type = threading.Lock()


class MessageError(ValueError):
    """What was received is no message, or what is to be sent cannot be one."""


@functools.cache
def _binary(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _reading_type:
        return msgspec.msgpack.Decoder(kind)


@functools.cache
def _text(kind: Any) -> msgspec.json.Decoder[Any]:
    with _reading_type:
        return msgspec.json.Decoder(kind)


def encode(message: Any) -> bytes:
    """`message` as MessagePack. Raises MessageError for a value that no message can hold."""
    return _encode(msgspec.msgpack.encode, message)


def decode(kind: Any, data: bytes, limit: int = MAX_BYTES) -> Any:
    """The message of type `kind`, or one of a union, that `encode` has made. Raises MessageError for anything else, and
    for more than `limit` bytes."""
    return _decode(_binary(kind), data, limit)


def encode_line(message: Any) -> bytes:
    """`message` as a line of JSON, in which NaN and infinity are null. Raises MessageError as `encode` does."""
    return _encode(msgspec.json.encode, message) + b"\n"


def decode_line(kind: Any, line: bytes, limit: int = MAX_BYTES) -> Any:
    """The message of `encode_line`. Raises MessageError as `decode` does."""
    return _decode(_text(kind), line, limit)


def convert(kind: Any, values: Any) -> Any:
    """The message of type `kind` whose fields are in `values`, of JSON's types. Raises MessageError."""
    return decode(kind, encode(values))


def _encode(write: Callable[[Any], bytes], message: Any) -> bytes:
    try:
        try:
            return write(message)
        except UnicodeEncodeError:  # a name of a file that is no text, in a traceback
            return write(_as_text(msgspec.to_builtins(message, builtin_types=(bytes,))))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"no message can hold it: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any], data: bytes, limit: int) -> Any:
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes, more than {limit}")
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        problem = str(error)[:MAX_PROBLEM_CHARS].encode("unicode_escape").decode()  # it may repeat what was sent
        raise MessageError(f"no message that this version knows: {problem}") from None


def _as_text(value: Any) -> Any:
    """`value` with a question mark for each half of a surrogate pair, which is no text."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_as_text(name): _as_text(each) for name, each in value.items()}
        case list() | tuple():
            return [_as_text(each) for each in value]
    return value
