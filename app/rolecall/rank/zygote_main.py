"""The first import of the zygote; no other process imports it."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

from rolecall import machine
from rolecall.rank import fork_server

os.setsid()  # a terminal sends Ctrl-C to all processes of its session
signal.signal(signal.SIGINT, signal.SIG_IGN)
# a job manager sends it to all processes, and `rolecall run` ends this one
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
machine.name_part("zygote")
gc.disable()  # imports leave little to collect, and collections take a tenth of their time
SYS_PATH = [*sys.path]  # `multiprocessing` replaces it in forked processes
_zygote = os.getpid()


@atexit.register
def end() -> None:
    """Exits, and deletes the socket's folder, which `rolecall run` leaves behind if it is killed."""
    if os.getpid() == _zygote:
        folder = Path(fork_server.address()).parent
        if folder.name.startswith("pymp-"):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # at its exit, an interpreter tears torch down, slowly
