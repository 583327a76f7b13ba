"""Queries this rank's endpoint inside its container: the health check, or its metrics without a published port.

A separate program, not a command of `rolecall`: a health check runs often, and this imports little.
"""

from __future__ import annotations

import http.client
import sys

from rolecall import config
from rolecall.config import Settings
from rolecall.errors import USAGE, UsageError

TIMEOUT = 5.0  # seconds
# these mean every address, so the loopback interface's too
LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def main(arguments: list[str]) -> int:
    """Prints the rank's answer to a path (/healthz by default). Returns 0 for status 200, 1 for another
    status or no answer, and 2 for wrong settings."""
    path = arguments[0] if arguments else "/healthz"
    try:
        settings = config.load(Settings)
    except UsageError as error:
        print(f"rolecall: {error}", file=sys.stderr)
        return USAGE
    host = settings.metrics_bind_addr or settings.bind_addr
    connection = http.client.HTTPConnection(LOCAL.get(host, host), settings.metrics_port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        sys.stdout.write(answer.read().decode(errors="replace"))
        return 0 if answer.status == 200 else 1
    except (OSError, http.client.HTTPException) as error:
        problem = str(error).strip() or type(error).__name__
        print(f"METRICS_PORT={settings.metrics_port}: no answer ({problem})", file=sys.stderr)
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
