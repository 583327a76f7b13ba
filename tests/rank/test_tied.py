"""A tied rank whose supervisor hangs in a write is gone soon after its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys

RANK = """
import os, subprocess, sys, threading
from rolecall.rank import descendants
descendants.GRACE_SECONDS = 0.1
child = subprocess.Popen(["sleep", "60"])
descendants.exit_with(os.getppid())
sys.stderr.write(f"{os.getpid()} {child.pid}\\n")
while True:
    print("x" * 100_000, flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_supervisor_that_writes_to_a_full_pipe_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT, RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent.stdout, parent.stderr:
        pidfds = [os.pidfd_open(int(word)) for word in parent.stderr.readline().split()]
        parent.stdout.read(2**16 + 1)  # some of it, but never all
        parent.kill()
        parent.wait(30)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 30)[0], "a process stays behind"
            os.close(pidfd)
