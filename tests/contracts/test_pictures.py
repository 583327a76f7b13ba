"""The README's pictures: well-formed, small, for light and dark pages, with key times that browsers accept."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from tools import page_picture
from tools.demo import PICTURE, Recording, draw

SVG = "{http://www.w3.org/2000/svg}"
RECORDING = Recording(
    curve=[(0.0, 1.0), (2.0, 90.0), (2.0, 95.0), (5.5, 300.0), (9.0, 476.0)],
    goal=475.0,
    states={"agent_0": [(0.0, "running"), (4.0, "starting"), (5.0, "running"), (9.5, "down")]},
    kills=[(4.0, "agent_0's worker", "next generation")],
)


def animations(text: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(f"{SVG}animate"))


@pytest.mark.parametrize(
    "path",
    [PICTURE, *(PICTURE.with_name(name) for name in ("architecture.svg", "llm.svg"))],
    ids=lambda path: path.name,
)
def test_a_picture_is_small_and_has_no_background_of_its_own(path: Path) -> None:
    assert path.stat().st_size < 200_000
    root = ElementTree.fromstring(path.read_text())
    width, height = root.attrib["viewBox"].split()[2:]
    for rect in root.findall(f"{SVG}rect"):
        assert (rect.get("width"), rect.get("height")) not in {(width, height), ("100%", "100%")}
    assert root.find(f"{SVG}title") is not None
    # nothing is loaded from elsewhere
    assert "href" not in path.read_text()
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", path.read_text()))


def test_the_pages_picture_is_of_this_page() -> None:
    with Image.open(page_picture.PICTURE) as picture:
        assert picture.info.get("page") == page_picture.digest(), "run `python -m tools.page_picture`"


@pytest.mark.parametrize("text", [PICTURE.read_text(), draw(RECORDING)], ids=["committed", "drawn"])
def test_every_animation_begins_at_0_and_goes_forward(text: str) -> None:
    assert animations(text)
    for one in animations(text):
        times = [float(time) for time in one.attrib["keyTimes"].split(";")]
        assert times[0] == 0
        assert times == sorted(set(times))
        assert times[-1] <= 1
        assert one.attrib["calcMode"] == "discrete" or times[-1] == 1
        assert len(one.attrib["values"].split(";")) == len(times)
