"""Calls of a Ray actor in another process of this machine, unencrypted. Arrays are numpy's, which pass through shared
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

from bench.peers import calls


@ray.remote
class Echo:
    """Answers."""

    def echo(self, payload: Any) -> Any:
        return payload


def main() -> None:
    chosen = calls.options(__doc__)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    callee = Echo.remote()

    def send(payload: Any) -> Callable[[], Any]:
        reference = callee.echo.remote(payload)
        return lambda: ray.get(reference)

    calls.measure(chosen, send)


if __name__ == "__main__":
    main()
