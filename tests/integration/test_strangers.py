"""Whoever knocks on the gang's port: refused with a line and a counter; the gang does not notice. And addresses and
ports that are not what they should be."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable

import pytest

from rolecall.declare import describe
from rolecall.messages.codec import encode
from rolecall.rank.coordinator import MAX_BODY_BYTES
from rolecall.tunnel import keys
from rolecall.tunnel.rank0 import HEARTBEAT_PATH
from tests.integration.cluster import TOKEN, Cluster
from tests.ports import free_ports

MakeCluster = Callable[..., Cluster]
JOB = describe.describe("rl").identity
HEARTBEAT = {"role": "observer", "ordinal": 0, "incarnation": "stranger", "sequence": 1, "job": JOB}


def post(job: Cluster, body: bytes, path: str = HEARTBEAT_PATH) -> tuple[int, str]:
    """Status and text of a request to the gang's port."""
    connection = http.client.HTTPConnection("127.0.0.1", int(job.settings["MASTER_PORT"]), timeout=30)
    try:
        badge = keys.badge(TOKEN, "rl")
        connection.request("POST", path, body, {"Authorization": f"Bearer {badge}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def heartbeat(**changes: object) -> bytes:
    return encode({"incarnation": "stranger", "sequence": 1, "heartbeat": {**HEARTBEAT, **changes}})


REFUSED: tuple[tuple[str, dict[str, object], str], ...] = (
    ("ordinal", {"ordinal": 64}, "observer has ordinals 0 to 63, not 64"),
    ("role", {"role": "judge"}, "no role 'judge'"),
    ("rank0", {"role": "agent"}, "agent_0 is running already"),
    (
        "job",
        {"job": "ps (0)"},
        f"this rank is of ps (0), rank 0 of {JOB}; give every rank the same JOB and files",
    ),
)


def test_strangers_are_refused_and_the_gang_does_not_notice(cluster: MakeCluster) -> None:
    job = cluster(REJOIN_INTERVAL="3600", TLS="off").start(1)  # otherwise none gets as far as this
    job.trains()
    generation = job.agent.metric("generation")

    assert post(job, b"x" * (MAX_BODY_BYTES + 1))[0] == 413
    wrong = ({"heartbeat": {}}, None, {"incarnation": 1})
    garbage = (b"", b"{", *map(encode, wrong), heartbeat(sequence="many"), heartbeat(sequence=None), b"\0" * 100)
    assert [post(job, body)[0] for body in garbage] == [400] * len(garbage)
    assert post(job, heartbeat(), path="/v1/else")[0] == 404
    assert job.agent.metric("gang_refused_total", reason="body") == 1 + len(garbage)
    for reason, changes, problem in REFUSED:
        status, text = post(job, heartbeat(**changes))
        assert (status, problem in text) == (409, True), text
        assert job.agent.metric("gang_refused_total", reason=reason) == 1
    # equal refusals are logged once in a while
    assert len(set(re.findall(r"refused .* problem=(.*?) reason=\w+", job.agent.text()))) == 2 + len(REFUSED)
    job.trains()
    assert job.agent.metric("generation") == generation
    assert job.members() == 1
    assert "Traceback" not in job.agent.text()


@pytest.mark.parametrize(("variable", "role"), [("METRICS_PORT", "observer"), ("MASTER_PORT", "agent")])
def test_a_port_that_is_taken(cluster: MakeCluster, variable: str, role: str) -> None:
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        job = cluster(OBSERVERS="1", CONNECT_TIMEOUT="3")
        agent = job.add("agent", 0, **({variable: str(port)} if role == "agent" else {})).start()
        observer = job.add("observer", 0, **({variable: str(port)} if role == "observer" else {})).start()
        rank = agent if role == "agent" else observer
        assert rank.wait() == 2
        named = variable.removeprefix("MASTER_")
        line = f"{named}={port}: cannot listen on it at 127.0.0.1 (Address already in use); choose another"
        assert line in rank.text()
        assert "Traceback" not in rank.text()


def test_a_name_that_does_not_resolve_is_waited_for_and_said(cluster: MakeCluster) -> None:
    job = cluster(MASTER_ADDR="nobody.invalid", REJOIN_TIMEOUT="3")
    rank = job.add("observer", 0).start()
    assert rank.wait() == 2
    lines = rank.text().splitlines()
    assert "rank 0 cannot be reached, retrying" in lines[0]
    assert "address=nobody.invalid:" in lines[0]
    assert "MASTER_ADDR=nobody.invalid" in lines[-1]
    assert len(lines) == 2
