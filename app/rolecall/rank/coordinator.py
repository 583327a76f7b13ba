"""The gang's coordinator, in rank 0's supervisor: HTTP on CONTROL_PORT, and CHECKPOINT_DIR behind `gang`.

One request registers a member, keeps its lease and brings its instructions: a member posts its heartbeat and the
directive that it knows, and is answered as soon as its directive differs from that one, or after a while with the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.gang import pump
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import Directive, Effect, Event, Heartbeat, RejectedError, Rules
from rolecall.job.describe import Description
from rolecall.rank import endpoints
from rolecall.rank.run_files import REPEAT, RunFiles

PATH = "/v1/heartbeat"
MAX_BODY = 64 * 1024  # bytes
TICK = 0.1  # seconds
MOST_REFUSED = 100  # refusals that are remembered, not to log them again at once


@dataclass(frozen=True)
class Request:
    """A member's request: its heartbeat, and the newest directive that it has received."""

    heartbeat: Heartbeat
    known: Directive | None = None


REQUESTS, DIRECTIVES = TypeAdapter(Request), TypeAdapter(Directive)


def rules(settings: Settings, steps: bool = True) -> Rules:
    """The gang's rules, as the settings have them; `steps` says whether the job reports steps."""
    s = settings
    return Rules(
        s.lease_seconds, s.join_grace, s.rejoin_interval, s.rejoin_timeout, s.drain_timeout, s.max_failures,
        phase_timeout=s.phase_timeout, max_restarts=s.max_restarts, progress_timeout=s.progress_timeout, steps=steps,
    )  # fmt: skip


