"""Calls of a Monarch actor in another process of this machine, unencrypted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host

from bench.peers import calls


class Echo(Actor):
    """Answers."""

    @endpoint
    def echo(self, payload: Any) -> Any:
        return payload


def main() -> None:
    chosen = calls.options(__doc__)
    callee = this_host().spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)

    def send(payload: Any) -> Callable[[], Any]:
        return callee.echo.call_one(payload).get

    calls.measure(chosen, send, torch.from_numpy)


if __name__ == "__main__":
    main()
