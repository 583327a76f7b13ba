"""Checkpoints of other programs: of another layout; of other defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolecall import Context, Job, Peer, Role, Settings, UsageError
from rolecall.checkpoint.checkpoint import Checkpoints
from tests.context import contexts

# ---- of another layout


class Net(Settings):
    """`width` has a default that depends on what there is to learn."""

    width: int | None = None


def lead(directory: Path, layout: int = 1, width: int | None = None) -> Context[Any]:
    job = Job([Role("agent", print)], settings=Net, pinned=("width",), layout=layout)
    return contexts.make(directory, me=Peer("agent", 0, 0), job=job, width=width)


def saved(directory: Path, chosen: dict[str, Any] | None = None, **how: Any) -> Path:
    """The directory, with a checkpoint after step 1."""
    context = lead(directory, **how)
    context.restore({"x": 1.0}, chosen)
    context.save(1)
    return directory


@pytest.mark.parametrize(("before", "now", "version"), [(1, 2, "an earlier"), (2, 1, "a newer")])
def test_one_of_another_layout_is_refused_whatever_else_differs(
    tmp_path: Path, before: int, now: int, version: str
) -> None:
    saved(tmp_path, layout=before, width=3)
    advice = "finish the run with that version, or set another CHECKPOINT_DIR"
    problem = f"checkpoint-000001-0000000001.pt: was written by {version} version of this job; {advice}"
    for width in (3, None):
        with pytest.raises(UsageError) as refused:
            lead(tmp_path, layout=now, width=width).restore({"y": 1.0})
        assert str(refused.value) == problem


def test_one_of_the_same_layout_is_not(tmp_path: Path) -> None:
    assert lead(saved(tmp_path, layout=2), layout=2).restore({"x": 0.0}) == {"x": 1.0}


# ---- of other defaults


def test_what_a_default_has_become_is_in_the_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, {"width": 64})
    assert Checkpoints(tmp_path, "rl").newest().about["settings"] == {"width": 64}  # type: ignore[union-attr]
    # a resume may have chosen the same, or be told so
    assert lead(tmp_path).restore({"x": 0.0}, {"width": 64}) == {"x": 1.0}
    assert lead(tmp_path, width=64).restore({"x": 0.0}, {"width": 64}) == {"x": 1.0}


def test_a_default_that_has_become_another_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, {"width": 64})
    with pytest.raises(UsageError, match=r"^WIDTH=128: the newest checkpoint .* was made with 64; set that, or"):
        lead(tmp_path).restore({"x": 0.0}, {"width": 128})


def test_what_is_chosen_must_be_pinned(tmp_path: Path) -> None:
    """Else no checkpoint's value would be used."""
    with pytest.raises(UsageError, match=r"'seed': \.\.\.\}\): is no pinned setting; add it to Job\(pinned="):
        lead(tmp_path).restore({"x": 0.0}, {"seed": 3})
