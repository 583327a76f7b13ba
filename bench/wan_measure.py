"""The measurements of `make bench-wan`: each starts a training, and returns plain values for the JSON."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.link.links import LINKS
from bench.link.network import linked
from bench.wan_ranks import START_SECONDS, TESTED, UPDATE, Traffic, Training, names, stamp, train
from rolecall.rank.zygote import Zygote

News = Callable[[str], None]
TRAINERS = 2
NEVER = 1_000_000
ACCURACY_SECONDS = 600.0
WARM_UPDATES, WARM_SECONDS = 2, 1.0  # before what is measured


def accuracy(settings: dict[str, Any], seed: int, zygote: Zygote, on: News) -> dict[str, Any]:
    """Trains to the end without a link: `accuracy`, `updates`, `samples`, `seconds`, `sent_bytes` and
    `received_bytes` of a trainer (mean), and the `curve` [[updates, test accuracy]].
    """
    seeded = {**settings, "SEED": seed, "LOG_INTERVAL": 20}
    curve: list[tuple[int, float]] = []
    with train(seeded, TRAINERS, zygote=zygote) as training:
        for event in training.events(time.monotonic() + ACCURACY_SECONDS):
            if match := TESTED.match(event.get("event", "")):
                curve.append((int(event["step"]), float(match[2]) / 100))
                on(f"epoch {match[1]}, {match[2]} %")
        if not training.finished:
            raise TimeoutError(f"not trained to the end within {ACCURACY_SECONDS:g} s, {_reached(curve)}")
        done, counted = training.done(), training.traffic()
    last = (int(done["updates"]), float(done["accuracy"]))
    curve = [point for point in curve if point[0] < last[0]] + [last]
    return {
        **{name: done[name] for name in ("accuracy", "updates", "samples", "seconds")},
        "sent_bytes": statistics.mean(one.sent for one in counted),
        "received_bytes": statistics.mean(one.received for one in counted),
        "curve": curve,
    }


def rate(
    settings: dict[str, Any], link: str | None, updates: int, seconds: float, deadline: float, on: News,
    trainers: int = TRAINERS, zygote: Zygote | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains over `link`, or on loopback without one, until there were `updates` updates and `seconds` seconds, both
    after the first ones, or until `deadline` seconds have passed with at least one.

    Returns `seconds_per_update`, `samples_per_s`, `updates` that were measured, and a trainer's `sent_bytes` and
    `received_bytes` an update, and with all headers `wire_sent_bytes` and `wire_received_bytes` (means; the latter 0 on
    loopback, and over few updates off by what was under way).
    """
    endless = {**settings, "EPOCHS": NEVER, "LR_SCHEDULE": "constant", "LOG_INTERVAL": 1}
    linking = linked(LINKS[link], names(trainers)) if link else contextlib.nullcontext()
    with linking as links, train(endless, trainers, links, zygote) as training:
        begun: _Moment | None = None
        newest: dict[str, Any] = {}
        first, what = 0.0, "no update"
        ends = time.monotonic() + START_SECONDS + deadline
        for event in training.events(ends):
            if event.get("event") == "training":
                ends = time.monotonic() + deadline
            now = time.monotonic()
            if UPDATE.match(event.get("event", "")):
                newest, step, at = event, _step(event), stamp(event)
                first, what = first or at, f"{step} updates"
                on(what)
                warm = step >= WARM_UPDATES and at - first >= WARM_SECONDS
                if begun is None:
                    begun = _Moment(event, training) if warm or now > ends - deadline / 2 else None
                elif step - begun.step >= updates and at - begun.at >= seconds:
                    break
            if now > ends:
                break
        if begun is None or _step(newest) == begun.step:
            raise TimeoutError(f"not one more than the first updates within {deadline:g} s ({what})")
        over = _Moment(newest, training)
        return over.since(begun)


def _step(event: dict[str, Any]) -> int:
    match = UPDATE.match(event["event"])
    assert match
    return int(match[2])


class _Moment:
    """Where a training stands, right after the update of a line."""

    def __init__(self, event: dict[str, Any], training: Training) -> None:
        self.step, self.at = _step(event), stamp(event)
        self.samples, self.traffic = training.samples(), training.traffic()

    def since(self, before: _Moment) -> dict[str, Any]:
        count, seconds = self.step - before.step, self.at - before.at

        def per_update(value: Callable[[Traffic], float]) -> float:
            return (
                statistics.mean(map(value, self.traffic)) / count - statistics.mean(map(value, before.traffic)) / count
            )

        return {
            "seconds_per_update": seconds / count,
            "samples_per_s": (self.samples - before.samples) / seconds,
            "updates": count,
            "sent_bytes": per_update(lambda one: one.sent),
            "received_bytes": per_update(lambda one: one.received),
            "wire_sent_bytes": per_update(lambda one: one.wire_sent),
            "wire_received_bytes": per_update(lambda one: one.wire_received),
        }


def whole(settings: dict[str, Any], link: str, seed: int, target: float, deadline: float, on: News) -> dict[str, Any]:
    """Trains over `link` until a test accuracy of `target`: `seconds` from the training's start to that update, and
    `updates`. Raises TimeoutError where it is not reached.
    """
    seeded = {**settings, "SEED": seed, "LOG_INTERVAL": 1}
    curve: list[tuple[int, float]] = []
    begun, stamps = 0.0, dict[int, float]()
    with linked(LINKS[link], names(TRAINERS)) as links, train(seeded, TRAINERS, links) as training:
        for event in training.events(time.monotonic() + START_SECONDS + deadline):
            text = event.get("event", "")
            if text == "training":
                begun = stamp(event)
            elif UPDATE.match(text):
                stamps[_step(event)] = stamp(event)
                on(f"{_step(event)} updates, {_reached(curve)}")
            elif match := TESTED.match(text):
                curve.append((int(event["step"]), float(match[2]) / 100))
                if curve[-1][1] >= target:
                    step = curve[-1][0]
                    return {"seconds": stamps[step] - begun, "updates": step, "target": target, "seed": seed}
    raise TimeoutError(f"no test accuracy of {target:.2%} within {deadline:g} s, {_reached(curve)}")


def _reached(curve: list[tuple[int, float]]) -> str:
    return f"{curve[-1][1]:.2%} after {curve[-1][0]} updates" if curve else "nothing evaluated yet"
