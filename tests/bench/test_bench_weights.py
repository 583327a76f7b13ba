"""How `make bench-weights` compares; no rank is started."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from bench.bench_weights import Measured, tables

CASE = {"seconds": 1.0, "copy_seconds": 0.1, "received_bytes": 100e6, "processor_seconds": 1.0}


def measured(link: str, seconds: float, processor_seconds: float, changed: float) -> Measured:
    cases = {
        "one": {**CASE, "seconds": 8.0},
        "all": {**CASE, "seconds": seconds, "processor_seconds": processor_seconds},
        "changed": {**CASE, "received_bytes": changed},
    }
    return Measured(links={link: cases}, megabytes={link: 100})


def test_ratios_and_bars() -> None:
    found = measured("100mbit", 12.0, 4.0, 3e6)
    assert found.to_json()["broadcast_over_one"] == {"100mbit": 1.5}
    assert found.to_json()["changed_over_all"] == {"100mbit": 0.03}
    assert [met for *_, met in found.bars()] == [True, True]
    assert [met for *_, met in measured("100mbit", 12.1, 4.0, 5e6).bars()] == [False, False]
    console = Console(width=100, record=True)
    for table in tables(found):
        console.print(table)
    assert "12.00" in console.export_text()


def test_no_bar_holds_for_a_broadcast_that_the_processors_bound() -> None:
    found = measured("1gbit", 12.0, 4.0, 3e6)
    assert found.processor_bound("1gbit") == pytest.approx(4.0 / (os.cpu_count() or 1))
    found.links["1gbit"]["all"]["processor_seconds"] = 100.0 * (os.cpu_count() or 1)
    assert [what for what, *_ in found.bars()] == ["1 Gbit/s: bytes after 2 % changed"]
