"""Collectives as spans, and a job's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from rolecall.context.context import Context
from rolecall.jobs.hybrid import trainer
from rolecall.record import recorder as module
from rolecall.record.recorder import NOOP, Recorder
from rolecall.record.records import SpanRecord, parse
from rolecall.torch_rpc import tracing
from tests.context import contexts

ABOUT = {"job": "rl", "role": "lead", "ordinal": 0, "rank": 0, "generation": 1}


class Trace:
    """A recorder, and what it wrote."""

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self.recorder, self.path = recorder, path

    def spans(self) -> list[SpanRecord]:
        self.recorder.flush()
        records = map(parse, self.path.read_text().splitlines())
        return [record for record in records if isinstance(record, SpanRecord)]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trace]:
    """Records what calls do."""
    monkeypatch.setattr(module, "WRITE_PERIOD_SECONDS", 3600.0)
    before = [*gc.callbacks]
    gc.disable()  # a collection is a span: only the ones that a test asks for
    recorder = Recorder()
    monkeypatch.setattr(tracing, "recorder", recorder)
    recorder.start(tmp_path / "trace", ABOUT)
    yield Trace(recorder, tmp_path / "trace")
    recorder.close()
    gc.callbacks[:] = before
    gc.enable()


def test_a_context_has_spans(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolecall.context import context as contexts_module

    context: Context[Any] = contexts.make(tmp_path)
    assert context.span("off", tensor=torch.ones(1)) is NOOP
    monkeypatch.setattr(contexts_module, "recorder", trace.recorder)
    with context.span("on", shape=torch.ones(2).shape, rows=2) as span:
        span.note(loss=0.5)
    assert trace.spans()[-1].attributes == {"shape": "torch.Size([2])", "rows": 2, "loss": 0.5}


# ---- collectives


class Work:
    """A collective under way."""

    def __init__(self, future: Future[Any] | None) -> None:
        self.future = future

    def get_future(self) -> Future[Any]:
        if self.future is None:
            raise RuntimeError("has no future")
        return self.future


def test_collectives_are_spans(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[Any] = Future()
    answers = iter([None, Work(future), Work(None), ValueError("no group"), None])

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name in tracing.COLLECTIVES:
        monkeypatch.setattr(dist, name, all_reduce)
    for _ in range(2):  # the second time changes nothing
        tracing.watch_collectives()
    dist.all_reduce(torch.ones(4))
    (span,) = trace.spans()
    assert (span.name, span.attributes) == ("all-reduce", {"bytes": 16})
    dist.all_reduce(tensor=torch.ones(2), async_op=True)
    assert len(trace.spans()) == 1
    future.set_result(None)
    assert trace.spans()[1].attributes == {"bytes": 8}
    dist.all_reduce(torch.ones(4), async_op=True)
    assert trace.spans()[2].attributes == {"bytes": 16, "end": "not known"}
    with pytest.raises(ValueError, match="no group"):
        dist.all_reduce(torch.ones(4))
    assert trace.spans()[3].attributes["error"] == "ValueError: no group"
    trace.recorder.on = False
    dist.all_reduce(torch.ones(4))
    assert len(trace.spans()) == 4


class Bucket:
    """Gradients, as DistributedDataParallel hands them over."""

    def buffer(self) -> torch.Tensor:
        return torch.tensor([2.0, 4.0])


def test_the_all_reduce_of_hybrids_trainers_is_a_span(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Work:
        future: Future[Any] = Future()
        future.set_result([tensor + 1])  # of the other trainer
        return Work(future)

    for name in tracing.COLLECTIVES:
        monkeypatch.setattr(dist, name, all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    tracing.watch_collectives()
    assert trainer.all_reduce(Bucket()).wait().tolist() == [2.0, 3.0]
    (span,) = trace.spans()
    assert (span.name, span.attributes) == ("all-reduce", {"bytes": 8})
