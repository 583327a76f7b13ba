"""The gang's coordinator, in rank 0's supervisor: an HTTP face on CONTROL_PORT, and the disk behind `gang`.

One request is registration, liveness and instruction at once: a member posts its report and the order that it knows,
and is answered as soon as its order differs from that one, or after a while with the same.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from rolecall import telemetry
from rolecall.config import Settings, UsageError
from rolecall.gang import protocol
from rolecall.gang.gang import OVER, Gang
from rolecall.gang.protocol import FAILED, Effect, Order, RejectedError, Report
from rolecall.job import registry
from rolecall.rank import endpoints
from rolecall.run import report, rundir
from rolecall.run.history import Journal, Note

PATH = "/v1/beat"
MAX_BODY = 64 * 1024
TICK = 0.1
SAY = 10.0  # seconds between two lines that say the same
_report = TypeAdapter(Report)


def order_json(order: Order) -> str:
    return json.dumps(asdict(order), sort_keys=True)


class Coordinator:
    """Serves the gang of one job. `start` takes the run's directory and the port, `loops` keep it going."""

    def __init__(
        self, job: str, settings: Settings, roles: tuple[protocol.Role, ...], incarnation: str, node: str
    ) -> None:
        self.job = job
        self.node = node
        self.settings = settings
        self.log = telemetry.log()
        self.metrics: Any = None
        self._roles = roles
        self._incarnation = incarnation
        self._wake = asyncio.Event()
        self._epoch = 0
        self._said = self._complained = float("-inf")
        self._persisted = rundir.Persisted()
        self._runner: web.AppRunner | None = None
        self._lock: rundir.Lock | None = None
        self._trained = False  # by this process

    async def start(self, metrics: Any) -> None:
        """Raises UsageError where the directory or the port cannot be had."""
        self.metrics = metrics
        metrics.checkpoint_interval_seconds.set(self.settings.checkpoint_interval)
        telemetry.begin(metrics.gang_restarts, telemetry.CAUSES)
        directory = self.settings.checkpoint_dir
        self._lock = rundir.lock(directory, rundir.COORDINATOR_LOCK, self.settings.lease_seconds)
        persisted = rundir.read_generation(directory)
        if persisted.job not in ("", self.job):
            raise UsageError(f"CHECKPOINT_DIR={directory}: holds a run of {persisted.job}, not of {self.job}")
        s = self.settings
        # this very rank, in the middle of its run, was killed and started again: that is no new start
        if not s.resume and persisted.node != self.node:
            persisted = self._start_anew(persisted)
        self.gang = Gang(
            self._roles,
            protocol.Rules(
                s.lease_seconds, s.join_grace, s.rejoin_interval, s.rejoin_timeout, s.drain_timeout, s.max_failures
            ),
            self._incarnation,
            time.monotonic(),
            persisted.number,
            persisted.members,
            rundir.read_done(directory),
        )
        if self.gang.state == "finished":
            self.log.info(
                "this job has finished already; RESUME=0 or another CHECKPOINT_DIR starts anew",
                directory=str(directory),
            )
        self.journal = Journal(directory)
        # a new run also finds out, before anyone trains, whether the directory can be written
        self._write_generation(persisted.number, persisted.members, must=persisted.number == 0 or not s.resume)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post(PATH, self._beat)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=s.lease_seconds)
        await self._runner.setup()
        await endpoints.listen(self._runner, s.bind_addr, s.control_port, "CONTROL_PORT")

    def _start_anew(self, earlier: rundir.Persisted) -> rundir.Persisted:
        """Move an earlier run's files aside; the next shares nothing with it but the numbers, which never repeat."""
        directory = self.settings.checkpoint_dir
        try:
            rundir.write_generation(directory, earlier)  # the checkpoints' names, which tell the number too, are to go
        except OSError as error:
            raise UsageError(f"CHECKPOINT_DIR={directory}: cannot be written ({error.strerror})") from error
        aside = rundir.set_aside(directory, earlier.number, self.settings.lease_seconds)
        if aside:
            self.log.info("starting anew; an earlier run's checkpoints were moved", to=str(aside))
        return rundir.Persisted(earlier.number, self.job)

    async def settled(self) -> None:
        """Return when the job is over and every member has heard so, or had the time to."""
        while not self.gang.settled(time.monotonic()):
            await asyncio.wait([asyncio.create_task(self._wake.wait())], timeout=TICK)

    def note(self, notes: list[Note]) -> None:
        """Take what rank 0's worker tells for the run's history."""
        self._trained = True
        self.journal.add(self.journal.history.note(notes))

    async def report(self, code: int) -> None:
        """The run is over here, with exit code `code`: leave its summary and picture beside the checkpoints. Whatever
        goes wrong is a warning: the job's end stays what it is.
        """
        gang, history, directory = self.gang, self.journal.history, self.settings.checkpoint_dir
        over = gang.state in OVER
        # not of what was refused, interrupted in its drain, or finished and reported before
        due = self._trained or (over and not (directory / rundir.SUMMARY).exists())
        if not due or code not in (0, FAILED) or (code and not over) or not (history.generations or code):
            return
        state = gang.state if over else "stopped"
        reason = gang.reason if state == "failed" else ""
        problem, missing = "", rundir.SUMMARY
        try:
            self.journal.add(history.close())
            await self.journal.save()
            found = report.summary(self.job, self.settings, registry.get(self.job).watch, history, state, reason,
                                   gang.generation.members, gang.summary, time.time())  # fmt: skip
            await asyncio.to_thread(report.write, directory, found)
            missing = rundir.CURVE
            problem = await report.draw(directory)
        except Exception as error:  # of whatever kind
            problem = str(error) or type(error).__name__
        if problem:
            self.log.warning("no report of this run", missing=missing, directory=str(directory), problem=problem)
        else:
            self.log.info("report", summary=rundir.SUMMARY, picture=rundir.CURVE)

    async def stop(self, ended: bool) -> None:
        """`ended` says that the run ended in order; what is started next here is another."""
        if self._runner:
            await self._runner.cleanup()
            if ended:
                self.node = ""
                self._write_generation(self._persisted.number, self._persisted.members)
        if self._lock:
            self._lock.release()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What keeps it going; its caller ends when one of them does."""
        return [self._tick_forever(), self.journal.keep()]

    async def _tick_forever(self) -> None:
        """Move the gang on with the time."""
        while True:
            self._pump()
            await asyncio.sleep(TICK)

    def _pump(self) -> None:
        gang, now = self.gang, time.monotonic()
        while (effect := gang.tick(now)) is not None:
            if not self._make(effect):
                break  # the next tick tries again
            gang.confirm(effect, now)
        for kind, details in gang.events:
            self._tell(kind, details)
        gang.events.clear()
        telemetry.one_hot(self.metrics.gang_state, telemetry.GANG_STATES, gang.state)
        for role in self._roles:
            members, registered, wanted = gang.counts(role.name, now)
            self.metrics.gang_members.labels(role.name).set(members)
            self.metrics.gang_registered.labels(role.name).set(registered)
            self.metrics.gang_wanted.labels(role.name).set(wanted)
        if gang.state == "gathering" and now - max(self._said, gang.since) > SAY:
            self._said = now
            self.log.info("waiting", missing=", ".join(gang.missing(now)), deadline_s=self.settings.rejoin_timeout)
        if gang.epoch != self._epoch:
            self._epoch = gang.epoch
            self._wake.set()
            self._wake = asyncio.Event()

    def _make(self, effect: Effect) -> bool:
        """Whether the gang may go on: a number that is not on disk could be used twice."""
        if effect.kind == "begin":
            return self._write_generation(effect.generation, effect.members)
        try:
            rundir.write_done(self.settings.checkpoint_dir, effect.summary)
        except OSError as error:
            self.log.error("DONE cannot be written; a restart would train on", problem=error.strerror)
        return True

    def _write_generation(self, number: int, members: tuple[protocol.Key, ...], must: bool = False) -> bool:
        directory = self.settings.checkpoint_dir
        persisted = rundir.Persisted(number, self.job, members, self.node)
        try:
            rundir.write_generation(directory, persisted)
        except OSError as error:
            if must:
                raise UsageError(f"CHECKPOINT_DIR={directory}: cannot be written ({error.strerror})") from error
            if time.monotonic() - self._complained > SAY:
                self._complained = time.monotonic()
                self.log.error("no generation can start: its number cannot be written to CHECKPOINT_DIR",
                               directory=str(directory), problem=error.strerror)  # fmt: skip
            return False
        self._persisted = persisted
        return True

    def _tell(self, kind: str, details: dict[str, Any]) -> None:
        history = self.journal.history
        match kind:
            case "generation":
                self.metrics.gang_generations.inc()
            case "stopped" | "lost":
                self.metrics.gang_restarts.labels(details["cause"]).inc()
                happened = history.ended if kind == "stopped" else history.went
                self.journal.add(happened(details["cause"]))
            case "finished" | "failed":
                self.journal.add(history.ended(kind))
            case "recovered":
                self.metrics.recovery_seconds.observe(details["seconds"])
        if kind == "failed":
            self.log.error("gang failed", **telemetry.cause(details["reason"]))
        else:
            self.log.info(f"gang {kind}", **details)

    async def _beat(self, request: web.Request) -> web.Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.settings.token and not hmac.compare_digest(token.encode(), self.settings.token.encode()):
            return self._refuse(401, "token", f"{request.remote}: JOB_TOKEN does not match")
        try:
            body = json.loads(await asyncio.wait_for(request.text(), self.settings.lease_seconds))
            report, known = _report.validate_python(body["report"]), str(body["known"])
            key = self.gang.beat(report, time.monotonic())
        except ConnectionError:
            raise web.HTTPBadRequest from None  # the member hung up, to say something newer
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, "body", f"{request.remote}: more than {MAX_BODY} bytes")
        except (ValueError, TypeError, KeyError, ValidationError, TimeoutError):
            return self._refuse(400, "body", f"{request.remote}: no report of a rank")
        except RejectedError as error:
            return self._refuse(409, error.reason, f"{report.node}: {error}", str(error))
        self._pump()
        end = time.monotonic() + self.settings.lease_seconds / 6
        while (answer := order_json(self.gang.order(key))) == known and (left := end - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._wake.wait(), left)
            except TimeoutError:
                break
        return web.json_response(text=answer)

    def _refuse(self, status: int, reason: str, message: str, text: str = "") -> web.Response:
        self.metrics.gang_refused.labels(reason).inc()
        if reason != "full":
            self.log.warning("refused", reason=reason, problem=message)
        return web.json_response({"reason": reason, "text": text or message.partition(": ")[2]}, status=status)
