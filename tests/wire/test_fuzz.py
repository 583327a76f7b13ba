"""Whatever arrives is a frame or an error that the reader knows; see fuzz.py, which runs a million inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.wire.connecting import LENGTH
from rolecall.wire.frames import HEAD, SIZE, Kind
from tests.wire.fuzz import read_frames, read_hello

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 300)
SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5)
HEADS = st.builds(
    lambda kind, flags, sizes, length, call, rest: (
        HEAD.pack(kind, flags, len(sizes), length, call) + b"".join(map(SIZE.pack, sizes)) + rest
    ),
    st.sampled_from(Kind) | st.integers(0, 255),
    st.sampled_from([0, 0, 1, 2]),
    st.lists(NUMBERS, max_size=5),
    NUMBERS,
    NUMBERS,
    st.binary(max_size=600),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=1000, deadline=None, database=None)
@given(st.lists(HEADS | st.binary(max_size=100), max_size=4), SIZES, st.sampled_from([2**62, 2**20, 100]))
def test_frames(parts: list[bytes], sizes: list[int], limit: int) -> None:
    read_frames(b"".join(parts), sizes, limit)
    read_frames(b"".join(parts), sizes, limit, in_memory=True)


@settings(max_examples=1000, deadline=None, database=None)
@given(st.binary(max_size=5000) | JSON.map(lambda value: repr(value).replace("'", '"').encode()), SIZES)
def test_hellos(body: bytes, sizes: list[int]) -> None:
    read_hello(body, sizes)
    read_hello(LENGTH.pack(len(body) & 65535) + body, sizes)


def test_what_has_been_found_before() -> None:
    nested = b"[" * 4000
    for body in (nested, b'{"address": 1e999}', b"{}", b"[]", b"null", b'{"caller": 1}', b"\xff", b"", b"1" * 4096):
        assert not read_hello(LENGTH.pack(len(body)) + body, [1000])


def test_some_thousand_inputs() -> None:
    command = [sys.executable, "-m", "tests.wire.fuzz", "--inputs", "5000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
