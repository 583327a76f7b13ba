"""The recorder of a worker's spans: what its file holds, when it is on, and what it leaves out."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolecall.record import recorder as module
from rolecall.record.recorder import NOOP, Recorder, under
from rolecall.record.records import Beginning, Process, SpanRecord, file_name, parse

ABOUT = {"job": "rl", "role": "ps", "ordinal": 1, "rank": 2, "generation": 3}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder whose thread writes nothing by itself."""
    monkeypatch.setattr(module, "WRITE_PERIOD_SECONDS", 3600.0)
    before = [*gc.callbacks]
    gc.disable()  # a collection is a span: only the ones that a test asks for
    recorder = Recorder()
    yield recorder
    recorder.close()
    gc.callbacks[:] = before
    gc.enable()


def read(path: Path) -> tuple[Process, list[SpanRecord]]:
    first, *rest = map(parse, path.read_text().splitlines())
    assert isinstance(first, Beginning)
    return first.process, [span for span in rest if isinstance(span, SpanRecord)]


def test_a_file_begins_with_its_process_and_holds_the_spans_that_ended(here: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    before = time.monotonic_ns(), time.time_ns()
    here.start(path, ABOUT)
    open_one = here.begin("open")
    with here.span("outer", step=3) as outer, here.span("inner") as inner:
        inner.note(loss=0.5, shape=(2, 3), nan=float("nan"))
    here.flush()
    process, (first, second) = read(path)
    assert {name: getattr(process, name) for name in ABOUT} == ABOUT
    assert process.pid == os.getpid()
    assert before[0] <= process.monotonic_ns <= first.start_ns
    assert before[1] <= process.unix_ns <= time.time_ns()
    assert (first.name, first.kind, first.parent, first.thread) == (
        "inner",
        "internal",
        outer.id,
        threading.get_native_id(),
    )
    assert first.attributes == {"loss": 0.5, "shape": "(2, 3)", "nan": "nan"}
    assert (second.id, second.parent, second.attributes) == (outer.id, "", {"step": 3})
    assert second.start_ns <= first.start_ns <= first.end_ns <= second.end_ns
    assert first.id != second.id
    assert all(len(span.id) == 16 and int(span.id, 16) for span in (first, second))
    open_one.end()
    here.flush()
    assert read(path)[1][-1].id == open_one.id


def test_nothing_is_recorded_while_it_is_off(here: Recorder, tmp_path: Path) -> None:
    assert here.span("before") is NOOP
    with here.span("before") as nothing:
        nothing.note(ignored=1)
    here.since(time.monotonic_ns(), "before")
    here.start(tmp_path / "trace", ABOUT)
    here.since(0, "began before the recorder did")
    with here.span("during"):
        pass
    here.close()
    assert here.span("after") is NOOP
    assert [span.name for span in read(tmp_path / "trace")[1]] == ["during"]


def test_an_error_is_noted_and_passes(here: Recorder, tmp_path: Path) -> None:
    here.start(tmp_path / "trace", ABOUT)
    with pytest.raises(ValueError, match="broken"), here.span("one"):
        raise ValueError("broken\nsecond line")
    with pytest.raises(KeyboardInterrupt), here.span("two"):
        raise KeyboardInterrupt
    assert here.begin("three").parent == ""
    here.flush()
    assert [span.attributes for span in read(tmp_path / "trace")[1]] == [{"error": "ValueError: broken"}, {}]


def test_threads_have_their_own_span_and_a_span_can_be_carried_to_another(here: Recorder, tmp_path: Path) -> None:
    here.start(tmp_path / "trace", ABOUT)

    def work() -> None:
        with here.span("alone"):
            pass
        with under(outer), here.span("carried"):
            pass

    with here.span("outer") as outer:
        assert isinstance(outer, module.Span)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    here.flush()
    spans = {span.name: span for span in read(tmp_path / "trace")[1]}
    assert (spans["alone"].parent, spans["carried"].parent) == ("", outer.id)
    assert spans["alone"].thread == spans["carried"].thread != spans["outer"].thread


def test_full_file_is_marked_and_continued_by_a_request(
    here: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "trace"
    here.start(path, ABOUT)
    for _ in range(20):
        here.begin("one").end()
    here.flush()
    assert not here.on
    *kept, last = read(path)[1]
    assert 0 < len(kept) < 20
    assert (last.name, last.kind, last.attributes) == ("dropped", "internal", {"why": "the file is full"})
    size = path.stat().st_size
    here.flush()
    assert path.stat().st_size == size <= 1500
    here.start(path, ABOUT)
    here.begin("two").end()
    here.flush()
    assert [span.name for span in read(path)[1]].count("two") == 1
    assert path.read_text().count('"process"') == 1


def test_dropped_spans_are_counted(here: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_SPANS", 5)
    here.start(tmp_path / "trace", ABOUT)
    for _ in range(8):
        here.begin("one").end()
    here.flush()
    *kept, last = read(tmp_path / "trace")[1]
    assert (len(kept), last.name, last.attributes["spans"]) == (5, "dropped", 3)
    assert here.on


def test_request_ends_after_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_PERIOD_SECONDS", 0.005)
    recorder = Recorder()
    recorder.start(tmp_path / "trace", ABOUT, seconds=0.02)
    recorder.begin("one").end()
    deadline = time.monotonic() + 30
    while recorder.on and time.monotonic() < deadline:
        time.sleep(0.005)  # the period of looking, not a race
    assert not recorder.on
    assert [span.name for span in read(tmp_path / "trace")[1]] == ["one"]  # written by its thread
    recorder.start(tmp_path / "other", ABOUT)
    recorder.begin("two").end()
    recorder.close()
    assert [span.name for span in read(tmp_path / "other")[1]] == ["two"]
    gc.callbacks.remove(recorder._collect)


def test_a_disk_that_fails_ends_the_recording(
    here: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.start(tmp_path / "missing" / "trace", ABOUT)
    assert not here.on
    assert "no trace can be recorded" in capsys.readouterr().out
    here.start(tmp_path / "trace", ABOUT)
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(here, "_descriptor", full)
    here.begin("one").end()
    here.flush()
    assert not here.on
    assert "No space" in capsys.readouterr().out
    here.begin("two").end()
    here.flush()  # and does not try again
    assert capsys.readouterr().out == ""


def test_a_forked_process_records_nothing(here: Recorder, tmp_path: Path) -> None:
    here.start(tmp_path / "trace", ABOUT)
    with here.span("outer"):
        pid = os.fork()
        if pid == 0:
            os._exit(here.on or here._path is not None)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    here.flush()
    assert [span.name for span in read(tmp_path / "trace")[1]] == ["outer"]


def test_a_long_garbage_collection_is_a_span(here: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_GC_NS", 0)
    here.start(tmp_path / "trace", ABOUT)
    gc.collect(1)
    here.flush()
    spans = [span for span in read(tmp_path / "trace")[1] if span.name == "garbage collection"]
    assert {"generation": 1} in [span.attributes for span in spans]


def test_a_generator_that_another_thread_disposes_of_does_no_harm(here: Recorder, tmp_path: Path) -> None:
    here.start(tmp_path / "trace", ABOUT)

    def steps() -> Iterator[int]:
        with here.span("step"):
            yield 1

    running = steps()
    thread = threading.Thread(target=lambda: next(running))
    thread.start()
    thread.join()
    running.close()
    here.flush()
    assert [span.name for span in read(tmp_path / "trace")[1]] == ["step"]


def test_uncollected_files_are_bounded(here: Recorder, tmp_path: Path) -> None:
    for generation in range(1, 10):
        here.start(tmp_path / file_name(generation), ABOUT)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [file_name(each) for each in (7, 8, 9)]
