"""How `make bench-calls` measures and compares; no rank is started."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from bench import bench_calls, calls_work
from bench.bench_calls import CANDIDATES, Bench, Measured
from tests.chaos.network import NetworkError

SPEEDS = {"ours": 3.0, "torch": 1.0, "ours_tls": 3.0, "torch_apart": 1.0, "sockets": 6.0}  # of all figures


def measured(**speeds: float) -> Measured:
    found = Measured()
    for name, speed in speeds.items():
        values = {figure: 100 / speed if unit == "us" else speed for figure, unit in calls_work.FIGURES.items()}
        found.keep(name, values)
    return found


def test_ratios_are_those_of_the_bars() -> None:
    found = measured(**SPEEDS).to_json()
    assert found["rtt_over_torch"] == found["local_rtt_over_torch"] == pytest.approx(1 / 3, abs=1e-3)
    assert found["calls_over_torch"] == found["local_bulk_over_torch"] == 3.0
    assert found["bulk_over_sockets"] == 0.5
    bars = {bar["what"]: bar["met"] for bar in found["details"]["bars"]}
    assert not bars["TLS: 4.8 MB over plain sockets'"]
    assert bars["TLS: round trip over torch's"]


def test_a_row_is_behind_if_a_peer_is_ahead_in_it_and_sockets_are_no_peer() -> None:
    assert measured(**SPEEDS).to_json()["rows_behind"] == 0
    found = measured(**SPEEDS, ray=2.0)
    found.values["ray"] |= {"bulk": [4.0], "rtt_64": [10.0]}
    assert found.behind() == {"On one machine, bulk": ["ray"], "On one machine, rtt_64": ["ray"]}
    assert "rows_behind" not in measured(ours=1.0).to_json()


def test_without_namespaces_what_needs_them_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(names: list[str]) -> Any:
        raise NetworkError("not root")

    monkeypatch.setattr(bench_calls.apart, "network", refused)
    monkeypatch.setattr(bench_calls.process, "missing", lambda group: f"{group} is not installed")
    found = Bench(tuple(name for name in CANDIDATES if name not in ("ours", "torch")), 1, True, Console()).run()
    assert not found.values
    assert "not root" in found.left_out["grpc"] or "not installed" in found.left_out["grpc"]
    assert "not root" in found.left_out["ours_tls"]
    assert "not installed" in found.left_out["ray"]
