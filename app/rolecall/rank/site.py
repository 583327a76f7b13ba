"""The page at rank 0's METRICS_PORT: what it shows now, as HTML, as JSON, and as a stream of server-sent events.

Like the metrics, it needs no authentication. Ranks are queried for statistics only while a client reads the page.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.gang.protocol import OVER, name_of
from rolecall.messages.queries import ReadStacks, ReadStats
from rolecall.observe import report
from rolecall.observe.page import render, state
from rolecall.observe.page.rates import Rates
from rolecall.observe.page.state import GangView, MemberView
from rolecall.observe.stacks import stack_report
from rolecall.rank import tasks
from rolecall.rank.coordinator import Coordinator

MAX_WATCHERS = 32
EVENT_SECONDS = 1.0  # seconds between two events
STATS_SECONDS = 2.0  # seconds between two questions for statistics, and until one has no answer
MAX_RANKS_PER_QUERY = 100  # ranks at a time: all at once would keep the coordinator from their heartbeats
CLOSE_SECONDS = 1.0  # seconds for watchers to take the last state
SEND_SECONDS = 5.0  # seconds for a watcher to take what was sent before
STACKS_SECONDS = 15.0  # seconds for all ranks' stacks
READER_SECONDS = 10.0  # seconds that a reader of the JSON counts as a watcher
Sections = dict[str, bytes]


class Site:
    """Serves one rank's page. Only rank 0's shows the gang, from `start` on."""

    def __init__(self, job: Description, settings: Settings, is_rank0: bool) -> None:
        self.job, self.settings, self._is_rank0 = job, settings, is_rank0
        self.coordinator: Coordinator | None = None
        self.rates = Rates()
        self._values = report.settings_of(settings, job.settings)
        self._watchers = set[asyncio.Task[None]]()
        self._interest = float("-inf")  # when somebody read the JSON
        self._asked = 0  # the place of the rank that is asked next
        self._sections: Sections = {}
        self._news = asyncio.Event()  # replaced with each new state
        self._loops = dict[str, asyncio.Task[None]]()
        self._closing = False
        self._shown, self._shown_at = dict[str, Any](), float("-inf")  # the newest state, and when it was made

    def start(self, coordinator: Coordinator) -> None:
        """Shows the gang of `coordinator`."""
        self.coordinator = coordinator

    async def stacks(self, only: list[str] | None) -> dict[str, str]:
        """The stacks of all ranks, or of those in `only`, as text, with who waits for whom."""
        assert self.coordinator is not None
        replies = await self.coordinator.queries.ask(ReadStacks(), timeout=STACKS_SECONDS)
        named = {name_of(key): reply for key, reply in replies.items()}
        return {"text": await asyncio.to_thread(stack_report.text, named, only)}

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        return [
            web.get("/", self._page),
            web.get("/page/state", self._state),
            web.get("/page/events", self._events, allow_head=False),
        ]

    async def close(self) -> None:
        """Sends watchers the last state, and ends their streams."""
        self._closing = True
        await tasks.cancel(self._loops.values())
        if self._watchers and self.coordinator:
            self._publish()
            await asyncio.wait(self._watchers, timeout=CLOSE_SECONDS)
        await tasks.cancel({*self._watchers})

    # ---- what it shows

    def state(self, now: float | None = None) -> dict[str, Any]:
        """What the page shows now. Only at rank 0, once there is a gang."""
        assert self.coordinator is not None
        gang, now = self.coordinator.gang, time.monotonic() if now is None else now
        members = {
            key: MemberView(member.heartbeat.worker, now - member.received_at, member.leaving, member.heartbeat.node)
            for key, member in gang.members.items()
        }
        view = GangView(
            gang.state,
            gang.reason,
            seconds=now - gang.since,
            missing=tuple(gang.missing(now)) if gang.state == "gathering" else (),
            number=gang.generation.number,
            ranks=gang.generation.keys,
            lost=dict(gang.generation.causes),
            joining=gang.joining,
            members=members,
        )
        history = self.coordinator.files.journal.history
        return state.of_gang(
            self.job,
            view,
            history,
            self.rates,
            settings=self._values,
            now=time.time(),
            summary=self.coordinator.files.summary,
        )

    def _shared(self) -> dict[str, Any]:
        """The state of the last second: repeated requests share one."""
        if time.monotonic() - self._shown_at >= EVENT_SECONDS:
            self._publish()
        return self._shown

    def final(self, summary: dict[str, Any]) -> dict[str, Any]:
        """What the page shows of the run that has ended as `summary` says."""
        return state.ended(self.state(), summary)

    def _publish(self) -> None:
        """Makes the state of this moment the newest one, and wakes the watchers."""
        self._shown, self._shown_at = self.state(), time.monotonic()
        self._sections = {name: json.dumps(value, allow_nan=False).encode() for name, value in self._shown.items()}
        news, self._news = self._news, asyncio.Event()
        news.set()

    @property
    def _watched(self) -> bool:
        return bool(self._watchers) or time.monotonic() - self._interest < READER_SECONDS

    def _begin(self) -> None:
        """Starts the loops, unless they run."""
        for loop in (self._publish_forever, self._ask_forever):
            task = self._loops.get(loop.__name__)
            if (task is None or task.done()) and not self._closing:
                task = self._loops[loop.__name__] = asyncio.create_task(loop())
                task.add_done_callback(self._stopped)

    def _stopped(self, loop: asyncio.Task[None]) -> None:
        """Logs why a loop has failed, and ends the streams: the pages ask again, and say so meanwhile."""
        if not loop.cancelled() and (error := loop.exception()):
            telemetry.log().error("the page stands still", problem=f"{type(error).__name__}: {error}")
            for watcher in self._watchers:
                watcher.cancel()

    async def _publish_forever(self) -> None:
        while self._watched:
            self._publish()
            await asyncio.sleep(EVENT_SECONDS)

    async def _ask_forever(self) -> None:
        assert self.coordinator is not None
        while self._watched:
            if self.coordinator.gang.state not in OVER:
                here = sorted(self.coordinator.gang.members)
                self._asked = self._asked if self._asked < len(here) else 0
                some = here[self._asked : self._asked + MAX_RANKS_PER_QUERY]
                self._asked += MAX_RANKS_PER_QUERY
                self.rates.take(
                    await self.coordinator.queries.ask(ReadStats(), to=some, timeout=STATS_SECONDS), set(here)
                )
            await asyncio.sleep(STATS_SECONDS)

    # ---- requests

    def _absent(self) -> web.Response | None:
        """The answer if there is nothing to show."""
        if not self._is_rank0:
            s = self.settings
            where = f"this is no rank 0; the page is at METRICS_PORT of {name_of((self.job.roles[0].name, 0))}"
            return web.Response(text=f"{where} (MASTER_ADDR={s.master_addr})\n", status=404)
        if self.coordinator is None:
            return web.Response(text="rank 0 is starting; try again\n", status=503, headers={"Retry-After": "2"})
        return None

    async def _page(self, _: web.Request) -> web.Response:
        if absent := self._absent():
            return absent
        return web.Response(
            text=render.live(self._shared()),
            content_type="text/html",
            charset="utf-8",
            headers=render.headers(),
        )

    async def _state(self, _: web.Request) -> web.Response:
        if absent := self._absent():
            return absent
        self._interest = time.monotonic()
        self._begin()
        return web.json_response(self._shared(), headers=render.HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if absent := self._absent():
            return absent
        if len(self._watchers) >= MAX_WATCHERS or self._closing:
            return web.Response(
                text=f"{MAX_WATCHERS} pages are open already\n", status=503, headers={"Retry-After": "10"}
            )
        response = web.StreamResponse(headers={**render.HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        task = asyncio.create_task(self._send(response))
        self._watchers.add(task)
        self._begin()
        try:
            await asyncio.wait({task})
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error
        except (ConnectionError, TimeoutError):  # it has gone, or does not read
            if request.transport is not None:
                request.transport.abort()
        finally:
            task.cancel()
            self._watchers.discard(task)
        return response

    async def _send(self, response: web.StreamResponse) -> None:
        """Sends a watcher the sections of the state that have changed since it was sent them, again and again."""
        sent: Sections = {}
        await response.write(b"retry: 2000\n\n")
        while True:
            news, closing = self._news, self._closing
            changed = {name: content for name, content in self._sections.items() if sent.get(name) != content}
            sent = self._sections
            if changed:
                data = b",".join(json.dumps(name).encode() + b":" + content for name, content in changed.items())
                async with asyncio.timeout(SEND_SECONDS):
                    await response.write(b"data: {" + data + b"}\n\n")
            if closing:
                return
            await news.wait()
