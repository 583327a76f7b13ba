"""A rank that is tied to the process that started it ends with it, even where its supervisor hangs."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from rolecall.errors import FAILED
from rolecall.rank import descendants

GRACE = 5.0  # seconds in which the supervisor ends by itself


def tie(parent: int) -> None:
    """From now on this process and all below it are gone soon after the process `parent`, whose child this is.

    A thread sees to it: a supervisor that writes to a full standard output sees and ends nothing.
    """
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        pidfd = os.pidfd_open(parent)
        if os.getppid() == parent:  # and no other process has its number
            select.select([pidfd], [], [])
    time.sleep(GRACE)
    descendants.adopt()  # it kills the fork server too, which would adopt them
    descendants.kill(os.getpid())
    os._exit(FAILED)
