"""Sinks of a real run: its curves, after a kill, are the history's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rolecall.record import history
from tests.integration.cluster import Cluster, until
from tests.observe import sink_readers


def test_curves_go_on_after_a_kill(cluster: Callable[..., Cluster]) -> None:
    """TensorBoard drops what a resumed run makes again, and shows the values that the job names itself."""
    pytest.importorskip("tensorboard")
    made = cluster(JOB="rl", SINKS="tensorboard", CHECKPOINT_INTERVAL="0.2", LOG_INTERVAL="1").start(1)
    made.is_whole()
    until(made.first.appears("checkpoint file="), "a checkpoint")
    resumed = made.first.appears("resumed")
    made.first.kill_worker()
    until(resumed, "the next generation")
    made.is_whole()
    made.first.terminate()
    assert made.first.wait() == 0
    assert "a sink cannot be written" not in made.first.text()
    everything = sink_readers.tensorboard(made.checkpoints)
    curves = {tag: [event.step for event in everything.Scalars(tag)] for tag in everything.Tags()["scalars"]}
    assert {"done", "score"} < {*curves}
    assert [tag for tag in curves if tag.startswith("rl_")], "what rl logs by name"
    for steps in curves.values():
        assert steps == sorted({*steps})
    last = history.read(made.checkpoints).last
    assert curves["done"][-1] == last["done"].step
    assert everything.Scalars("done")[-1].value == pytest.approx(last["done"].value)
    assert len(curves["done"]) == curves["done"][-1]  # every step, once
