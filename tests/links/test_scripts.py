"""The rules of links and calls as scripts: `*.txt`, one rule each, named by it.

A script is a list of blocks. A block has commands, a line `----`, and what they print: the effects, what has changed of
calls and links, and when the next deadline is. `pytest tests/links --rewrite` writes the output instead of checking it:
read the difference.

    room calls=2 bytes=100              what may be in flight to a peer
    call b echo 10s wait=5s from-begin  a call at a peer; also internal, urgent, stream, bytes=50, running=60s
    connected b 1 L1 epoch=2            the attempt 1 to connect to a peer has made the link L1
    not-connected b 1 PROBLEM | closed L1 PROBLEM
    next L1 | flush L1                  the next call that has waited for a link is sent; or all are
    accepted b L2 epoch=1               a peer has connected to this member
    lose b epoch=1 PROBLEM | joined b epoch=2 | forget b | listen b | end PROBLEM
    answered 1 | cancelled 1 | written 1 | answered 1 by=L2
    item 1 | expect 1                   the reader of a stream takes an item, and waits for one
    examined 1:running=3s 2 served      the peer says what its calls do: 2 has not begun; also because=WORD, a reason
    unexamined 1                        it says nothing
    wait 2s                             time passes
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import PeerLostError
from rolecall.links import links
from rolecall.links.calls import Call, Deadline, Examined
from rolecall.links.effects import Batch, Close, Fail, Late
from rolecall.links.links import Links

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


def seconds_of(text: str) -> float:
    return float(text.rstrip("s"))


def split(words: tuple[str, ...]) -> tuple[int, str]:
    """The epoch in `words`, and the rest."""
    epoch = next((int(word.removeprefix("epoch=")) for word in words if word.startswith("epoch=")), 0)
    return epoch, " ".join(word for word in words if not word.startswith("epoch="))


def shown(value: Any) -> str:
    if isinstance(value, Call):
        return str(value.number)
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    return str(value)


class World:
    """A member's links, driven by a script."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.now = 0.0
        self.links = Links()
        self.calls: dict[int, Call] = {}
        self.before: dict[str, str] = {}

    def run(self, line: str) -> list[str]:
        """Carries out a command. Returns what it prints."""
        command, *words = line.split()
        batch = getattr(self, "_" + command.replace("-", "_"))(*words) or self.links.batch()
        lines = [self.printed(effect) for effect in batch.effects]
        states = {f"{number}": self._call_state(call) for number, call in self.calls.items()}
        states |= {peer.name: f"{peer.state} at {peer.epoch}" for peer in self.links._peers.values()}
        lines += [f"-> {name} {state}" for name, state in states.items() if self.before.get(name) != state]
        self.before = states
        self._check()
        return lines + [f"until {batch.deadline:g} s"] * (batch.deadline < math.inf)

    @staticmethod
    def _call_state(call: Call) -> str:
        return f"{call.state} by {call.link}" if call.state == "sent" else call.state

    def _check(self) -> None:
        """What holds after each event."""
        for peer in self.links._peers.values():
            room = [call for call in self.links.calls.values() if call.to == peer.name and call.has_room]
            assert (peer.in_flight, peer.nbytes) == (len(room), sum(call.nbytes for call in room))
            assert (peer.link is not None) <= (peer.state in ("connecting", "up"))
            assert self.links.link_to(peer.name) is (peer.link if peer.state == "up" else None)
            assert self.links.has_lost(peer.name) == (peer.state == "lost")
        assert all(call.live for call in self.links.calls.values())

    def printed(self, effect: Any) -> str:
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", type(effect).__name__).lower()
        match effect:
            case Fail(call, error):
                return f"fail {call.number} {type(error).__name__}: {error}"
            case Close(link, problem):
                return f"close {link}: {problem or '-'}"
            case Late(calls, said):
                return f"late {shown(calls)}" + " silent" * (said is None)
            case _:
                return f"{name} {' '.join(shown(value) for value in vars(effect).values())}"

    def _room(self, *words: str) -> None:
        for word in words:
            name, _, value = word.partition("=")
            constant = {"calls": "MAX_IN_FLIGHT", "bytes": "MAX_IN_FLIGHT_BYTES"}[name]
            self._patch.setattr(links, constant, int(value))

    def _call(self, to: str, method: str, *words: str) -> None:
        given = dict(word.split("=") for word in words if "=" in word)
        seconds = next((seconds_of(word) for word in words if re.fullmatch(r"[\d.]+s", word)), 0.0)
        wait = seconds_of(given.get("wait", "0"))
        more: dict[str, Any] = {"wait": wait, "wait_setting": "WAIT", "from_begin": "from-begin" in words}
        running = Deadline(seconds_of(given["running"]), "RUNNING", **more) if "running" in given else None
        deadline = Deadline(seconds, "LIMIT", running=running, **more)
        kinds = {kind: kind in words for kind in ("internal", "urgent", "stream")}
        call = Call(to, method, deadline, int(given.get("bytes", 0)), **kinds)
        link = self.links.begin(call, self.now)
        assert (link is not None) == (call.state == "sent")
        self.calls[call.number] = call

    def _connected(self, peer: str, attempt: str, link: str, *words: str) -> Batch:
        return self.links.connected(peer, int(attempt), link, split(words)[0], self.now)

    def _not_connected(self, peer: str, attempt: str, *problem: str) -> Batch:
        return self.links.not_connected(peer, int(attempt), PeerLostError(" ".join(problem)))

    def _next(self, link: str) -> None:
        self.links.next_waiting(link, self.now)

    def _flush(self, link: str) -> None:
        while self.links.next_waiting(link, self.now):
            pass

    def _closed(self, link: str, *problem: str) -> Batch:
        return self.links.closed(link, " ".join(problem))

    def _accepted(self, peer: str, link: str, *words: str) -> Batch:
        return self.links.accepted(peer, link, split(words)[0])

    def _lose(self, peer: str, *words: str) -> Batch:
        return self.links.lose(peer, *split(words))

    def _joined(self, peer: str, *words: str) -> Batch:
        return self.links.joined(peer, split(words)[0])

    def _forget(self, peer: str) -> Batch:
        return self.links.forget(peer)

    def _listen(self, peer: str) -> Batch:
        return self.links.listen(peer, "listener")

    def _end(self, *problem: str) -> Batch:
        return self.links.end(" ".join(problem))

    def _answered(self, number: str, by: str = "") -> None:
        link = by.removeprefix("by=") or self.calls[int(number)].link
        if call := self.links.sent(int(number), link):
            assert self.links.answered(call, self.now)
            assert not self.links.answered(call, self.now)

    def _cancelled(self, number: str) -> Batch:
        return self.links.cancelled(self.calls[int(number)], self.now)

    def _written(self, number: str) -> None:
        self.calls[int(number)].written = True

    def _item(self, number: str) -> None:
        self.links.item(self.calls[int(number)])

    def _expect(self, number: str) -> None:
        self.links.expect(self.calls[int(number)], self.now)

    def _examined(self, *words: str) -> Batch:
        because = next((word.removeprefix("because=") for word in words if word.startswith("because=")), "")
        said = [word.partition(":running=") for word in words if word[0].isdigit()]
        running = [seconds_of(seconds) if seconds else None for _, _, seconds in said]
        calls = [self.calls[int(number)] for number, _, _ in said]
        examined = Examined(tuple(running), "served" in words, {}, (because,) * len(calls))
        return self.links.examined(calls, examined, self.now)

    def _unexamined(self, *numbers: str) -> Batch:
        return self.links.examined([self.calls[int(number)] for number in numbers], None, self.now)

    def _wait(self, seconds: str) -> Batch:
        self.now += seconds_of(seconds)
        return self.links.tick(self.now)


def play(script: str, patch: pytest.MonkeyPatch) -> str:
    """`script` with what its commands print."""
    world, blocks = World(patch), []
    for block in re.split(r"\n\s*\n", script.strip()):
        commands = block.partition("\n----")[0].splitlines()
        printed = [line for command in commands if not command.startswith("#") for line in world.run(command)]
        blocks.append("\n".join([*commands, "----", *printed]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = play(path.read_text(), monkeypatch)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(printed)
    assert printed == path.read_text()


def test_scripts_are_there() -> None:
    assert len(SCRIPTS) > 20
