"""A headless Chromium, for tests of the page: what it says on its console, and whom it asks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

try:
    from playwright.sync_api import Page, sync_playwright
except ImportError:  # a developer's package
    Page = sync_playwright = None

DEADLINE = 60_000.0  # milliseconds of every wait; a fail-safe, no measurement
NAMES = ("chromium", "chromium-browser", "google-chrome")  # of Debian's package, of Ubuntu's, of Google's


class Browser:
    """Pages of one browser, and what went wrong in them."""

    def __init__(self, chromium: object) -> None:
        self._chromium = chromium
        self.complaints: list[str] = []  # errors and warnings on the console, and requests to elsewhere

    def open(self, url: str, width: int = 1200, dark: bool = False) -> Page:
        """A page of `width` pixels at `url`. Requests to other hosts are noted."""
        scheme = "dark" if dark else "light"
        page = self._chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[attr-defined]
        page.set_default_timeout(DEADLINE)
        page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: request.url.startswith((url, "data:")) or self._note(request.url))
        page.goto(url)
        return page

    def _note(self, text: str) -> None:
        self.complaints.append(text)


def chromium() -> str | None:
    """The path of the system's Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """A browser, which is gone afterwards. Skips the test where there is none."""
    path = chromium()
    if path is None or sync_playwright is None:
        pytest.skip("no Chromium: apt-get install chromium; pip install playwright")
    with sync_playwright() as playwright:
        # a container's root has no user namespace for Chromium's sandbox
        one = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield Browser(one)
        finally:
            one.close()


def is_too_wide(page: Page) -> bool:
    """Whether a reader would have to scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))
