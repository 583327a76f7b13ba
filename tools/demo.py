"""Records a training run in which ranks are killed, and draws it as docs/demo.svg: `python -m tools.demo`.

The run is real: ranks are processes of this machine, and SIGKILL ends them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tools.ranks import kill, urls_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"
# few environments and long rollouts: iterations last as long after a restart, which synchronizes the environments
COMMAND = "rolecall run rl --num-envs 16 --rollout-steps 256 --checkpoint-interval 1 --rejoin-interval 2"
SCORE, GOAL = "rolecall_score", "rolecall_goal"
# when this score is reached: the rank, whether all of its processes are killed or its worker only, and what follows
KILLS = (
    (80.0, "observer_1", True, "the others train on"),
    (260.0, "agent_0", False, "next generation, newest checkpoint"),
    (400.0, "agent_0", True, "rank 0 restarts and resumes"),
)
DEADLINE = 300.0  # of a recording, in seconds
PERIOD = 0.1  # between two looks

LENGTH, PAUSE = 10.0, 3.0  # of the picture, in seconds: playing, and standing still before it begins again
WIDTH, HEIGHT = 840, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 96, 46
# mid-tones, for light and for dark pages
GREY, BLUE, AMBER, RED, GREEN = "#768390", "#3b82f6", "#d29922", "#e5534b", "#3fa652"
LIGHTS = {"running": GREEN, "starting": AMBER, "down": RED}


@dataclass
class Recording:
    """What was seen. Times are seconds since training began."""

    curve: list[tuple[float, float]] = field(default_factory=list)
    goal: float = math.nan
    states: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # by rank: from when on
    kills: list[tuple[float, str, str]] = field(default_factory=list)  # what was killed, and what follows


# ---- recording


def record() -> Recording:
    """Trains, kills and watches until the job has finished. Raises RuntimeError where it does not finish."""
    recording, kills = Recording(), list(KILLS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "run")
        command = [sys.executable, "-m", *COMMAND.split(), "--plain", "--checkpoint-dir", str(directory)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        began, deadline = math.nan, time.monotonic() + DEADLINE
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the run has not finished after {DEADLINE:g} s")
                time.sleep(PERIOD)
                samples = look(directory)
                score = samples.get("agent_0", {}).get(SCORE, math.nan)
                if math.isnan(began) and score > 0:
                    began = time.monotonic()
                if math.isnan(began):
                    continue
                now = round(time.monotonic() - began, 2)
                add(recording, now, score, samples)
                if kills and score >= kills[0][0]:
                    _, rank, whole, consequence = kills.pop(0)
                    kill(process.pid, urls_of(directory)[rank], whole)
                    recording.kills.append((now, rank if whole else f"{rank}'s worker", consequence))
        finally:
            process.terminate()
            code = process.wait(timeout=60)
    if code or kills:
        raise RuntimeError(f"the run ended with code {code}, and {len(kills)} kills were not made")
    return recording


def look(directory: Path) -> dict[str, dict[str, float]]:
    """The metrics of each rank of the run in `directory`, those with a state label by that; {} for one that is down."""
    samples: dict[str, dict[str, float]] = {}
    try:
        ranks = json.loads((directory / "logs" / "ranks.json").read_text())["ranks"]
    except FileNotFoundError:  # not yet, or over
        return {}
    for rank in ranks:
        samples[rank["name"]] = {}
        try:
            with urllib.request.urlopen(rank["url"], timeout=2) as answer:
                families = list(text_string_to_metric_families(answer.read().decode()))
        except OSError:
            continue
        for sample in (sample for family in families for sample in family.samples):
            samples[rank["name"]][sample.labels.get("state", sample.name)] = sample.value
    return samples


def add(recording: Recording, now: float, score: float, samples: dict[str, dict[str, float]]) -> None:
    """Adds what changed to `recording`."""
    recording.goal = samples.get("agent_0", {}).get(GOAL, recording.goal)
    curve = recording.curve
    if not math.isnan(score) and (not curve or curve[-1][1] != round(score, 1)):
        curve.append((now, round(score, 1)))
    for rank, metrics in samples.items():
        state = "down" if not metrics else "running" if metrics.get("running") else "starting"
        states = recording.states.setdefault(rank, [])
        if not states or states[-1][1] != state:
            states.append((now, state))


# ---- drawing


@dataclass(frozen=True)
class Scale:
    """From seconds and scores to the picture's coordinates, and to the time at which it shows them."""

    seconds: float
    score: float

    def x(self, seconds: float) -> float:
        return round(LEFT + seconds / self.seconds * (WIDTH - LEFT - RIGHT), 1)

    def y(self, score: float) -> float:
        return round(HEIGHT - BOTTOM - score / self.score * (HEIGHT - TOP - BOTTOM), 1)

    def key(self, seconds: float) -> float:
        """A key time: the share of the animation's length."""
        return round(min(seconds / self.seconds, 1) * LENGTH / (LENGTH + PAUSE), 4)


