"""What holds the token leaves no core dump."""

from __future__ import annotations

import subprocess
import sys

LIMITS = """
import resource
from rolecall import secret
secret.forbid_core_dumps()
secret.forbid_core_dumps()
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""
ENTRY = """
import contextlib, resource
from rolecall.__main__ import main
with contextlib.suppress(SystemExit):
    main(["run", "no-such-file.py"])
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_no_core_dump_is_left() -> None:
    for program in (LIMITS, ENTRY):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        assert all(0 <= int(limit) <= 1 for limit in ended.stdout.split()[-2:]), program
