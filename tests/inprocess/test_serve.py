"""examples/serve.py: a service, whose members are killed, drained and replaced under load."""

from __future__ import annotations

import contextlib
import json
import runpy
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from rolecall import Run
from rolecall.declare import describe
from tests.inprocess.jobs import summary_of
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
ROWS = json.dumps([[1.0, 2.0], [3.0, 4.0]]).encode()


class Load:
    """Clients that ask for predictions until they are stopped."""

    def __init__(self, port: int, clients: int = 4) -> None:
        self.url, self.answers, self.failures = f"http://127.0.0.1:{port}", list[Any](), list[Exception]()
        self._over = threading.Event()
        self._clients = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def request(self, path: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, data, timeout=30) as answer:
            return bytes(answer.read())

    def wait_ready(self, models: int = 3) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.request("/ready") == f"{models} models\n".encode():
                    return
            time.sleep(0.02)
        raise AssertionError("not ready")

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(json.loads(self.request("/predict", ROWS)))
            except Exception as error:
                self.failures.append(error)

    def __enter__(self) -> Load:
        self.wait_ready()
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(30)

    def wait_over(self) -> None:
        """Until the service accepts no connection."""
        deadline = time.monotonic() + 30
        while not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def more(self, count: int = 50) -> None:
        """Until `count` further requests are answered."""
        wanted, deadline = len(self.answers) + count, time.monotonic() + 30
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_no_request_fails_while_members_are_killed_replaced_and_scaled(tmp_path: Path) -> None:
    serve, port, loads = runpy.run_path(str(ROOT / "examples" / "serve.py")), free_ports(1)[0], list[Load]()
    problems = list[BaseException]()

    def hurt(run: Run) -> None:
        try:
            with Load(port) as load:
                loads.append(load)
                load.more()
                for name in ("model_0", "model_2"):
                    run.kill(name)
                    load.more()
                    load.wait_ready()
                for bad in (b"[[1, 2]", b"[[1, 2], [3]]", b'[["a", 2]]', b"3"):
                    with pytest.raises(HTTPError, match="400"):
                        load.request("/predict", bad)
                assert load.request("/predict", b"[]") == b"[]"
                assert load.request("/replace", b"") == b"3 replaced\n"
                for models in (5, 1):
                    run.scale("model", models)
                    load.wait_ready(models)
                    load.more()
                assert load.failures == []
                run.drain()
                load.wait_over()
        except BaseException as error:
            problems.append(error)
            run.drain()

    def started(run: Run) -> None:
        threading.Thread(target=hurt, args=(run,), daemon=True).start()

    assert not describe.of_job(serve["JOB"], serve["Serve"](), "serve").steps
    for _ in range(2):  # a later start goes on
        summary = summary_of(serve["JOB"], started, checkpoint_dir=tmp_path, http_port=port)
        assert (summary["state"], problems) == ("stopped", [])
        assert not any(isinstance(error, HTTPError) for error in loads[-1].failures)  # nobody listens
    assert {len(answer) for load in loads for answer in load.answers} == {2}
    assert summary["generations"] == 2