def draw(recording: Recording) -> str:
    """The SVG. Without animation, as in a reader that knows none, it shows the end."""
    end = recording.curve[-1][0]
    scale = Scale(end * 1.02, 1.08 * max(recording.goal, max(score for _, score in recording.curve)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="ui-sans-serif, system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" '
        f'fill="{GREY}">',
        "<title>A reinforcement learning run goes on after SIGKILL</title>",
        f'<text x="{LEFT}" y="24" font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="12.5">$ {COMMAND}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">a recorded run, shown {end / LENGTH:.1f} times as fast</text>',
        *axes(recording, scale),
        *lights(recording, scale),
        *markers(recording, scale),
        *curve(recording, scale),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def animate(attribute: str, keys: list[tuple[float, str]], mode: str = "discrete") -> str:
    """An animation of `attribute`, which has each value from its key time on."""
    times, values = (";".join(column) for column in zip(*((f"{key:g}", value) for key, value in keys), strict=True))
    return (
        f'<animate attributeName="{attribute}" calcMode="{mode}" dur="{LENGTH + PAUSE:g}s" repeatCount="indefinite" '
        f'keyTimes="{times}" values="{values}"/>'
    )


def appear(scale: Scale, seconds: float) -> str:
    return animate("opacity", [(0, "0"), (scale.key(seconds), "1")])


def axes(recording: Recording, scale: Scale) -> Iterator[str]:
    bottom, right = scale.y(0), WIDTH - RIGHT
    for score in range(0, int(scale.score), 100):
        y = scale.y(score)
        yield f'<path d="M{LEFT} {y}H{right}" stroke="{GREY}" stroke-opacity="{0.6 if score == 0 else 0.2}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{score}</text>'
    for seconds in range(0, int(scale.seconds) + 1, 5 if scale.seconds < 60 else 10):
        yield f'<text x="{scale.x(seconds)}" y="{bottom + 18:g}" text-anchor="middle">{seconds}</text>'
    yield f'<text x="{right}" y="{bottom + 36:g}" text-anchor="end">seconds</text>'
    yield f'<text x="{LEFT}" y="{TOP - 12}" >return</text>'
    y = scale.y(recording.goal)
    yield f'<path d="M{LEFT} {y}H{right}" stroke="{GREEN}" stroke-width="1.5" stroke-dasharray="6 4"/>'
    yield f'<text x="{LEFT + 8}" y="{y - 6:g}" fill="{GREEN}">goal {recording.goal:g}</text>'


def lights(recording: Recording, scale: Scale) -> Iterator[str]:
    """A light for each rank, in the colour of its worker's state."""
    for place, (rank, states) in enumerate(recording.states.items()):
        x = LEFT + 6 + 130 * place
        end = recording.curve[-1][0]
        keys = [(0.0, LIGHTS[states[0][1]])] + [(scale.key(at), LIGHTS[state]) for at, state in states[1:] if at < end]
        yield f'<circle cx="{x}" cy="50" r="6" fill="{keys[-1][1]}">{animate("fill", keys)}</circle>'
        yield f'<text x="{x + 13}" y="55" font-size="14">{rank}</text>'
    for place, (state, colour) in enumerate(LIGHTS.items()):
        x = WIDTH - RIGHT - 210 + 76 * place
        yield f'<circle cx="{x}" cy="50" r="4" fill="{colour}"/><text x="{x + 9}" y="54">{state}</text>'


def markers(recording: Recording, scale: Scale) -> Iterator[str]:
    """A line at each kill, with what was killed and what follows; a later one ends above the text of an earlier one."""
    for place, (seconds, victim, consequence) in enumerate(recording.kills):
        x, y = scale.x(seconds), scale.y(0) - 28 - 40 * place
        yield (
            f'<g><path d="M{x} {TOP}V{y + 18:g}" stroke="{RED}" stroke-width="1.5" stroke-dasharray="3 3"/>'
            f'<text x="{x + 6:g}" y="{y:g}" font-weight="600" fill="{RED}">SIGKILL {victim}</text>'
            f'<text x="{x + 6:g}" y="{y + 16:g}">{consequence}</text>{appear(scale, seconds)}</g>'
        )


def curve(recording: Recording, scale: Scale) -> Iterator[str]:
    points = [(scale.x(seconds), scale.y(score)) for seconds, score in recording.curve]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    keys = [scale.key(seconds) for seconds, _ in recording.curve]
    whole = f"{WIDTH - RIGHT - LEFT}"
    reveal = animate("width", [(0, "0"), (scale.key(scale.seconds), whole), (1, whole)], "linear")
    yield f'<clipPath id="seen"><rect x="{LEFT}" y="0" width="{whole}" height="{HEIGHT}">{reveal}</rect></clipPath>'
    yield (
        f'<path d="{path}" clip-path="url(#seen)" fill="none" stroke="{BLUE}" stroke-width="2.5" '
        f'stroke-linejoin="round"/>'
    )
    xs, ys = ([(0.0, values[0]), *zip(keys, values, strict=True), (1.0, values[-1])]
              for values in zip(*((f"{x:g}", f"{y:g}") for x, y in points), strict=True))  # fmt: skip
    dot = animate("cx", deduplicated(xs), "linear") + animate("cy", deduplicated(ys), "linear")
    yield f'<circle cx="{points[-1][0]}" cy="{points[-1][1]}" r="4.5" fill="{BLUE}">{dot}</circle>'
    x, y = points[-1]
    yield (
        f'<text x="{x - 10:g}" y="{y + 22:g}" text-anchor="end" font-weight="600" fill="{GREEN}">solved'
        f"{appear(scale, recording.curve[-1][0])}</text>"
    )


def deduplicated(keys: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Without keys at the time of the next: key times grow."""
    return [key for key, after in pairwise(keys) if key[0] < after[0]] + keys[-1:]


def main() -> None:
    recording = record()
    PICTURE.write_text(draw(recording))
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes, {recording.curve[-1][0]} s, killed: {recording.kills}")


if __name__ == "__main__":
    main()
