"""Reads and writes of a file by blocks: many small reads at once, past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEPTH, DEPTH_BYTES = 256, 2**22  # reads that the disk has at once, and bytes of them
THREADS = 16  # that read if the kernel has no asynchronous reads
WAIT = 60.0  # seconds for DEPTH reads
# Linux's system calls io_setup, io_destroy, io_getevents and io_submit
CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# Linux's aio_abi.h: what is used of struct iocb, whose operation 0 is a read, and of struct io_event
REQUEST = np.dtype(
    {
        "names": ["file", "buffer", "size", "offset"],
        "formats": ["u4", "u8", "u8", "i8"],
        "offsets": [20, 24, 32, 40],
        "itemsize": 64,
    }
)
EVENT = np.dtype({"names": ["result"], "formats": ["i8"], "offsets": [16], "itemsize": 32})


def aligned(size: int) -> Tensor:
    """Memory [size] uint8 that a disk can fill directly: it begins at a page."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def depth_of(size: int) -> int:
    """How many pieces of `size` bytes are read at once."""
    return max(1, min(DEPTH, DEPTH_BYTES // size))


def hangs(seconds: float) -> TimeoutError:
    """The error of a disk that has not answered for `seconds`."""
    return TimeoutError(f"TABLE_DIR: no row was read for {seconds:g} s; is its disk hanging?")


class KernelReads:
    """Reads pieces of `size` bytes, at most `depth` at once, of a file that was opened with O_DIRECT, by Linux's
    asynchronous I/O: a system call begins all of them, and another waits. Threads would take five times the processor
    time, and the interpreter's lock twice for each read. One thread at a time may call.

    Raises OSError if the kernel has none.
    """

    def __init__(self, file: int, size: int) -> None:
        if platform.machine() not in CALLS:
            raise OSError(errno.ENOSYS, "no asynchronous I/O")
        self._setup, self._destroy, self._getevents, self._submit = CALLS[platform.machine()]
        self._call: Any = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self.depth = depth = depth_of(size)
        self._checked(self._setup, depth, ctypes.addressof(self._context))
        self._pieces = aligned(depth * size).view(depth, size)
        self._requests = np.zeros(depth, REQUEST)
        self._requests["file"], self._requests["size"] = file, size
        self._requests["buffer"] = self._pieces.data_ptr() + size * np.arange(depth)
        self._pointers = self._requests.ctypes.data + REQUEST.itemsize * np.arange(depth, dtype=np.uint64)
        self._events = np.zeros(depth, EVENT)
        self._problem: OSError | None = None  # after which memory may still be written to

    def _checked(self, number: int, *args: int) -> int:
        result = int(self._call(ctypes.c_long(number), *map(ctypes.c_long, args)))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def read(self, offsets: np.ndarray) -> Tensor:
        """The pieces [n, size] uint8 at `offsets` [n] int64, valid until the next call. Raises OSError; TimeoutError
        if the disk hangs.
        """
        if self._problem:
            raise self._problem
        count = len(offsets)
        self._requests["offset"][:count] = offsets
        begun = 0
        try:
            while begun < count:
                pointers = self._pointers[begun:].ctypes.data
                begun += self._checked(self._submit, self._context.value, count - begun, pointers)
            self._wait(count)
        except TimeoutError as error:
            self._problem = error
            raise
        except OSError as error:
            self._problem = unusable("read", error.errno)
            raise self._problem from error
        results = self._events["result"][:count]
        if (wrong := results[results != self._pieces.shape[1]]).size:  # fewer bytes than asked for, or an error
            raise unusable("read", -int(wrong[0]) if wrong[0] < 0 else errno.EIO)
        return self._pieces[:count]

    def _wait(self, count: int) -> None:
        deadline = time.monotonic() + WAIT
        done = 0
        while done < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise hangs(WAIT)
            limit = np.array([int(left), int(left % 1 * 1e9)], dtype=np.int64)
            try:
                arguments = (count - done, count - done, self._events[done:].ctypes.data, limit.ctypes.data)
                done += self._checked(self._getevents, self._context.value, *arguments)
            except InterruptedError:
                continue

    def close(self) -> None:
        """Gives back what it has of the kernel."""
        if not self._problem:
            self._checked(self._destroy, self._context.value)


class ThreadReads:
    """As `KernelReads`, by threads, of any file."""

    def __init__(self, file: int, size: int) -> None:
        self._file, self._size, self.depth = file, size, depth_of(size)
        self._pool = ThreadPoolExecutor(THREADS)

    def read(self, offsets: np.ndarray) -> Tensor:
        """The pieces at `offsets`, as of `KernelReads`."""
        places = offsets.tolist()
        # anew each time: after an error, threads may still write to it
        pieces = aligned(max(1, len(places)) * self._size).view(-1, self._size)[: len(places)]

        def read(first: int) -> None:
            for number in range(first, len(places), THREADS):
                read_fully(self._file, pieces[number], places[number])

        try:
            list(self._pool.map(read, range(min(THREADS, len(places))), timeout=WAIT))
        except FutureTimeoutError as error:
            self.close()
            self._pool = ThreadPoolExecutor(THREADS)  # the other's threads may hang for long
            raise hangs(WAIT) from error
        return pieces

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def read_fully(file: int, memory: Tensor, offset: int) -> None:
    """Fills `memory` [n] uint8 with what `file` has at `offset`. Raises OSError."""
    _fully(os.preadv, "read", file, memory, offset)


def write_fully(file: int, memory: Tensor, offset: int) -> None:
    """Writes `memory` [n] uint8 to `file` at `offset`. Raises OSError."""
    _fully(os.pwritev, "written", file, memory, offset)


def _fully(transfer: Callable[[int, Any, int], int], what: str, file: int, memory: Tensor, offset: int) -> None:
    array: Any = memory.numpy()
    view = memoryview(array)
    while len(view):
        try:
            count = transfer(file, [view], offset)
        except OSError as error:
            raise unusable(what, error.errno) from error
        if not count:  # the file is shorter than it was
            raise unusable(what, errno.EIO)
        view, offset = view[count:], offset + count


def unusable(what: str, number: int | None) -> OSError:
    """The error `number` of a file whose rows cannot be `what`: read or written."""
    number = number or errno.EIO
    return OSError(number, f"TABLE_DIR: rows cannot be {what} ({os.strerror(number)}); is its disk full or broken?")
