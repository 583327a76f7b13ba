"""What lets go of pods on dead nodes, against an API server for tests, by TLS."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.serialization import Encoding

from rolecall.errors import USAGE
from rolecall.launch import lost_pods
from rolecall.tunnel import keys
from tests.loops import in_a_loop
from tests.ports import free_ports
from tests.tunnel.tunnels import TOKEN

DEADLINE = 30.0
NOW = datetime.now(UTC) + timedelta(days=3)  # at the server, whose clock is another one
TAINT, DRAIN = "DeletionByTaintManager", "EvictionByEvictionAPI"
FINALIZER = "batch.kubernetes.io/job-tracking"
PODS = "/api/v1/namespaces/team/pods"


def pod(name: str, late: float | None = None, reason: str = TAINT, phase: str = "Running", **metadata: Any) -> Any:
    """A pod that should have ended `late` seconds ago, if it was told to end."""
    if late is not None:
        metadata["deletionTimestamp"] = (NOW - timedelta(seconds=late)).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}] if late is not None else []
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", **metadata},
        "spec": {"nodeName": "node1"},
        "status": {"phase": phase, "conditions": conditions},
    }


class Server:
    """The pods of a namespace. One with a finalizer is deleted once it has failed, as its Job has it."""

    def __init__(self, *given: Any) -> None:
        self.pods = {each["metadata"]["name"]: each for each in given}
        self.token = "a-token"
        self.faults = list[str]()  # of the next requests
        self.looks = 0

    @contextlib.asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[str]:
        """Its address. `folder` gets what kubelet mounts."""
        authority = keys.derive_authority(TOKEN, "cluster")
        (folder / "ca.crt").write_bytes(authority[1].public_bytes(Encoding.PEM))
        (folder / "own").write_bytes(keys.pem(*keys.issue(*authority, "localhost")))
        (folder / "namespace").write_text("team")
        (folder / "token").write_text(f"{self.token}\n")
        context = lost_pods.ssl.create_default_context(lost_pods.ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "own")
        app = web.Application(middlewares=[self.answer])
        app.add_routes([web.get(PODS, self.list)])
        app.add_routes([web.patch(PODS + "/{name}/status", self.patch), web.delete(PODS + "/{name}", self.delete)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        (port,) = free_ports(1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        try:
            yield f"localhost:{port}"
        finally:
            await runner.cleanup()

    @web.middleware
    async def answer(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "silent":
            await asyncio.sleep(DEADLINE)
        if fault == "broken":
            return web.Response(text="no JSON")
        status, given = 403, {"message": "pods is forbidden"}
        if request.headers["Authorization"] == f"Bearer {self.token}" and not fault:
            status, given = await handler(request)
        return web.json_response(given, status=status, headers={"Date": format_datetime(NOW, usegmt=True)})

    async def list(self, request: web.Request) -> tuple[int, Any]:
        assert request.query["labelSelector"] == "app.kubernetes.io/name=rolecall"
        self.looks += 1
        return 200, {"items": [*copy.deepcopy(self.pods).values()]}

    def find(self, request: web.Request, uid: str) -> tuple[int, Any]:
        found = self.pods.get(request.match_info["name"])
        if found is None or found["metadata"].get("real", uid) != uid:
            return (409 if found else 404), {"message": "no such pod"}
        return 200, found

    async def patch(self, request: web.Request) -> tuple[int, Any]:
        given = await request.json()
        status, found = self.find(request, given["metadata"]["uid"])
        if status == 200:
            found["status"] |= given["status"]
            if found["metadata"].get("deletionGracePeriodSeconds") == 0:
                del self.pods[found["metadata"]["name"]]
        return status, found

    async def delete(self, request: web.Request) -> tuple[int, Any]:
        given = await request.json()
        status, found = self.find(request, given["preconditions"]["uid"])
        if status == 200:
            found["metadata"]["deletionGracePeriodSeconds"] = given["gracePeriodSeconds"]
            if not found["metadata"].get("finalizers"):
                del self.pods[found["metadata"]["name"]]
        return status, found


@contextlib.asynccontextmanager
async def following(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(lost_pods, "PERIOD_SECONDS", 0.02)
    async with server.serving(folder) as host:
        task = asyncio.create_task(lost_pods.follow(host, folder))
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


@in_a_loop
async def test_pods_of_a_dead_node_go_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stay = [
        pod("well"),
        pod("ending", -10),
        pod("late", 10),  # its node has 15 s to say that it has ended
        pod("drained", 100, DRAIN),  # from a node that may be well
        pod("failed", 100, phase="Failed", finalizers=[FINALIZER]),
        pod("replaced", 100, real="uid-another"),
    ]
    lost = [pod("observer-0", 20), pod("rl-agent-0-x", 20, finalizers=[FINALIZER])]
    server = Server(*stay[:3], *lost, *stay[3:])
    async with following(server, tmp_path, monkeypatch):
        await until(lambda: len(server.pods) == len(stay))
        looks = server.looks
        await until(lambda: server.looks > looks + 2)
    assert list(server.pods) == [each["metadata"]["name"] for each in stay]
    assert {each["status"]["phase"] for each in stay if each["metadata"]["name"] != "failed"} == {"Running"}


@in_a_loop
async def test_it_says_what_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, said = Server(pod("observer-0", 20)), list[str]()

    def lines() -> list[str]:
        said.append(capsys.readouterr().out)
        return "".join(said).splitlines()

    async with following(server, tmp_path, monkeypatch):
        await until(lambda: len(lines()) > 1)
    assert lines() == [
        "rolecall: lets go of lost pods in team",
        "rolecall: observer-0@node1: lost with its node; another pod replaces it",
    ]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (["refused"] * 2, "GET pods: 403 pods is forbidden"),
        (["broken"] * 2, "GET pods: JSONDecodeError: "),
        (["silent"] * 2, "GET pods: no answer within 0.3 s"),
        (["", "refused"], "DELETE pods/observer-0: 403 pods is forbidden"),  # the other pod goes
        (["", "", "silent"], "PATCH pods/observer-0/status: no answer within 0.3 s"),
    ],
)
@in_a_loop
async def test_it_goes_on_when_the_server_answers_again(
    faults: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "silent" in faults:
        monkeypatch.setattr(lost_pods, "REQUEST_SECONDS", 0.3)
    server = Server(pod("observer-0", 20, finalizers=[FINALIZER]), pod("observer-1", 20))
    server.faults = [*faults]
    async with following(server, tmp_path, monkeypatch):
        await until(lambda: not server.pods)
    lines = [line for line in capsys.readouterr().out.splitlines() if said in line]
    assert len(lines) == 1 or "silent" in faults  # the same problem twice is one line
    assert lines


@in_a_loop
async def test_a_token_that_kubelet_has_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(pod("observer-0"))
    async with following(server, tmp_path, monkeypatch):
        server.token = "another-token"
        (tmp_path / "token").write_text(server.token)
        server.pods = {"observer-1": pod("observer-1", 20)}
        await until(lambda: not server.pods)


@pytest.mark.parametrize("host", ["", "10.96.0.1"])
def test_outside_of_a_pod_it_is_a_line(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(lost_pods, "ACCOUNT", tmp_path)
    assert lost_pods.main() == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rolecall: {tmp_path}: no service account" if host else "rolecall: KUBERNETES_SERVICE_HOST")
