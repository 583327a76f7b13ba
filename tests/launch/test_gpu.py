"""Which GPUs each rank of `rolecall run` sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.typing import EventDict

from rolecall.errors import UsageError
from rolecall.launch import gpu
from rolecall.launch.here import Here

Seen = Callable[..., list[str | None]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """What ranks that want so many GPUs see on a machine that has `gpus`; None: all that there are."""

    def share(*wanted: int | None, gpus: int = 0, visible: str | None = None) -> list[str | None]:
        for number in range(gpus):
            (tmp_path / f"0000:{number}").mkdir(exist_ok=True)
        monkeypatch.setattr(gpu, "DRIVER", tmp_path)
        monkeypatch.delenv(gpu.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(gpu.VISIBLE, visible)
        shares = gpu.share(wanted)
        assert all(set(one) <= {gpu.VISIBLE} for one in shares)
        return [one.get(gpu.VISIBLE) for one in shares]

    return share


def test_each_has_its_own(seen: Seen, logged: list[EventDict]) -> None:
    assert seen(1, 2, 1, gpus=5) == ["0", "1,2", "3"]
    assert logged == []


def test_who_wants_none_sees_none_and_who_does_not_say_sees_all(seen: Seen) -> None:
    assert seen(None, 0, 1, None, 1, gpus=2) == [None, "", "0", None, "1"]


def test_those_that_the_user_allows_are_shared(seen: Seen) -> None:
    assert seen(1, 1, None, gpus=4, visible="3, 1") == ["3", "1", None]
    assert seen(1, gpus=4, visible="GPU-7f,GPU-9c") == ["GPU-7f"]
    assert seen(1, None, gpus=4, visible="") == ["", None]


def test_too_few_are_taken_in_turn_and_reported(seen: Seen, logged: list[EventDict]) -> None:
    assert seen(1, 1, 1, 2, 2, gpus=2) == ["0", "1", "0", "1,0", "1,0"]
    (event,) = logged
    assert (event["event"], event["gpus"], event["asked"]) == ("fewer GPUs than the roles ask for", 2, 7)


@pytest.mark.parametrize(("wanted", "gpus", "there"), [(1, 0, "none"), (3, 2, "2")])
def test_a_rank_that_wants_more_than_there_are_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: int, gpus: int, there: str
) -> None:
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    monkeypatch.setattr(gpu, "DRIVER", tmp_path)
    for number in range(gpus):
        (tmp_path / f"0000:{number}").mkdir()
    with pytest.raises(UsageError, match=rf"^lead_0: .*gpus={wanted}, and {there} can be used"):
        Here().plan({"lead_0": wanted, "sampler_0": None, "sampler_1": 0})


def test_a_machine_without_is_no_warning(seen: Seen, logged: list[EventDict]) -> None:
    assert seen(0, None) == ["", None]
    assert logged == []
