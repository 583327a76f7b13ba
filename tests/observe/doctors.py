"""Patients of `rolecall doctor` for tests, and a rank 0 for them: a tunnel with a coordinator's answers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.declare.describe import Description
from rolecall.gang.protocol import RoleSpec
from rolecall.launch.local import free_ports
from rolecall.observe.doctor import command, diagnosis
from rolecall.observe.doctor.checks import Finding, examine
from rolecall.observe.doctor.patient import Patient
from rolecall.tunnel import places
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import TOKEN, Tunnel

ROLES = (RoleSpec("lead", 1, 1, 1, False), RoleSpec("worker", 2, 1, 4, True))


def job(name: str = JOB) -> Description:
    return dataclasses.replace(describe.describe("rl"), name=name, target=name, roles=ROLES)


def patient(
    directory: Path, described: Description | None = None, parts: dict[str, Any] | None = None, **values: Any
) -> Patient:
    """A worker of the job, with settings and other parts as given; it waits for nothing and long for nobody."""
    given = {"job": JOB, "role": "worker", "ordinal": 0, "master_addr": "127.0.0.1", "bind_addr": "127.0.0.1",
             "job_token": TOKEN, "checkpoint_dir": directory} | values  # fmt: skip
    if "port" not in given:
        given["port"], given["metrics_port"] = free_ports(2)
    one = Patient(Settings(**given), described or job(), JOB, **{"timeout": 3.0, **(parts or {})})
    one.pause = lambda seconds: None
    return one


def look(name: str, one: Patient) -> Finding:
    """What the check called `name` finds."""
    (check,) = [check for check in command.CHECKS if check.name == name]
    return examine(check, one)


class Lead:
    """Rank 0 of the job as a doctor sees it."""

    def __init__(self, **values: Any) -> None:
        self.port, self.other = free_ports(2)
        self.settings = Settings(job=JOB, job_token=TOKEN, port=self.port, **values)
        self.gang: dict[str, Any] = {"state": "running", "missing": []}
        self.answers: dict[str, Any] = {}  # in the place of what it would say
        self.tunnel = Tunnel(RANK_0, self.port, self.port)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(self._app())
        self._do(self._start())

    def _app(self) -> web.Application:
        @web.middleware
        async def lie(request: web.Request, handler: Any) -> Any:
            answer = await handler(request)
            if self.answers and request.method == "GET":
                return web.json_response({**json.loads(answer.body), **self.answers})
            return answer

        app = web.Application(middlewares=[lie])
        diagnosis.serve(app, job(), self.settings, "", lambda: self.gang)
        return app

    async def _start(self) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.tunnel.directory / places.COORDINATOR)).start()

    def _do(self, work: Any) -> None:
        """Runs it in the loop, which then goes on in a thread."""
        if not self._loop.is_running():
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def patient(self, directory: Path, **values: Any) -> Patient:
        """A worker that is to reach it."""
        return patient(directory, **{"master_port": self.port, **values})

    @contextlib.contextmanager
    def saying(self, **answers: Any) -> Iterator[None]:
        self.answers = answers
        try:
            yield
        finally:
            self.answers = {}

    def close(self) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.tunnel.close()
