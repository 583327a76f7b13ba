"""Ranks over TLS: what listens where, a tunnel that ends, another token, and a network without IPv4."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from rolecall.tunnel import keys
from tests.integration.cluster import TOKEN, Cluster, Rank, until

MakeCluster = Callable[..., Cluster]


def listening(rank: Rank) -> dict[tuple[str, int], psutil.Process]:
    """Where a rank's processes listen, and which does."""
    everyone = [psutil.Process(rank.pid), *psutil.Process(rank.pid).children(recursive=True)]
    places = {}
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    places[one.laddr.ip, one.laddr.port] = process
    return places


def tunnel_of(rank: Rank) -> psutil.Process:
    port = int(rank.environment["PORT"])
    return next(process for (_, number), process in listening(rank).items() if number == port)


def test_nothing_but_two_ports_listens_outside_of_loopback(cluster: MakeCluster) -> None:
    job = cluster(JOB="hybrid", BIND_ADDR="", SERVERS="1").start(2)
    until(lambda: job.iterations() > 2, "training with RPC and gloo")
    for rank in job.ranks.values():
        places = listening(rank)
        outside = {port for address, port in places if not address.startswith("127.")}
        assert outside == {int(rank.environment[name]) for name in ("PORT", "METRICS_PORT")}
        until(lambda rank=rank: rank.metric("tunnel_connections") > 0, "the connections")
        until(lambda rank=rank: rank.metric("tunnel_bytes_total") > 10_000, "the bytes")


def test_a_rank_whose_tunnel_ends_says_so_and_is_started_again(kept: Cluster) -> None:
    rank, joins = kept.observer(1), kept.agent.metric("gang_joins_total")
    tunnel_of(rank).kill()
    assert rank.wait() == 1  # whoever started it starts it again
    assert rank.text().count("the tunnel has ended; this rank ends with it") == 1
    assert "Traceback" not in rank.text()
    rank.start()
    until(lambda: kept.agent.metric("gang_joins_total") > joins and kept.members() == 2, "both observers")
    kept.trains()


def test_another_token_is_a_rolling_restart_away(cluster: MakeCluster) -> None:
    job = cluster(CHECKPOINT_INTERVAL="0.2").start(1)
    until(job.first.appears("checkpoint file="), "a checkpoint")
    observer, fresh = job.observer(0), keys.new_token()
    observer.terminate()
    assert observer.wait() == 0
    observer.environment["JOB_TOKEN"] = fresh
    assert observer.start().wait() == 2  # rank 0 has the old one still
    assert "JOB_TOKEN does not match, or it is another job" in observer.text()
    step = job.iterations()
    job.agent.terminate()
    assert job.agent.wait() == 0
    job.agent.environment["JOB_TOKEN"] = fresh
    job.agent.start()
    observer.start()
    until(lambda: job.iterations() > step, "training with the new token, from where it was")
    assert not [token for token in (TOKEN, fresh) if token in job.logs()]


@pytest.fixture
def ipv6() -> Iterator[list[tuple[str, list[str]]]]:
    """Two network namespaces that are joined, with IPv6 alone: each one's address, and what a command begins with."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("namespaces take root and the program ip")
    names = [f"rolecall-{os.getpid()}-{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no namespaces: {error}")
    else:
        yield [(f"fd00::{number}", ["ip", "netns", "exec", name]) for number, name in enumerate(names, start=1)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def test_a_network_without_ipv4(cluster: MakeCluster, ipv6: list[tuple[str, list[str]]]) -> None:
    # its members need gloo beside RPC
    job = cluster(JOB="examples/allreduce.py", ROUNDS="4", BIND_ADDR="", MASTER_ADDR=ipv6[0][0], MASTER_PORT="29400")
    job.describe("examples/allreduce.py")
    for number, (role, ordinal) in enumerate([("lead", 0), ("member", 0), ("member", 1)]):
        rank = job.add(role, ordinal, PORT=str(29400 + number // 2), METRICS_PORT=str(8000 + number))
        rank.server, rank.prefix = None, ipv6[number % 2][1]
        rank.start()
    assert [rank.wait() for rank in job.ranks.values()] == [0, 0, 0]
    assert json.loads((job.checkpoints / "DONE").read_text())["total"] == 2 * (1 + 2 + 3 + 4)
