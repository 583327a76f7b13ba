"""Reads JOB_TOKEN and keeps it out of core dumps."""

from __future__ import annotations

import resource
from pathlib import Path

MIN_TOKEN_BYTES = 16  # 128 bits


def require_length(token: str) -> None:
    """Raises ValueError for a token that could be guessed."""
    if len(token.encode()) < MIN_TOKEN_BYTES:
        raise ValueError(f"has fewer than {8 * MIN_TOKEN_BYTES} bits; `rolecall token` makes one")


def forbid_core_dumps() -> None:
    """Disables core dumps, which could hold the token, for this process and its children."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    # 1 byte, not 0: only that keeps the kernel from handing the memory to a program, such as systemd-coredump
    least = 1 if most == resource.RLIM_INFINITY else min(1, most)
    resource.setrlimit(resource.RLIMIT_CORE, (least, least))


def read_token(file: Path) -> str:
    """The token in `file`. Raises ValueError if there is none."""
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"cannot be read ({error.strerror}); `rolecall token` makes a token, `make k8s-token JOB=NAME` the Secret "
            "of a job's pods; or set TLS=off in a network that only ranks use"
        ) from None
    except UnicodeDecodeError:
        raise ValueError("holds no text") from None
    if not token:
        raise ValueError("is empty")
    return token
