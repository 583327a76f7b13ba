"""`python -m rolecall.launch.lost_pods`, in a pod of k8s/lost-pods: lets go of ranks' pods that a dead node holds.

A StatefulSet, a Job or a JobSet waits for these until somebody deletes the Node, or marks it as out of service. Here
they count as failed and are deleted soon after they should have ended, and others replace them. Which nodes are dead is
Kubernetes's decision: it tells their pods to end. The gang refuses a rank that comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from rolecall import config
from rolecall.errors import USAGE, UsageError
from rolecall.launch.pod_states import Pod
from rolecall.launch.pods import Object

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where kubelet mounts a pod's token
# of all pods of ranks; the server answers from its memory
LISTED = {"labelSelector": "app.kubernetes.io/name=rolecall", "resourceVersion": "0"}
PERIOD_SECONDS = 5.0
REQUEST_SECONDS = 10.0


class ApiError(Exception):
    """What the API server has not done, in a line."""


class GoneError(ApiError):
    """There is no such pod, or another one of that name."""


@dataclass(frozen=True)
class Api:
    """The pods of a namespace at the API server, with the rights of a service account."""

    session: aiohttp.ClientSession
    url: str
    account: Path

    async def ask(self, method: str, path: str = "", content: str = "json", **given: Any) -> tuple[Object, datetime]:
        """The answer and the server's time. Raises ApiError."""
        what = f"{method} pods{path}"
        try:
            token = (self.account / "token").read_text().strip()  # kubelet replaces it
            headers = {"Authorization": f"Bearer {token}", "Content-Type": f"application/{content}"}
            async with self.session.request(method, self.url + path, headers=headers, **given) as answer:
                text = await answer.text()
                if answer.status != HTTPStatus.OK:
                    kind = GoneError if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT) else ApiError
                    raise kind(f"{what}: {answer.status} {_message(text)}")
                return json.loads(text), parsedate_to_datetime(answer.headers["Date"])
        except TimeoutError:
            raise ApiError(f"{what}: no answer within {REQUEST_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise ApiError(f"{what}: {type(error).__name__}: {error}") from error

    async def let_go(self, pod: Pod) -> None:
        """Has whatever made a pod replace it. Raises ApiError."""
        at_once = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        await self.ask("DELETE", f"/{pod.name}", data=json.dumps(at_once))
        # a Job's stays until it has failed; in this order, what is left of both is done at the next look
        failed = {"metadata": {"uid": pod.uid}, "status": {"phase": "Failed"}}
        with contextlib.suppress(GoneError):
            await self.ask("PATCH", f"/{pod.name}/status", "merge-patch+json", data=json.dumps(failed))


async def let_go(api: Api) -> None:
    """Lets go of the pods that are lost now. Raises ApiError, after it has tried all."""
    listed, now = await api.ask("GET", params=LISTED)
    problem: ApiError | None = None
    for pod in map(Pod, listed["items"]):
        if pod.is_lost_with_its_node(now):
            try:
                await api.let_go(pod)
                print(f"rolecall: {pod.host}: lost with its node; another pod replaces it", flush=True)
            except GoneError:  # between two requests
                continue
            except ApiError as error:
                problem = error
    if problem:
        raise problem


async def follow(host: str, account: Path) -> None:
    """Lets go of lost pods until it is cancelled. Raises UsageError if there is no service account."""
    with UsageError.wrap(f"{account}: no service account", OSError, advice="run this in a pod that has one"):
        namespace = (account / "namespace").read_text().strip()
        trusted = ssl.create_default_context(cafile=account / "ca.crt")
    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_SECONDS), aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        api = Api(session, f"https://{host}/api/v1/namespaces/{namespace}/pods", account)
        print(f"rolecall: lets go of lost pods in {namespace}", flush=True)
        before = ""
        while True:
            problem = ""
            try:
                await let_go(api)
            except ApiError as error:
                problem = str(error)
            if problem not in ("", before):
                print(f"rolecall: {problem}", flush=True)
            before = problem
            await asyncio.sleep(PERIOD_SECONDS)


def _message(text: str) -> str:
    """What an error of the API server says, in a line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["message"])
    return " ".join(text.split())[:500]


def main() -> int:
    """Runs until it is ended. Returns the exit code."""
    host, port = config.exported("KUBERNETES_SERVICE_HOST"), config.exported("KUBERNETES_SERVICE_PORT")
    try:
        if not host or not port:
            raise UsageError("KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT: are not set; run this in a pod")
        asyncio.run(follow(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ACCOUNT))
    except UsageError as error:
        print(f"rolecall: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
