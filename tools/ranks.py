"""The ranks of a `rolecall run` that a picture is made of: where they are, and their ends."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import psutil


def urls_of(directory: Path) -> dict[str, str]:
    """The URLs of the ranks of the run in `directory`, rank 0's first; none until they are known."""
    try:
        ranks = json.loads((directory / "logs" / "ranks.json").read_text())["ranks"]
    except FileNotFoundError:
        return {}
    return {rank["name"]: rank["url"].removesuffix("metrics") for rank in ranks}


def kill(runner: int, url: str, whole: bool) -> None:
    """Sends SIGKILL to all processes of the rank at `url`, or to its worker only. Its supervisor listens there."""
    port = urlsplit(url).port
    for process in psutil.Process(runner).children(recursive=True):
        places = process.net_connections("tcp")
        if any(place.status == psutil.CONN_LISTEN and place.laddr.port == port for place in places):
            worker = next(child for server in process.children() for child in server.children())
            for victim in [process, *process.children(recursive=True)] if whole else [worker]:
                victim.kill()
            return
    raise RuntimeError(f"no process listens at {url}")
