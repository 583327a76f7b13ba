"""Draws some steps of a trace as docs/trace.svg: `python -m tools.trace_picture [RUN_DIRECTORY [FIRST [LAST]]]`.

Without RUN_DIRECTORY, a small run of `ps` is recorded. FIRST and LAST are steps; by default two in the middle.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from rolecall.observe.trace.calls import Calls
from rolecall.observe.trace.summary import Rank, Summary
from rolecall.observe.trace.timeline import Call, Reader, Segment
from rolecall.record import records

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "trace.svg"
COMMAND = "rolecall run ps --trainers 2 --update-mode sync --epochs 2 --trace 1 --plain"
DEADLINE = 120.0  # seconds of the run

WIDTH, LEFT, RIGHT, TOP = 480, 10, 10, 58  # narrow: on a telephone, text is still large enough
ROW, BAR, GAP = 58, 24, 8  # heights: of a rank, of its bar; and between the two halves
LEAST = 1.2  # width of the shortest segment
# mid-tones, for light and for dark pages
GREY, GREEN, BLUE, AMBER, RED, VIOLET = "#768390", "#3fa652", "#3b82f6", "#d29922", "#e5534b", "#a371f7"
COLOURS = {"computing": GREEN, "handling": BLUE, "network": RED, "queueing": AMBER, "answer to come": VIOLET,
           "other": GREY}  # fmt: skip
Part = tuple[float, float, str]  # start, end, and what


def draw(calls: Calls, first: int | None = None, last: int | None = None) -> str:
    """The picture: what each rank does in the steps `first` to `last`, and below it where its time went in the run."""
    summary = Summary(calls)
    generation = calls.trace.recordings[0].process.generation
    reader = Reader(calls, [one for one in calls.trace.recordings if one.process.generation == generation])
    first = sorted(reader.steps)[len(reader.steps) // 2] if first is None else first
    last = min(first + 1, max(reader.steps)) if last is None else last
    (start, _), (_, end) = reader.steps[first], reader.steps[last]
    ranks = [name for name in summary.ranks if name in reader.timelines]
    below = TOP + ROW * len(ranks) + GAP + 30
    height = below + 40 * len(ranks) + 62
    title = f"{calls.trace.job}: {(end - start) / 1e6:.0f} ms of {len(ranks)} ranks, and where all their time went"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        f'font-size="14" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="22" font-size="16" font-weight="600">steps {first} to {last}, '
        f"{(end - start) / 1e6:.0f} ms</text>",
        *rows(reader, ranks, start, end),
        f'<text x="{LEFT}" y="{below - 14}" font-size="16" font-weight="600">all {summary.steps} steps, '
        f"{summary.seconds:.1f} s</text>",
        *shares(summary, ranks, below),
        *legend(height - 46),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rows(reader: Reader, ranks: list[str], start: int, end: int) -> Iterator[str]:
    """A bar for each rank over the time, and an arrow from each call to its handler."""
    scale = (WIDTH - LEFT - RIGHT) / (end - start)
    tops = {name: TOP + ROW * place for place, name in enumerate(ranks)}

    def x(time: float) -> float:
        return round(LEFT + (time - start) * scale, 1)

    seen = dict[int, Call]()
    for name, top in tops.items():
        yield f'<text x="{LEFT}" y="{top - 6}">{escape(name)}</text>'
        yield f'<path d="M{LEFT} {top + BAR}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.4"/>'
        for segment in reader.timelines[name].within(start, end):
            if segment.call and segment.what in ("waiting", "handling"):
                seen[id(segment.call)] = segment.call
            for since, until, what in parts(segment):
                width = max(LEAST, (until - since) * scale)
                yield f'<rect x="{x(since):g}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[what]}"/>'
    for call in seen.values():
        if call.called in tops and call.caller in tops and start <= call.start and call.came <= end:
            down = tops[call.called] > tops[call.caller]
            begin, stop = tops[call.caller] + (BAR if down else 0), tops[call.called] + (0 if down else BAR)
            yield (f'<path d="M{x(call.start):g} {begin}L{x(call.came):g} {stop}" stroke="{GREY}" fill="none"/>'
                   f'<circle cx="{x(call.came):g}" cy="{stop}" r="2"/>')  # fmt: skip


def parts(segment: Segment) -> Iterator[Part]:
    """A segment in the picture's colours: a wait is cut where its call was at the other side."""
    call = segment.call
    if segment.what == "idle":
        return
    if segment.what != "waiting" or call is None or not call.called:
        yield segment.start, segment.end, segment.what if segment.what in COLOURS else "other"
        return
    share = min(1.0, call.network / call.outside) if call.outside else 0.0
    cuts = ((call.start, call.came, "queueing"), (call.came, call.ran, "handling"),
            (call.ran, call.left, "answer to come"), (call.left, segment.end, "queueing"))  # fmt: skip
    for start, end, what in cuts:
        start, end = max(start, segment.start), min(end, segment.end)
        if start >= end:
            continue
        network = (end - start) * share if what == "queueing" else 0.0
        yield start, end - network, what
        if network:
            yield end - network, end, "network"


def shares(summary: Summary, ranks: list[str], top: int) -> Iterator[str]:
    """A bar for each rank: what its time went to."""
    length = WIDTH - LEFT - RIGHT
    for place, name in enumerate(ranks):
        y, x = top + 40 * place, float(LEFT)
        yield f'<text x="{LEFT}" y="{y + 10}">{escape(name)}</text>'
        yield f'<path d="M{LEFT} {y + 30}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.4"/>'
        for what, time in sorted(went(summary.ranks[name]).items(), key=lambda one: [*COLOURS].index(one[0])):
            width = length * time / summary.nanoseconds
            yield f'<rect x="{x:.1f}" y="{y + 16}" width="{width:.1f}" height="14" fill="{COLOURS[what]}"/>'
            x += width


def went(rank: Rank) -> dict[str, float]:
    """The time of a rank, in ns, by the picture's colours."""
    times = defaultdict[str, float](float)
    for what, time in rank.spent.items():
        if what not in ("waiting", "idle"):
            times[what if what in COLOURS else "other"] += time
    for wait in rank.waits.values():
        for what, time in (("network", wait.network), ("queueing", wait.queueing), ("handling", wait.handler),
                           ("answer to come", wait.held), ("other", wait.unknown)):  # fmt: skip
            times[what] += time
    return {what: time for what, time in times.items() if time}


def legend(top: int) -> Iterator[str]:
    """What the colours mean."""
    for place, (what, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 150 * (place % 3), top + 24 * (place // 3)
        yield f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{y + 11}">{what}</text>'


def record(directory: Path) -> None:
    """Runs the job. Raises CalledProcessError or TimeoutExpired where it does not finish."""
    command = [sys.executable, "-m", *COMMAND.split(), "--checkpoint-dir", str(directory)]
    subprocess.run(command, check=True, timeout=DEADLINE, stdout=subprocess.DEVNULL)


def picture_of(directory: Path, *steps: int) -> str:
    """The picture of the run in `directory`."""
    return draw(Calls(records.read(directory / records.FOLDER)), *steps)


def main(words: list[str]) -> None:
    """Writes the picture."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(words[0]) if words else Path(name, "run")
        if not words:
            record(directory)
        PICTURE.write_text(picture_of(directory, *map(int, words[1:])))
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
