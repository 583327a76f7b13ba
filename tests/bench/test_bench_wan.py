"""What the benchmark of slow links makes of its measurements, and what it measures again."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import bench_wan, wan_tasks
from bench.wan_ranks import Training
from bench.wan_results import Measured, Store, tables
from rolecall.jobs.ps import PsSettings
from tests.integration.cluster import Rank

CURVES = {"sync": [(100, 0.90), (200, 0.98)], "local-int4": [(2, 0.5), (5, 0.976), (6, 0.978)], "int8": [(90, 0.9)]}
BYTES = {"sync": 1000.0, "local-int4": 4.0, "int8": 2.0}


def run(mode: str, seed: int) -> dict[str, Any]:
    curve = CURVES[mode]
    return {
        "accuracy": curve[-1][1] + 0.001 * (seed - 1),
        "updates": curve[-1][0],
        "curve": curve,
        "settings": {},
        "sent_bytes": BYTES[mode],
        "received_bytes": BYTES[mode],
        "samples": 1,
        "seconds": 1.0,
    }


def rate(seconds: float, samples: float = 1.0) -> dict[str, Any]:
    return {"seconds_per_update": seconds, "samples_per_s": samples, "updates": 3, "settings": {}}


@pytest.fixture
def measured() -> Measured:
    store = Store("wan")
    for mode in CURVES:
        store.runs |= {f"accuracy/digits/{mode}/{seed}": run(mode, seed) for seed in (1, 2)}
    store.runs |= {"rate/digits/sync/20mbit": rate(8.0), "rate/digits/local-int4/20mbit": rate(2.0)}
    return Measured(store, ["digits"], list(CURVES), ["20mbit"], [1, 2])


def test_the_target_is_half_a_point_below_sync_and_its_time_is_computed_or_measured(measured: Measured) -> None:
    assert measured.target("digits") == pytest.approx(0.9755)
    assert measured.updates("digits", "local-int4") == 5
    assert measured.seconds("digits", "local-int4", "20mbit") == (10.0, "computed")
    assert measured.seconds("digits", "sync", "20mbit") == (1600.0, "computed")
    measured.store.runs["whole/digits/local-int4/20mbit"] = {"seconds": 12.0, "settings": {}}
    assert measured.seconds("digits", "local-int4", "20mbit") == (12.0, "measured")


def test_a_mode_that_is_not_accurate_has_no_time_and_meets_no_bar(measured: Measured) -> None:
    assert measured.updates("digits", "int8") == math.inf
    assert measured.accurate("digits") == ["local-int4"]  # although int8 has fewer bytes
    assert [(what, value, met) for what, value, _, met in measured.bars()] == [
        ("digits: bytes, local-int4, 2 seeds, -0.20 points", "1/250 of sync", True),
        ("digits, 20 Mbit/s, 80 ms: local-int4 (computed), sync (computed)", "160.0 times sooner", True),
    ]
    measured.store.runs = {key: one for key, one in measured.store.runs.items() if "local-int4" not in key}
    assert [(value, met) for _, value, _, met in measured.bars()] == [("no mode is accurate", False)]


def test_ratios_are_of_the_same_round(measured: Measured) -> None:
    for number, (slow, fast) in enumerate([(10.0, 30.0), (20.0, 40.0), (10.0, 26.0)], 1):
        measured.store.runs[f"uneven/sync/{number}"] = rate(1, slow)
        measured.store.runs[f"uneven/async/{number}"] = rate(1, fast)
    measured.store.runs["uneven/async/4"] = rate(1, 99.0)  # nothing beside it
    assert measured.ratios("uneven", "async", "sync") == pytest.approx([3.0, 2.0, 2.6])
    assert measured.bars()[-1][1:] == ("2.60 x the rate of sync", ">= 2.5", True)


def test_what_the_file_holds_is_measured_again_with_other_settings_only(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "wan.json"
    monkeypatch.setenv("BENCH_JSON", str(target))
    measured.store.runs["rate/digits/sync/20mbit"]["settings"] = {"EPOCHS": 30}
    measured.save()
    summary = json.loads(target.read_text())
    assert summary["tasks"]["digits"]["modes"]["int8"]["updates_to_target"] is None
    assert summary["tasks"]["digits"]["modes"]["sync"]["links"]["20mbit"]["how"] == "computed"
    again = Store.open("wan")
    assert again.has("rate/digits/sync/20mbit", {"EPOCHS": 30})
    assert not again.has("rate/digits/sync/20mbit", {"EPOCHS": 12})
    assert not again.has("rate/digits/sync/1gbit", {"EPOCHS": 30})
    with pytest.raises(RuntimeError, match="name another file"):
        Store.open("wan-quick")


def test_a_table_shows_every_mode_that_was_measured(measured: Measured) -> None:
    (table,) = tables(measured)
    assert list(table.columns[0].cells) == ["sync", "int8", "local-int4"]


@pytest.mark.parametrize(
    "settings",
    [wan_tasks.settings(task, mode) for task in wan_tasks.TASKS for mode in wan_tasks.MODES]
    + [*bench_wan.UNEVEN.values(), *bench_wan.INT8.values()],
)
def test_the_settings_are_ones_that_the_job_takes(settings: dict[str, Any]) -> None:
    given = {name.lower(): value for name, value in settings.items()}
    assert given.keys() <= PsSettings.model_fields.keys()
    PsSettings(**given, trainers=bench_wan.UNEVEN_TRAINERS)


def test_wrong_selections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--modes", "fast"], ["--links", "1tbit"], ["--seeds", "x"], ["--only", "all"], ["--tasks", "mnist"]):
        with pytest.raises(SystemExit) as ended:
            bench_wan.main(wrong)
        assert ended.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def training(directory: Path, code: int | None = None) -> Training:
    """Of one rank that runs, or has ended with `code`."""
    rank = Rank("ps", 0, {}, directory / "ps-0.log")
    rank.process = SimpleNamespace(poll=lambda: code)  # type: ignore[assignment]
    return Training(directory, [rank], ["127.0.0.1"], None)


def test_a_line_of_the_log_counts_once_it_is_whole(tmp_path: Path) -> None:
    one, log = training(tmp_path), tmp_path / "ps-0.log"
    log.write_text('no JSON\n{"event": "first"}\n{"event": "sec')
    events = one.events(time.monotonic() + 60)
    assert next(events) == {"event": "first"}
    with log.open("a") as file:
        file.write('ond"}\n')
    assert next(events) == {"event": "second"}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "DONE").write_text("{}")
    assert list(events) == []  # it has finished


def test_a_rank_that_ends_or_is_lost_ends_the_measurement_with_a_line_that_says_why(tmp_path: Path) -> None:
    log = tmp_path / "ps-0.log"
    log.write_text("noise\nrolecall: UPDATE_MODE=odd: is unknown\nmore noise\n")
    with pytest.raises(RuntimeError, match=r"^ps-0 ended with exit code 2: rolecall: UPDATE_MODE=odd: is unknown$"):
        list(training(tmp_path, 2).events(time.monotonic() + 60))
    log.write_text('{"event": "gang generation"}\n' * 2)
    with pytest.raises(RuntimeError, match="ranks were lost"):
        list(training(tmp_path).events(time.monotonic() + 60))
    log.write_text("")
    assert list(training(tmp_path).events(time.monotonic())) == []  # the deadline
