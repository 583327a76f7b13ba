"""Reads another process's memory (process_vm_readv), so that large buffers need not pass through a socket of one
machine.

The kernel allows it between processes of one user unless Yama, a container's system call filter or a security module
forbids it: both ends try it when they connect.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import NamedTuple

import numpy as np

MIN_BYTES = 256 * 1024  # smaller messages are faster through the socket
PROBE = np.frombuffer(os.urandom(8), np.uint8)  # what a peer reads to find out whether it may
MAX_READ_BYTES = 2**30  # of one system call


class _Vector(ctypes.Structure):
    """struct iovec of sys/uio.h."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
_recv = ctypes.PyDLL(None, use_errno=True).recv
_recv.argtypes, _recv.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_ssize_t


class Region(NamedTuple):
    """A piece of a process's memory."""

    address: int
    nbytes: int


def address_of(buffer: memoryview) -> int:
    """Where a contiguous buffer begins."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def read(pid: int, region: Region) -> np.ndarray:
    """A copy of the region of process `pid`. Raises OSError if that is not allowed or the process has ended."""
    if _readv is None:
        raise OSError("process_vm_readv is missing")
    try:
        target = np.empty(region.nbytes, np.uint8)
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    done = 0
    while done < region.nbytes:
        count = min(region.nbytes - done, MAX_READ_BYTES)
        local, there = _Vector(target.ctypes.data + done, count), _Vector(region.address + done, count)
        vectors = (ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1))
        copied = _readv(pid, *vectors, ctypes.c_ulong(0))
        if copied <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += copied
    return target


def receive(file: int, room: Region) -> int:
    """Receives what has arrived at a socket. This thread keeps the interpreter, unlike in `recv_into`: beside one that
    computes it would wait for it once more. Raises OSError, which is a BlockingIOError if nothing has arrived."""
    count = int(_recv(file, room.address, room.nbytes, socket.MSG_DONTWAIT))
    if count < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return count


def may_read(pid: int, probe: Region, expected: bytes) -> bool:
    """Whether this process may read that of `pid`, whose `probe` holds `expected`."""
    try:
        return pid > 0 and probe.nbytes == len(expected) and read(pid, probe).tobytes() == expected
    except OSError:
        return False
