"""The gang's coordinator, in rank 0's supervisor: HTTP behind rank 0's tunnel, and CHECKPOINT_DIR behind `gang`.

One request registers a member, keeps its lease and brings its instructions: a member posts its heartbeat, or the number
of the one that still holds, and names the directive that it knows. It is answered as soon as its directive is another,
or after a while that it is the same. A beat that changes nothing costs the same at any number of members.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from rolecall import telemetry
from rolecall.config import Settings
from rolecall.declare.describe import Description
from rolecall.gang.gang import Gang
from rolecall.gang.protocol import OVER, Answer, Batch, Beat, Effect, Event, Key, RejectedError, Reply, Rules
from rolecall.messages.codec import decode, encode
from rolecall.observe.doctor import diagnosis
from rolecall.rank import endpoints, queries, tasks
from rolecall.rank.port import Handler
from rolecall.rank.run_files import LOG_REPEAT_SECONDS, RunFiles
from rolecall.tunnel import keys
from rolecall.tunnel.rank0 import (
    CONTENT_TYPE,
    DOCTOR_PATH,
    HEARTBEAT_PATH,
    KEEPALIVE_SECONDS,
    REPLY_PATH,
)

MAX_BODY_BYTES = 64 * 1024
TICK_REST_FACTOR = 4.0  # times as long as a tick took, until what is reported meanwhile makes the next one
MAX_REFUSALS_REMEMBERED = 100  # so that a repeated one is not logged at once


def rules(settings: Settings, steps: bool = True) -> Rules:
    """The gang's rules, as the settings have them; `steps` says whether the job reports steps."""
    s = settings
    return Rules(
        lease=s.lease_seconds,
        join_grace=s.join_grace,
        rejoin_interval=s.rejoin_interval,
        rejoin_timeout=s.rejoin_timeout,
        drain_timeout=s.drain_timeout,
        max_failures=s.max_failures,
        phase_timeout=s.phase_timeout,
        max_restarts=s.max_restarts,
        progress_timeout=s.progress_timeout,
        steps=steps,
    )


