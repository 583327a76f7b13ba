"""`rolecall run JOB --detach`: starts the run as a process of its own, and returns once the run takes commands."""

from __future__ import annotations

import contextlib
import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rolecall import config
from rolecall.declare import flags, registry
from rolecall.errors import USAGE, RankError, UsageError
from rolecall.launch.process_run import directory_of, dispose
from rolecall.observe import targets
from rolecall.record import rundir

POLL_SECONDS = 0.05
START_SECONDS = 600.0  # for the job to be imported, and for rank 0 to start
ANSWER_SECONDS = 2.0  # for rank 0 to answer
COMMANDS = "watch|logs|ps|scale|kill|stacks|stop|fetch"


def run(target: str, directory: str, words: Sequence[str]) -> int:
    """Starts `rolecall run TARGET` with `words`, in `directory`, or a new one if that is empty. Returns 0 once the run
    takes commands, or its exit code if it has ended before. Raises TakenError if another run is under way there,
    UsageError for a directory that cannot be written, and RankError if the start takes too long."""
    folder = Path(directory or config.exported("CHECKPOINT_DIR") or directory_of(registry.name_of(target)))
    if targets.run_in(folder):
        raise rundir.TakenError(folder)
    is_new = folder.parent == rundir.RUNS and not [*folder.glob("*")]
    with UsageError.wrap(f"CHECKPOINT_DIR={folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        output = (folder / rundir.OUTPUT).open("a+b")
    with output:
        begin = output.seek(0, 2)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rolecall", "run", target, f"--checkpoint-dir={folder}", *words],
            start_new_session=True,  # the end of the terminal is not its end
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        code = _await_up(process, folder)
        output.seek(begin)
        said = output.read().decode(errors="replace")
    if code is not None:
        sys.stderr.write(said)
    if code == USAGE:
        if is_new:
            dispose(folder)
        return code
    name = folder.name if rundir.find(folder.name) == folder else str(folder)
    print(name)
    if code is None:
        print(f"rolecall: {name} runs ({folder / rundir.OUTPUT}): rolecall {COMMANDS} {name}", file=sys.stderr)
    return code or 0


def _await_up(process: subprocess.Popen[bytes], folder: Path) -> int | None:
    """Waits until the run takes commands, or has ended: then its exit code."""
    end = time.monotonic() + START_SECONDS
    try:
        while not _is_up(process.pid, folder):
            if (code := process.poll()) is not None:
                return code
            if time.monotonic() > end:
                raise RankError(
                    f"{folder}: takes no commands after {START_SECONDS:g} s, and goes on as process {process.pid}; see "
                    f"{folder / rundir.OUTPUT}"
                )
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        raise
    return None


def _is_up(pid: int, folder: Path) -> bool:
    """Whether rank 0 has accepted the start, after which it shows the gang; or a cluster has the run."""
    run = targets.run_in(folder)
    if run is None or run.pid != pid:
        return False
    if run.about.engine in flags.SUBMITTED:
        return True
    place = urlsplit(run.ranks[0].url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_SECONDS)
    try:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it does not listen yet
            connection.request("GET", "/page/state")
            return connection.getresponse().status == http.HTTPStatus.OK
    finally:
        connection.close()
    return False
