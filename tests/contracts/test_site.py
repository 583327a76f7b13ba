"""What tools/site.py adds to the documentation's site, which `make site` builds with every link checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

import rolecall
from tools import site

ROOT = Path(__file__).resolve().parents[2]


def led(source: str, markdown: str) -> str:
    """`markdown` of the site's page `source`, with its links as the site has them."""
    page = cast(Any, SimpleNamespace(file=SimpleNamespace(src_uri=source)))
    return site.on_page_markdown(markdown, page, cast(Any, None), cast(Any, None))


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("index.md", "docs/job.md#roles", "job.md#roles"),
        ("index.md", "docs/demo.svg", "demo.svg"),
        ("changelog.md", "docs/job.md", "job.md"),
        ("contributing.md", "SECURITY.md", "reporting.md"),
        ("job.md", "script.md", "script.md"),
        ("job.md", "../README.md#start", "index.md#start"),
        ("job.md", "../examples/", "examples.md"),
        ("job.md", "../examples/pi.py", "examples.md#pipy"),
        ("job.md", "#roles", "#roles"),
        ("job.md", "https://example.org/docs/", "https://example.org/docs/"),
        ("job.md", "../k8s/rl/ranks.yaml", "k8s/rl/ranks.yaml"),  # the site has no such file: its build fails
    ],
)
def test_links_lead_into_the_site(source: str, link: str, expected: str) -> None:
    assert led(source, f"see [it]({link}), or not") == f"see [it]({expected}), or not"


def test_the_api_has_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    page = site.api()
    assert all(f"::: rolecall.{name}\n" in page for name in rolecall.__all__ if name != "__version__")
    monkeypatch.setattr(rolecall, "__all__", [*rolecall.__all__, "Another"])
    with pytest.raises(ValueError, match="differ by Another"):
        site.api()


def test_a_page_loads_nothing_from_elsewhere() -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    theme = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["theme"]
    assert theme["font"] is False  # the theme's default is a service's fonts
