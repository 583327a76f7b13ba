"""What the fork server imports first, and no other process: it adopts the processes that workers started, so that the
supervisor finds them after a worker's end, and kills them at its own end. It reads the job's source for all workers.
"""

from __future__ import annotations

import atexit
import os
import warnings

from rolecall.job import sources
from rolecall.rank import descendants

_fork_server = os.getpid()


@atexit.register
def end() -> None:
    """Kills all processes below the fork server, a worker that is stopped included."""
    if os.getpid() == _fork_server:  # a worker has inherited this
        descendants.kill(_fork_server)


sources.taken()
descendants.adopt()
# it reaps them, and knows its workers only
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