class Coordinator:
    """Serves the gang of one job. `start` takes the run's directory and the port, `loops` keep it going."""

    def __init__(self, job: Description, settings: Settings, incarnation: str, node: str) -> None:
        self.job, self.settings = job, settings
        self.log = telemetry.log()
        self.files = RunFiles(job, settings, node)
        self.gang: Gang
        self._driver: pump.Pump
        self._effects = asyncio.Queue[Effect]()  # to be persisted
        self.metrics: Any = None
        self._incarnation = incarnation
        self._changed = asyncio.Event()  # replaced when it is set
        self._epoch = 0
        self._logged_at = float("-inf")
        self._refused: dict[str, float] = {}  # what was logged of late, and when
        self._runner: web.AppRunner | None = None

    async def start(self, metrics: Any) -> None:
        """Raises UsageError where the directory or the port cannot be used."""
        self.metrics = metrics
        metrics.checkpoint_interval_seconds.set(self.settings.checkpoint_interval)
        names = ",".join(role.name for role in self.job.roles)
        metrics.job_info.labels(self.job.score, self.job.unit, names).set(1)
        telemetry.begin(metrics.gang_restarts, telemetry.CAUSES)
        done = await self.files.open()
        last = self.files.persisted
        self.gang = Gang(
            self.job.roles, rules(self.settings, self.job.steps), self._incarnation, time.monotonic(), last.number,
            last.members, done, self.job.identity, self.job.agreement(self.settings), self.files.failed, last.budget,
        )  # fmt: skip
        self.files.resumed = self.gang.resumed
        self._driver = pump.Pump(self.gang, self._effects.put_nowait)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post(PATH, self._receive)
        # `cleanup` waits for handlers: one whose member has closed the connection must end
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=self.settings.lease_seconds, handler_cancellation=True
        )
        await self._runner.setup()
        await endpoints.listen(self._runner, self.settings.bind_addr, self.settings.control_port, "CONTROL_PORT")

    async def stop(self, ended: bool) -> None:
        """Closes the port and releases the directory; `ended` says that the run ended in order."""
        if self._runner:
            await self._runner.cleanup()
        await self.files.close(self.gang.budget if ended and self._runner else None)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that keep it going; its caller ends when one of them does."""
        return [self._tick_loop(), self._persist_loop(), self.files.journal.save_forever()]

    async def _tick_loop(self) -> None:
        while True:
            self._pump()
            await asyncio.sleep(TICK)

    async def _persist_loop(self) -> None:
        while True:
            on_disk = await self.files.persist(await self._effects.get())
            self._driver.written(on_disk, time.monotonic())
            if on_disk:  # otherwise the next tick tries again
                self._pump()

    def _pump(self) -> None:
        gang, now = self.gang, time.monotonic()
        self._driver.step(now)
        for event in gang.events:
            self._report_event(event)
        gang.events.clear()
        telemetry.one_hot(self.metrics.gang_state, telemetry.GANG_STATES, gang.state)
        for role in self.job.roles:
            members, registered, wanted = gang.counts(role.name, now)
            self.metrics.gang_members.labels(role.name).set(members)
            self.metrics.gang_registered.labels(role.name).set(registered)
            self.metrics.gang_wanted.labels(role.name).set(wanted)
        if gang.state == "gathering" and now - max(self._logged_at, gang.since) > REPEAT:
            self._logged_at = now
            self.log.info(
                "waiting", missing=", ".join(gang.missing(now)) or "the disk", deadline_s=self.settings.rejoin_timeout
            )
        if gang.epoch != self._epoch:
            self._epoch = gang.epoch
            self._changed.set()
            self._changed = asyncio.Event()

    def _report_event(self, event: Event) -> None:
        kind, details = event
        journal = self.files.journal
        match kind:
            case "generation":
                self.metrics.gang_generations.inc()
            case "stopped" | "lost":
                self.metrics.gang_restarts.labels(details["cause"]).inc()
                happened = journal.history.end_generation if kind == "stopped" else journal.history.lose_rank
                journal.add(happened(details["cause"]))
            case "finished" | "failed":
                journal.add(journal.history.end_generation(kind))
            case "recovered":
                self.metrics.recovery_seconds.observe(details["seconds"])
        if kind == "failed":
            self.log.error("gang failed", **telemetry.cause(details["reason"]))
        else:
            self.log.info(f"gang {kind}", **details)

    async def _receive(self, http_request: web.Request) -> web.Response:
        token = http_request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.settings.token and not hmac.compare_digest(token.encode(), self.settings.token.encode()):
            return self._refuse(401, "token", f"{http_request.remote}: JOB_TOKEN does not match")
        try:
            body = await asyncio.wait_for(http_request.text(), self.settings.lease_seconds)
            request = REQUESTS.validate_python(json.loads(body))
            received_at = time.monotonic()
            key = self.gang.receive(request.heartbeat, received_at)
        except ConnectionError:
            raise web.HTTPBadRequest from None  # the member closed the connection, to send something newer
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, "body", f"{http_request.remote}: more than {MAX_BODY} bytes")
        except (ValueError, TimeoutError):
            return self._refuse(400, "body", f"{http_request.remote}: no heartbeat of a rank")
        except RejectedError as error:
            return self._refuse(409, error.reason, f"{request.heartbeat.node}: {error}", str(error))
        self._pump()
        latest = pump.answer_by(self.gang, received_at)
        while (answer := pump.answer(self.gang, key, request.known, received_at, time.monotonic())) is None:
            if http_request.transport is None:
                raise web.HTTPBadRequest  # the member closed the connection before it could be noticed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), latest - time.monotonic())
        return web.json_response(asdict(answer))

    def _refuse(self, status: int, reason: str, message: str, text: str = "") -> web.Response:
        self.metrics.gang_refused.labels(reason).inc()
        now, repeated = time.monotonic(), self._refused.get(message, float("-inf"))
        if reason != "full" and now - repeated > REPEAT:
            self._refused = dict([*self._refused.items()][-MOST_REFUSED:]) | {message: now}
            self.log.warning("refused", reason=reason, problem=message)
        return web.json_response({"reason": reason, "text": text or message.partition(": ")[2]}, status=status)