class Coordinator:
    """Serves the gang of one job, at the Unix `socket` that the tunnel leads to; without one, with TLS=off, on PORT.
    `start` takes the run's directory and the port, `loops` keep it going. `settled` is called, again and again, once
    the job is over and no member needs this rank."""

    members_outlive_it = True  # so the next one waits for those of the last generation

    def __init__(
        self,
        job: Description,
        settings: Settings,
        incarnation: str,
        node: str,
        socket: Path | None = None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.job, self.settings, self._socket = job, settings, socket
        self._badge = keys.badge(settings.token, job.name) if settings.token and not socket else ""
        self.log = telemetry.log()
        self.files = RunFiles(job, settings, node)
        self.gang: Gang
        self._effects = asyncio.Queue[Effect]()  # to be persisted
        self.rules = rules(settings, job.steps)
        self._started = False
        self.metrics: Any = None
        self._incarnation = incarnation
        self._settled = settled
        self._requests: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._timer = tasks.Timer()
        self.queries = queries.Queries(lambda: self.gang.members, lambda key: self._perform(self.gang.wake(key)))
        self._refused: dict[str, float] = {}  # what was logged of late, and when
        self._runner: web.AppRunner | None = None

    async def start(self, metrics: Any) -> None:
        """Raises UsageError if the directory or the port cannot be used."""
        self.metrics = metrics
        metrics.checkpoint_interval_seconds.set(self.settings.checkpoint_interval)
        names = ",".join(role.name for role in self.job.roles)
        metrics.job_info.labels(self.job.score, self.job.unit, names).set(1)
        telemetry.init_labels(metrics.gang_restarts, telemetry.CAUSES)
        done = await self.files.open()
        last = self.files.persisted
        self.gang = Gang(
            self.job.roles,
            self.rules,
            self._incarnation,
            time.monotonic(),
            last=last.number,
            previous=last.members if self.members_outlive_it else (),
            done=done,
            job=self.job.identity,
            settings=self.job.agreement(self.settings),
            failed=self.files.failed,
            budget=last.budget,
            checking=True,
        )
        self.files.journal.started = self._begun
        self._started = True
        await self._serve()

    async def _serve(self) -> None:
        """Takes members' requests."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.middlewares.append(self._require_badge)
        app.add_routes([web.post(HEARTBEAT_PATH, self._receive), web.post(REPLY_PATH, self.queries.receive)])
        app.add_routes([web.get(DOCTOR_PATH, diagnosis.answer(self.job, self.settings, self._state))])
        # `cleanup` waits for handlers: one whose member has closed the connection must end
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=2 * KEEPALIVE_SECONDS, handler_cancellation=True
        )
        await self._runner.setup()
        if self._socket:
            await web.UnixSite(self._runner, str(self._socket), backlog=1024).start()
        else:
            await endpoints.listen(self._runner, self.settings.bind_addr, self.settings.port, "PORT")

    def checked(self) -> None:
        """Rank 0 has checked the settings. Until then members are answered, and wait."""
        self._perform(self.gang.checked(time.monotonic()))

    def crashed(self, key: Key) -> None:
        """The process of the rank `key` has exited."""
        self._perform(self.gang.crashed(key, time.monotonic()))

    def _begun(self, step: int) -> None:
        """Rank 0's worker trains on after `step`."""
        self.gang.resumed(step)
        self.files.sinks.start(self.files.journal.size or 0)

    def over(self) -> bool:
        """Whether the job is over."""
        return self.gang.state in OVER

    def _state(self) -> dict[str, Any]:
        """For a doctor."""
        return {"state": self.gang.state, "missing": self.gang.missing(time.monotonic())}

    async def stop(self, ended: bool) -> None:
        """Closes the port and releases the directory; `ended` says that the run ended in order."""
        if self._started:
            self._perform(self.gang.close())  # `cleanup` waits for requests
        if self._runner:
            await self._runner.cleanup()
        await self.files.close(self.gang.budget if ended and self._started else None)

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """The coroutines that keep it going; its caller ends when one of them does."""
        return [self._tick_loop(), self._persist_loop(), self.files.journal.save_forever(), self.files.watch_lock()]

    async def _tick_loop(self) -> None:
        while True:
            await self._timer.wait()
            began = time.monotonic()
            self._perform(self.gang.tick(began))
            await asyncio.sleep(min(TICK_REST_FACTOR * (time.monotonic() - began), self.gang.rules.tick))

    async def _persist_loop(self) -> None:
        while True:
            on_disk = await self.files.persist(await self._effects.get())
            self._perform(self.gang.written(on_disk, time.monotonic()))

    def _perform(self, batch: Batch) -> None:
        """Does what `batch` says."""
        for reply in batch.replies:
            request = self._requests.get(reply.number)
            if request and not request.done():  # otherwise its member has closed the connection
                request.set_result(reply)
        if batch.effect:
            self._effects.put_nowait(batch.effect)
        for event in batch.events:
            self._report_event(event)
        if batch.settled:
            self._settled()
        self._timer.set(batch.deadline)

    def refresh(self) -> None:
        """Brings the gang's metrics up to date."""
        gang, now = self.gang, time.monotonic()
        telemetry.one_hot(self.metrics.gang_state, telemetry.GANG_STATES, gang.state)
        for role in self.job.roles:
            members, registered, wanted = gang.counts(role.name, now)
            self.metrics.gang_members.labels(role.name).set(members)
            self.metrics.gang_registered.labels(role.name).set(registered)
            self.metrics.gang_wanted.labels(role.name).set(wanted)

    def _report_event(self, event: Event) -> None:
        journal, number = self.files.journal, self.gang.generation.number
        match event.kind:
            case "generation":
                self.metrics.gang_generations.inc()
                self.metrics.gang_stays.inc(event.stayed)
                journal.happened("stayed", number, count=event.stayed)
            case "joined":
                self.metrics.gang_joins.inc(len(event.joins))
                for seconds in event.joins:
                    self.metrics.gang_join_seconds.observe(seconds)
                journal.happened("joined", number, reason=event.members, count=len(event.joins))
            case "stopped":
                self.metrics.gang_restarts.labels(event.cause).inc()
                journal.happened("ended", number, event.cause, event.reason)
            case "lost":
                self.metrics.gang_restarts.labels(event.cause).inc()
                journal.happened("lost", number, event.cause, event.reason)
            case "finished" | "failed":
                journal.happened("ended", number, event.kind, event.reason)
            case "recovered":
                self.metrics.recovery_seconds.observe(event.seconds)
                journal.stalled("ended", event.seconds)
        if event.kind == "waiting":
            self.log.info("waiting", missing=event.reason, deadline_s=self.settings.rejoin_timeout)
        elif event.kind == "failed":
            self.log.error("gang failed", **telemetry.cause(event.reason))
        elif event.kind == "given up":
            self.log.warning(
                "a rank is given up, as its role's `restarts` says; the run goes on without it",
                **telemetry.cause(event.reason),
            )
        else:
            self.log.info(f"gang {event.kind}", **event.summary, **event.details())

    @web.middleware
    async def _require_badge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """With TLS=off, refuses a request without the badge."""
        badge = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._badge and not hmac.compare_digest(badge.encode(), self._badge.encode()):
            return self._refuse(401, "token", f"{request.remote}: JOB_TOKEN does not match")
        return await handler(request)

    async def _receive(self, http_request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self.settings.lease_seconds):
                body = await http_request.read()
            beat: Beat = decode(Beat, body)
        except ConnectionError:
            raise web.HTTPBadRequest from None  # the member closed the connection, to send something newer
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, "body", f"{http_request.remote}: more than {MAX_BODY_BYTES} bytes")
        except (ValueError, TimeoutError):
            return self._refuse(400, "body", f"{http_request.remote}: no heartbeat of a rank")
        try:
            answer = await self.exchange(beat, lambda: http_request.transport is None)
        except RejectedError as error:
            node = beat.heartbeat.node if beat.heartbeat else ""
            return self._refuse(409, error.reason, f"{node}: {error}", str(error))
        return web.Response(body=encode(answer), content_type=CONTENT_TYPE)

    async def exchange(self, beat: Beat, has_gone: Callable[[], bool] = lambda: False) -> Answer:
        """Takes a member's `beat`. Returns the answer, perhaps after a while, unless the member `has_gone`. Raises
        RejectedError."""
        number = next(self._numbers)
        replied = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._perform(self.gang.receive(number, beat, time.monotonic()))
            if has_gone() and not replied.done():
                raise web.HTTPBadRequest  # the member closed the connection before it could be noticed
            reply = await replied
        finally:
            del self._requests[number]
        if isinstance(reply.answer, RejectedError):
            raise reply.answer
        answer: Answer = reply.answer
        if reply.key and (due := self.queries.due(reply.key)):
            answer = replace(answer, queries=due)
        return answer

    def _refuse(self, status: int, reason: str, message: str, text: str = "") -> web.Response:
        self.metrics.gang_refused.labels(reason).inc()
        now, repeated = time.monotonic(), self._refused.get(message, float("-inf"))
        if reason != "full" and now - repeated > LOG_REPEAT_SECONDS:
            self._refused = dict([*self._refused.items()][-MAX_REFUSALS_REMEMBERED:]) | {message: now}
            self.log.warning("refused", reason=reason, problem=message)
        return web.json_response({"reason": reason, "text": text or message.partition(": ")[2]}, status=status)
