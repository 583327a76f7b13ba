"""Trains `rl` here, kills ranks meanwhile, and takes a picture of rank 0's page: `python -m tools.page_picture [FILE]`.

FILE is docs/page.png by default, which notes the page.html that drew it. It needs a Chromium of the system's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin
from playwright.sync_api import Page, sync_playwright

from tools.ranks import kill, urls_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "page.png"
PAGE = PICTURE.parents[1] / "app" / "rolecall" / "observe" / "page" / "page.html"
COMMAND = (
    "rolecall run rl --plain --observers 4 --num-envs 8 --rollout-steps 128 --checkpoint-interval 1 --rejoin-interval 2"
)
# when this score is reached: the rank, and whether all of its processes are killed or its worker only
KILLS = ((60.0, "observer_1", False), (150.0, "agent_0", False), (260.0, "observer_3", True))
SHOWN = 340.0  # the score at which the picture is taken
DEADLINE = 240.0  # seconds
WIDTH = 1200  # pixels


def digest() -> str:
    """Of the page that draws what the picture shows."""
    return hashlib.sha256(PAGE.read_bytes()).hexdigest()


def state_of(url: str) -> dict[str, Any]:
    """What the page shows; nothing while rank 0 does not answer."""
    try:
        with urllib.request.urlopen(url + "page/state", timeout=5) as answer:
            return dict(json.loads(answer.read()))
    except (OSError, ValueError):
        return {}


def train(process: subprocess.Popen[bytes], directory: Path) -> str:
    """Returns the page's URL, once the run has come as far as the picture wants it."""
    kills, end = list(KILLS), time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.3)
        urls = urls_of(directory)
        url = next(iter(urls.values()), "")
        state = state_of(url) if url else {}
        score = max((point[2] for point in state.get("curve", {}).get("score", ())), default=0.0)
        if kills and score > kills[0][0] and state["state"] == "running":
            _, rank, whole = kills.pop(0)
            kill(process.pid, urls[rank], whole)
        elif not kills and score > SHOWN and all(rank["health"] == "good" for rank in state["ranks"]):
            return url
    raise RuntimeError("the run did not come that far")


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser, which takes long to start: the run would be over."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        chromium.close()


def photograph(page: Page, url: str, file: Path) -> None:
    """Writes what `url` shows, as a browser has it when it has taken rates, to `file`."""
    page.goto(url)
    page.wait_for_function("state.links.some((link) => link.calls > 0)")
    page.screenshot(path=file, full_page=True)
    note = PngImagePlugin.PngInfo()
    note.add_text("page", digest())
    with Image.open(file) as picture:
        picture.convert("RGB").save(file, optimize=True, pnginfo=note)


def main(arguments: list[str]) -> int:
    """Takes the picture. Returns the exit code."""
    file = Path(arguments[0]) if arguments else PICTURE
    with tempfile.TemporaryDirectory() as name, browser() as page:
        directory = Path(name, "run")
        command = [sys.executable, "-m", *COMMAND.split(), "--checkpoint-dir", str(directory)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            photograph(page, train(process, directory), file)
        finally:
            process.terminate()
            process.wait(timeout=60)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
