"""Draws docs/llm.svg, the curve of a run with kills: `python -m tools.llm_picture [RUN]`.

RUN is the directory of a run that has ended. Without one, the job runs here, and SIGKILL ends a worker every
KILL_SECONDS. The picture is made of the run's history alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from rolecall.record import history
from rolecall.record.history import History
from tools.demo import BLUE, GREEN, GREY, RED
from tools.ranks import kill, urls_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "llm.svg"
COMMAND = "rolecall run examples/grpo.py --checkpoint-interval 2"
KILL_SECONDS = 20.0
VICTIMS = ("learner_0", "generator_0", "reward_0", "generator_1", "learner_0", "reward_1")
TAUGHT = 200  # updates by examples, the setting's default
DEADLINE = 600.0  # of a run, in seconds
ORDERLY = ("finished", "drained", "left")  # causes that are no kill's

WIDTH, HEIGHT = 840, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 60, 56


class Kill(NamedTuple):
    """A worker that a run has lost, after `seconds` of training."""

    seconds: float
    role: str


def record(directory: Path) -> None:
    """Runs the job in `directory`, and kills workers. Raises RuntimeError if it does not reach its end."""
    command = [sys.executable, "-m", *COMMAND.split(), "--plain", "--checkpoint-dir", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    victims, next_kill, deadline = cycle(VICTIMS), time.monotonic() + KILL_SECONDS, time.monotonic() + DEADLINE
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            urls = urls_of(directory)  # none once the run ends
            if urls and time.monotonic() >= next_kill:
                kill(process.pid, urls[next(victims)], whole=False)
                next_kill += KILL_SECONDS
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    if code:
        raise RuntimeError(f"the run ended with code {code}")


def kills_of(run: History) -> list[Kill]:
    """The kills in seconds of training, which pass only while the learner trains."""
    kills = []
    for event in run.events:
        before = [start for start in run.starts if start.time <= event.time]
        if before and event.what in ("ended", "lost") and event.cause not in ORDERLY:
            seconds = before[-1].seconds + event.time - before[-1].time
            member = re.search(r"(\w+)_\d", event.reason)  # "the worker of generator_1 ended: killed"
            kills.append(Kill(seconds, member[1] if member else event.what))
    return kills


def draw(run: History) -> str:
    """The SVG."""
    curve = run.curves["score"]
    seconds = max(curve[-1].seconds, 1.0) * 1.02

    def x(value: float) -> float:
        return round(LEFT + value / seconds * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM), 1)

    def parts() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13" '
            f'font-family="ui-sans-serif, system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            f'fill="{GREY}">'
        )
        yield "<title>The accuracy of a language model that is taught by reward rises while workers are killed</title>"
        yield f'<text x="{LEFT}" y="24" font-family="ui-monospace, monospace" font-size="12.5">$ {COMMAND}</text>'
        for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
            opacity = 0.6 if share == 0 else 0.2
            yield f'<path d="M{LEFT} {y(share)}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="{opacity}"/>'
            yield f'<text x="{LEFT - 8}" y="{y(share) + 4:g}" text-anchor="end">{share:.0%}</text>'
        for second in range(0, int(seconds) + 1, 20):
            yield f'<text x="{x(second)}" y="{y(0) + 18:g}" text-anchor="middle">{second}</text>'
        yield f'<text x="{WIDTH - RIGHT}" y="{y(0) + 40:g}" text-anchor="end">seconds of training</text>'
        yield f'<text x="{LEFT}" y="{TOP - 16}">accuracy on held-out sums; red: SIGKILL</text>'
        if run.goal is not None:
            yield f'<path d="M{LEFT} {y(run.goal)}H{WIDTH - RIGHT}" stroke="{GREEN}" stroke-dasharray="6 4"/>'
            yield f'<text x="{LEFT + 8}" y="{y(run.goal) - 6:g}" fill="{GREEN}">goal {run.goal:.0%}</text>'
        for place, victim in enumerate(kills_of(run)):
            at, bottom = x(victim.seconds), y(0.02 + 0.07 * (place % 3))
            side, anchor = (-5, "end") if at > WIDTH - 90 else (5, "start")
            yield f'<path d="M{at} {TOP}V{y(0)}" stroke="{RED}" stroke-dasharray="3 3"/>'
            yield f'<text x="{at + side:g}" y="{bottom}" text-anchor="{anchor}" fill="{RED}">{victim.role}</text>'
        for point in [point for point in curve if point.step >= TAUGHT][:1]:
            at = x(point.seconds)
            yield f'<path d="M{at} {TOP}V{y(0)}" stroke="{GREY}"/>'
            yield f'<text x="{at - 8:g}" y="{TOP - 4}" text-anchor="end">by examples</text>'
            yield f'<text x="{at + 8:g}" y="{TOP - 4}">by reward</text>'
        path = "L".join(f"{x(point.seconds)} {y(point.value)}" for point in curve)
        yield f'<path d="M{path}" fill="none" stroke="{BLUE}" stroke-width="2.5" stroke-linejoin="round"/>'
        yield "</svg>"

    return "\n".join(parts()) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(name, "run")
        if len(sys.argv) == 1:
            record(directory)
        PICTURE.write_text(draw(history.read(directory)))
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
