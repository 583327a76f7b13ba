"""How `make bench-hybrid` compares; nothing is run."""

from __future__ import annotations

import pytest

from bench import beside_hybrid
from bench.bench_hybrid import Measured
from bench.launch import Speed


def test_hybrid_is_compared_with_the_better_of_each_round() -> None:
    measured = Measured()
    for hybrid, ddp, torchrec in ((100.0, 80.0, 50.0), (100.0, 40.0, 100.0), (120.0, 80.0, 20.0)):
        measured.keep("rolecall", Speed(hybrid, 0.010))
        measured.keep("ddp", Speed(ddp, 0.012))
        measured.keep("torchrec", Speed(torchrec, 0.014))
    assert measured.of_better("rolecall") == pytest.approx(1.25)
    assert measured.cpu_ms["ddp"] == [12.0] * 3


def test_without_torchrec_it_is_compared_with_ddp() -> None:
    measured = Measured()
    measured.keep("rolecall", Speed(100.0, 0.010))
    measured.keep("ddp", Speed(50.0, 0.010))
    assert measured.of_better("rolecall") == pytest.approx(2.0)


def test_only_torchrec_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_hybrid.process, "missing", lambda name: f"{name} is not installed")
    assert beside_hybrid.missing("ddp") is None
    assert beside_hybrid.missing("torchrec") == "torchrec is not installed"
