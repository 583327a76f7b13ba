"""The picture of a trace: well-formed, small, with nothing loaded from elsewhere, and with what the trace says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rolecall.observe.trace.calls import Calls
from tests.observe.traces import MS, Worker, call, write
from tools.trace_picture import COLOURS, PICTURE, draw

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder: Path) -> str:
    server, trainer = Worker("ps", host="one"), Worker("trainer & co", rank=1, host="one")
    for number in range(4):
        at = number * 100 * MS
        server.span("step", at, at + 100 * MS, step=number + 1)
        trainer.span("wait", at + 50 * MS, at + 100 * MS)
        call(trainer, server, "exchange", at + 50 * MS, at + 60 * MS, at + 90 * MS, at + 100 * MS,
             returned_ns=at + 70 * MS)  # fmt: skip
    return draw(Calls(write(folder, server, trainer)), 2, 3)


@pytest.mark.parametrize("which", ["committed", "drawn"])
def test_a_picture_is_small_and_has_no_background_of_its_own(which: str, tmp_path: Path) -> None:
    text = PICTURE.read_text() if which == "committed" else drawn(tmp_path)
    root = ElementTree.fromstring(text)
    width, height = root.attrib["viewBox"].split()[2:]
    assert len(text) < 100_000
    assert int(width) <= 500  # text of 14 is still 10 dots high on a telephone
    assert root.find(f"{SVG}title") is not None
    assert "href" not in text
    assert "url(" not in text
    for rect in root.iter(f"{SVG}rect"):
        assert (rect.get("width"), rect.get("height")) not in {(width, height), ("100%", "100%")}
        assert 0 <= float(rect.attrib["x"]) <= float(width)
        assert 0 < float(rect.attrib["y"]) < float(height)


def test_it_shows_what_the_trace_says(tmp_path: Path) -> None:
    text = drawn(tmp_path)
    assert "steps 2 to 3, 200 ms" in text
    assert "all 4 steps, 0.4 s" in text
    assert "trainer &amp; co 0" in text
    widths = {
        what: [float(width) for width in re.findall(rf'width="([\d.]+)" height="14" fill="{colour}"', text)]
        for what, colour in COLOURS.items()
    }
    assert widths["computing"][0] == pytest.approx(172.5, abs=0.1)  # of its first 50 ms nothing is recorded
    assert widths["handling"] == pytest.approx([46, 46], abs=0.1)  # at the server, and waited for by the trainer
    assert widths["network"][0] == pytest.approx(92, abs=0.1)
    assert widths["answer to come"][0] == pytest.approx(92, abs=0.1)
    assert text.count("<circle") == 2
