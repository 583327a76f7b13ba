"""Whether a link is what it promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.link import probe
from bench.link.links import Link
from bench.link.network import linked

PORT = 9000
SECONDS = 4.0
DATAGRAMS = 1000
LOSSES = 20  # datagrams to lose on average, where the link loses any
DEADLINE = 120.0
# what TCP leaves of a rate, and what its probing for more takes
LEAST_RATE, MOST_RATE = 0.85, 1.02
LEAST_TRIP, MOST_TRIP = 0.98, 1.25
MOST_TRIP_MORE = 0.0005  # seconds: two processes are woken on the way
MOST_LOSS = 0.003  # where none is promised: this machine was busy


@dataclass(frozen=True)
class Checked:
    """What was measured between two ranks of `link`: TCP data in bits/s, seconds, the share of datagrams lost."""

    link: Link
    bits_per_s: float
    round_trip_s: float
    loss: float
    datagrams: int

    @property
    def rate_holds(self) -> bool:
        # one connection does not fill a link that loses its packets
        least = 0.0 if self.link.loss else LEAST_RATE
        return least <= self.bits_per_s / self.link.bits_per_s <= MOST_RATE

    @property
    def round_trip_holds(self) -> bool:
        promised = self.link.round_trip
        # in the kernel nothing delays it
        least = 0.0 if self.link.in_kernel else LEAST_TRIP * promised
        return least <= self.round_trip_s <= MOST_TRIP * promised + MOST_TRIP_MORE

    @property
    def loss_holds(self) -> bool:
        expected = self.link.loss * self.datagrams
        spread = 4 * math.sqrt(expected)  # four standard deviations of a Poisson number
        low, high = expected - spread, expected + spread
        return low <= self.loss * self.datagrams <= high + MOST_LOSS * self.datagrams

    @property
    def holds(self) -> bool:
        return self.rate_holds and self.round_trip_holds and self.loss_holds

    def to_json(self) -> dict[str, Any]:
        """Promised and measured."""
        measured = {key: value for key, value in asdict(self).items() if key != "link"}
        link = asdict(self.link)
        return {"promised": {key: link[key] for key in ("bits_per_s", "round_trip", "loss")},
                "measured": measured, "emulated_by": "kernel" if self.link.in_kernel else "router",
                "holds": self.holds}  # fmt: skip


def check(link: Link, seconds: float = SECONDS, datagrams: int = DATAGRAMS) -> Checked:
    """Measures the rate of `link` for `seconds`, and its loss with at least `datagrams`.

    Raises NetworkError where there can be no namespaces, RuntimeError where the measurement fails or takes too long.
    """
    if link.loss:
        datagrams = max(datagrams, int(LOSSES / link.loss))
    program = [sys.executable, probe.__file__]
    with linked(link, ("one", "other")) as links:
        there = [links.address("other"), str(PORT)]
        with subprocess.Popen([*links.prefix("other"), *program, "serve", *there], stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()  # it is ready, or has ended
                asked = ["measure", *there, str(link.bits_per_s), str(seconds), str(datagrams)]
                done = subprocess.run([*links.prefix("one"), *program, *asked], capture_output=True, text=True,
                                      timeout=DEADLINE, check=True)  # fmt: skip
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"{link.what}: {error.stderr.strip()[-300:]}") from error
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"{link.what}: not measured within {DEADLINE:g} s") from error
            finally:
                server.kill()
    return Checked(link, **json.loads(done.stdout), datagrams=datagrams)


def table(checks: Sequence[Checked]) -> Table:
    """Promised and measured, for people."""
    shown = Table("link", "rate", "measured (TCP data)", "round trip", "measured", "loss", "measured", "",
                  title="Links between ranks")  # fmt: skip
    for one in checks:
        link = one.link
        shown.add_row(
            link.name, f"{link.bits_per_s / 1e6:,.0f} Mbit/s", f"{one.bits_per_s / 1e6:,.1f} Mbit/s",
            f"{1000 * link.round_trip:g} ms", f"{1000 * one.round_trip_s:.2f} ms", f"{link.loss:.2%}",
            f"{one.loss:.2%}", "[green]pass[/]" if one.holds else "[red]MISS[/]",
        )  # fmt: skip
    return shown


def write(target: Path, checks: Sequence[Checked]) -> None:
    target.write_text(json.dumps({one.link.name: one.to_json() for one in checks}, indent=1) + "\n")
