"""What the fork server imports first, and no other process. It has the fork server

- adopt the processes that workers started, so that the supervisor finds them after a worker's end,
- kill all of them at its own end,
- read the job's source for all workers,
- have a title, and ignore Ctrl-C and SIGTERM, also while it imports.
"""

from __future__ import annotations

import atexit
import os
import signal
import warnings

from rolecall import machine
from rolecall.declare import sources
from rolecall.rank import descendants

_fork_server = os.getpid()
for _number in (signal.SIGINT, signal.SIGTERM):  # a terminal and a job manager signal all processes of a rank
    signal.signal(_number, signal.SIG_IGN)  # the supervisor ends this one
machine.name_part("fork-server")


@atexit.register
def end() -> None:
    """Kills all processes below the fork server, a worker that is stopped included."""
    if os.getpid() == _fork_server:  # a worker has inherited this
        descendants.kill(_fork_server)


sources.taken()
descendants.adopt()
# it reaps them, and knows its workers only
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
