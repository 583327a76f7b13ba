"""Subjects of `rolecall doctor` for tests, and a rank 0 for them: a tunnel with a coordinator's answers behind it."""

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
from rolecall.observe.doctor import command, diagnosis
from rolecall.observe.doctor.checks import Finding, examine
from rolecall.observe.doctor.subject import Subject
from rolecall.tunnel import places
from rolecall.tunnel.rank0 import DOCTOR_PATH
from tests.ports import free_ports
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import TOKEN, Tunnel

ROLES = (RoleSpec("lead", 1, 1, 1, False), RoleSpec("worker", 2, 1, 4, True))


def job(name: str = JOB) -> Description:
    return dataclasses.replace(describe.describe("rl"), name=name, target=name, roles=ROLES)


def subject(
    directory: Path, described: Description | None = None, parts: dict[str, Any] | None = None, **values: Any
) -> Subject:
    """A worker of the job, with settings and other parts as given."""
    given = {"job": JOB, "role": "worker", "ordinal": 0, "master_addr": "127.0.0.1", "bind_addr": "127.0.0.1",
             "job_token": TOKEN, "checkpoint_dir": directory} | values  # fmt: skip
    if "port" not in given:
        given["port"], given["metrics_port"] = free_ports(2)
    given = {name: value for name, value in given.items() if value is not None}
    return Subject(Settings(**given), described or job(), **{"timeout": 3.0, **(parts or {})})


def look(name: str, one: Subject) -> Finding:
    """The finding of the check called `name`."""
    (check,) = [check for checks in command.TOPICS.values() for check in checks if check.name == name]
    return examine(check, one)


class Lead:
    """Rank 0 of the job as a doctor sees it."""

    def __init__(self) -> None:
        self.port, self.other = free_ports(2)
        self.settings = Settings(job=JOB, job_token=TOKEN, port=self.port)
        self.answers: dict[str, Any] = {}  # replace what it would answer
        self.tunnel = Tunnel(RANK_0, self.port, self.port)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(self._app())
        self._do(self._start())

    def _app(self) -> web.Application:
        @web.middleware
        async def replace(request: web.Request, handler: Any) -> Any:
            answer = await handler(request)
            return web.json_response({**json.loads(answer.body), **self.answers})

        app = web.Application(middlewares=[replace])
        gang = {"state": "running", "missing": []}
        app.add_routes([web.get(DOCTOR_PATH, diagnosis.answer(job(), self.settings, lambda: gang))])
        return app

    async def _start(self) -> None:
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.tunnel.directory / places.COORDINATOR)).start()

    def _do(self, work: Any) -> None:
        """Runs it in the loop, which then goes on in a thread."""
        if not self._loop.is_running():
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def subject(self, directory: Path, **values: Any) -> Subject:
        """A worker that is to reach it."""
        return subject(directory, **{"master_port": self.port, **values})

    @contextlib.contextmanager
    def answering(self, **answers: Any) -> Iterator[None]:
        self.answers = answers
        try:
            yield
        finally:
            self.answers = {}

    def close(self) -> None:
        self._do(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.tunnel.close()
