"""JOB_TOKEN, as it is given."""

from __future__ import annotations

from pathlib import Path

LEAST_BYTES = 16  # 128 bits


def require_length(token: str) -> None:
    """Raises ValueError for a token that could be guessed."""
    if len(token.encode()) < LEAST_BYTES:
        raise ValueError(f"has fewer than {8 * LEAST_BYTES} bits; `rolecall token` makes one")


def read_token(file: Path) -> str:
    """The token in `file`. Raises ValueError where there is none."""
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"cannot be read ({error.strerror}); `rolecall token` makes a token, `make k8s-token JOB=NAME` the Secret "
            "of a job's pods; or type TLS=off for a network that only ranks are in"
        ) from None
    except UnicodeDecodeError:
        raise ValueError("holds no text") from None
    if not token:
        raise ValueError("is empty")
    return token
