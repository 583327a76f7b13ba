"""The page as HTML: what a job says stays text, nothing comes from elsewhere, and its policy allows only its script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import UsageError
from rolecall.gang.protocol import RoleSpec
from rolecall.observe.page import command, render, state
from rolecall.observe.page.rates import Rates
from rolecall.observe.page.state import GangView, Titles
from rolecall.record.history import History
from tests.record import histories

EVIL = "</script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>&\"'\u2028<!--{{nonce}}"


def shown(text: str = EVIL) -> dict[str, Any]:
    """A state in which everything that a job can name is `text`."""
    run = History()
    run.record([("start", 0, 0.0, 1), ("score", 1, 1.0, 2.0)])
    run.end_generation("failed", 1, text)
    titles = Titles(text, text, text, text, version=text)
    gang = GangView("failed", text, missing=(text,))
    roles, summary = [RoleSpec("lead", 1, 1, 1, elastic=False)], {"state": text, "result": {text: text}}
    return state.of_gang(titles, roles, gang, run, Rates(), settings={text: text}, now=1.0, summary=summary)


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


@pytest.mark.parametrize("page", [render.live(SHOWN, "abc"), render.saved(SHOWN)], ids=["live", "saved"])
def test_names_of_a_job_are_text(page: str) -> None:
    here, there = Elements(page), Elements(render.saved(shown("harmless")))
    assert {**here.tags, "meta": 0} == {**there.tags, "meta": 0}  # the saved page has its policy in one
    assert "".join(here.texts["title"]).startswith(EVIL)
    data = here.texts["script"][0]
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data) == json.loads(json.dumps(SHOWN))


@pytest.mark.parametrize("page", [render.live(shown("x"), "abc"), render.saved(shown("x"))], ids=["live", "saved"])
def test_page_loads_nothing_from_elsewhere(page: str) -> None:
    """But for the name of SVG's namespace, and an example in the text."""
    urls = set(re.findall(r"[a-z]+://[^\s\"'<)]+", page))
    assert urls == {"http://www.w3.org/2000/svg", "http://localhost:PORT/"}
    for tag, name, value in Elements(page).attributes:
        assert name not in ("src", "srcset", "action", "background", "style"), (tag, value)
        assert not name.startswith("on")
        assert name != "href" or value == "data:,"
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", page)


def test_the_live_page_has_one_nonce_a_request() -> None:
    page, policy = render.live(shown("x"), "abc123"), render.headers("abc123")["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'nonce-abc123'"
    assert (rules["connect-src"], rules["frame-ancestors"], rules["base-uri"]) == ("'self'", "'none'", "'none'")
    nonces = [(tag, value) for tag, name, value in Elements(page).attributes if name == "nonce"]
    assert nonces == [("style", "abc123"), ("script", "abc123")]


def test_the_saved_page_allows_only_its_own_script_and_style_by_their_digests() -> None:
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


# ---- the command


def run_in(directory: Path) -> None:
    run = History()
    run.record([("start", 0, 0.0, 1), ("score", 1, 1.0, 2.0)])
    histories.write(directory, run)


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path)
    assert command.run([str(tmp_path)]) == 0
    assert str(tmp_path / "page.html") in capsys.readouterr().out
    page = Elements((tmp_path / "page.html").read_text())
    assert json.loads(page.texts["script"][0])["state"] == "killed"
    with pytest.raises(UsageError, match="rank 0 has written it"):
        command.run([str(tmp_path)])
    assert command.run([str(tmp_path), "--output", str(tmp_path / "else.html")]) == 0
    assert (tmp_path / "else.html").exists()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run_in(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        command.run([str(tmp_path), "--output", str(tmp_path / "no" / "file.html")])
