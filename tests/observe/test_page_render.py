"""The page as HTML: what a job says stays text, nothing comes from elsewhere, and its policy allows only its script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from rolecall.declare import describe
from rolecall.gang.protocol import RoleSpec
from rolecall.observe.page import render, state
from rolecall.observe.page.rates import Rates
from rolecall.observe.page.state import GangView
from rolecall.record.history import History, Point, Start
from tests.record.histories import ended

EVIL = "</script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>&\"'\u2028<!--{{policy}}"


def shown(text: str = EVIL) -> dict[str, Any]:
    """A state in which everything that a job can name is `text`."""
    run = History([Start(1, 0), Point("score", 1, 2.0, 1.0), Point(text, 1, 1.0, 1.0), ended("failed", 1, text)])
    gang = GangView("failed", text, missing=(text,))
    counted = Rates()
    counters = {"queues": {text: {"size": 1}}, "weights": {text: {"version": 1}}}
    counted.take(
        {("lead", 0): {"started": 1, "at": 1, "methods": {}, "values": {}, "log": [], **counters}}, [("lead", 0)]
    )
    words = dict.fromkeys(("name", "summary", "score", "unit", "version"), text)
    job = replace(describe.describe("rl"), roles=(RoleSpec("lead", 1, 1, 1, elastic=False),), **words)
    summary = {"state": text, "result": {text: text}}
    return state.of_gang(job, gang, run, counted, settings={text: text}, now=1.0, summary=summary)


SHOWN = shown()


class Elements(HTMLParser):
    """The elements of a page, and the text in its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags = Counter[str]()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag].append(data)


@pytest.mark.parametrize("page", [render.live(SHOWN), render.saved(SHOWN)], ids=["live", "saved"])
def test_names_of_a_job_are_text(page: str) -> None:
    here, there = Elements(page), Elements(render.saved(shown("harmless")))
    assert {**here.tags, "meta": 0} == {**there.tags, "meta": 0}  # the saved page has its policy in one
    assert "".join(here.texts["title"]).startswith(EVIL)
    data = here.texts["script"][0]
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data) == json.loads(json.dumps(SHOWN))


@pytest.mark.parametrize("page", [render.live(shown("x")), render.saved(shown("x"))], ids=["live", "saved"])
def test_page_loads_nothing_from_elsewhere(page: str) -> None:
    """But for the name of SVG's namespace, and an example in the text."""
    urls = set(re.findall(r"[a-z]+://[^\s\"'<)]+", page))
    assert urls == {"http://www.w3.org/2000/svg", "http://localhost:PORT/"}
    for tag, name, value in Elements(page).attributes:
        assert name not in ("src", "srcset", "action", "background", "style"), (tag, value)
        assert not name.startswith("on")
        assert name != "href" or value == "data:,"
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", page)


def test_a_page_allows_only_its_own_script_and_style_by_their_digests() -> None:
    page = render.saved(shown("x"))
    elements = Elements(page)
    policy = next(
        value for tag, name, value in elements.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["connect-src"] == "'none'"
    for kind, text in (("script", elements.texts["script"][-1]), ("style", "".join(elements.texts["style"]))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert page.index("Content-Security-Policy") < page.index("<style")
    live = dict(rule.split(" ", 1) for rule in render.headers()["Content-Security-Policy"].split("; "))
    assert live == rules | {"connect-src": "'self'", "frame-ancestors": "'none'"}
