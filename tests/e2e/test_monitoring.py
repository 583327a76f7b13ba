"""A real Prometheus: it understands the rules, finds ranks and replicas, and answers what dashboards and alerts ask."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator

import psutil
import pytest
import yaml

from tests.contracts.asked import ALERTING, EVERY_QUERY
from tests.e2e.conftest import Projects
from tests.e2e.containers import Container, docker, inspect
from tests.e2e.prometheus import FILES, IMAGE, Prometheus, build, promtool
from tests.integration.cluster import Cluster, until
from tests.ports import free_ports

# queries without an answer while rl and ps train and two workers were killed, and why
SILENT = {
    r"rolecall_rnn_": "no rnn runs here",
    r"rolecall_hybrid_": "no hybrid runs here",
    r"rolecall_ps_round_seconds": "no trainer has UPDATE_MODE=local",
    r"rolecall_gang_refused_total": "there was no stranger",
    r"rolecall_value": "the built-in jobs declare what they log",
    r"rolecall_queue_": "and have no queues",
    r"rolecall_weights_seconds": "nor subscriptions",
}
# are answered while an alert is pending
OF_ALERTS = {query for queries in EVERY_QUERY.values() for query in queries if query.startswith("ALERTS{")}
# what makes an alert's expression hold while all is well
RELAXED = {
    "RolecallTrainingStalled": [("> 600", "> 0"), ("unless on (instance) changes", "and on (instance) changes")],
    "RolecallRankDown": [("up == 0", "up == 1")],
    "RolecallGangIncomplete": [("rolecall_gang_registered > 0", "rolecall_gang_registered > -99")],
    "RolecallRpcFailing": [("> 0", ">= 0")],
    "RolecallJobFailed": [("== 1", "== 0")],
    "RolecallLossNotFinite": [("> 0", ">= 0")],
    "RolecallCheckpointStale": [("> 3 * rolecall_checkpoint_interval_seconds + 120", "> -1")],
    "RolecallRestartLoop": [("> 3", ">= 0")],
    "RolecallWeightsStale": [("> 0", ">= 0"), ("== 0", ">= 0")],
    "RolecallDiskSlow": [("> 10", ">= 0")],
    "RolecallMetricsAbsent": [("unless on (namespace, job) rolecall:rank:info", "and on (job) rolecall:rank:info")],
}


@pytest.fixture(scope="module", autouse=True)
def prometheus_image() -> None:
    build()


# ---- the files


def test_promtool_finds_no_fault() -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"]):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout


def test_every_alert_fires_and_keeps_silent_when_it_should() -> None:
    done = promtool("test", "rules", *sorted(path.name for path in FILES.glob("*_test.yml")))
    assert done.returncode == 0, done.stdout


# ---- local jobs


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    """An rl and a ps job with two observers and two trainers, whose rank 0's workers are killed once."""
    made: dict[str, Cluster] = {}
    try:
        for job in ("rl", "ps"):
            made[job] = Cluster(tmp_path_factory.mktemp(job), JOB=job, CHECKPOINT_INTERVAL="0.5").start(2)
        yield made
    finally:
        for cluster in made.values():
            cluster.close()


@pytest.fixture(scope="module")
def watched(clusters: dict[str, Cluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with the very rules, and the very configuration but for addresses and pace."""
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    del scrape["dns_sd_configs"]
    ranks = [rank for cluster in clusters.values() for rank in cluster.ranks.values()]
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{rank.environment['METRICS_PORT']}" for rank in ranks]}]
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    (directory / "alerts.yml").write_text((FILES / "alerts.yml").read_text())
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
    (port,) = free_ports(1)
    name = f"rolecall-test-prometheus-{os.getpid()}"
    mounts = [part for file in directory.iterdir() for part in ("--volume", f"{file}:/etc/prometheus/{file.name}:ro")]
    flags = ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
    flags += [f"--web.listen-address=127.0.0.1:{port}"]
    docker("run", "--detach", f"--name={name}", "--network=host", *mounts, IMAGE, *flags)
    try:
        served = Prometheus(port)
        everyone = len(ranks)
        until(lambda: served.ask(f"count(up == 1) == {everyone}"), "every rank scraped")
        yield served
    finally:
        print(Container(name).logs()[-5000:])
        docker("rm", "--force", "--volumes", name)


def filled(query: str) -> str:
    """A query as Grafana sends it, with every job chosen."""
    for variable, value in {"$__rate_interval": "8s", "$job": ".+", "$namespace": ".*"}.items():
        query = query.replace(variable, value)
    return re.sub(r"^query_result\((.*)\)$", r"\1", re.sub(r"^label_values\((.*), \w+\)$", r"\1", query))


def test_every_query_of_the_dashboards_is_answered(clusters: dict[str, Cluster], watched: Prometheus) -> None:
    for cluster in clusters.values():
        cluster.trains()
        cluster.first.kill_worker()
        cluster.trains()
        cluster.member(1).kill_worker()  # another one joins
    left = {query for name, queries in EVERY_QUERY.items() if name != "alerts" for query in queries} - OF_ALERTS
    assert len(left) > 100

    def answered() -> bool:
        for query in sorted(left):
            if watched.ask(filled(query)):
                left.discard(query)
        return all(any(re.search(pattern, query) for pattern in SILENT) for query in left)

    try:
        until(answered, "an answer to every query")
    finally:
        unexpected = [query for query in left if not any(re.search(pattern, query) for pattern in SILENT)]
        print("no answer:", *map(filled, unexpected), sep="\n")
    # and no reason stands there for nothing
    assert [pattern for pattern in SILENT if not any(re.search(pattern, query) for query in left)] == []


@pytest.mark.parametrize("name", ALERTING)
def test_an_alert_asks_for_what_is_there(watched: Prometheus, name: str) -> None:
    expr = ALERTING[name]["expr"]
    for bound, relaxed in RELAXED[name]:
        assert bound in expr
        expr = expr.replace(bound, relaxed)
    until(lambda: {labels["job"] for labels, _ in watched.ask(expr)} == {"rl", "ps"}, f"an answer to {expr}")


def test_while_all_is_well_no_alert_fires(watched: Prometheus) -> None:
    assert {rule["health"] for rule in watched.rules()} == {"ok"}
    firing = [one for name in ALERTING for one in watched.alerts(name) if one["state"] == "firing"]
    assert firing == []
    for name in ("RolecallRankDown", "RolecallTrainingStalled", "RolecallLossNotFinite", "RolecallMetricsAbsent"):
        assert watched.alerts(name) == []


def test_a_killed_rank_makes_its_alert_pending(clusters: dict[str, Cluster], watched: Prometheus) -> None:
    clusters["ps"].member(1).kill()
    (alert,) = until(lambda: watched.alerts("RolecallRankDown"), "the alert")
    assert alert["state"] == "pending"
    assert {name: alert["labels"][name] for name in ("job", "role", "ordinal", "severity")} == {
        "job": "ps",
        "role": "trainer",
        "ordinal": "1",
        "severity": "warning",
    }
    assert OF_ALERTS
    for query in OF_ALERTS:
        until(lambda query=query: watched.ask(filled(query)), f"an answer to {query}")
    assert alert["annotations"]["summary"] == "trainer_1 of ps is down"
    # and rank 0 of the other job
    clusters["rl"].first.kill()
    until(lambda: [one for one in watched.alerts("RolecallGangIncomplete") if "role" not in one["labels"]], "the alert")
    assert {one["labels"]["job"] for one in watched.alerts("RolecallGangIncomplete")} == {"rl"}


# ---- containers


def test_compose_watches_every_rank_and_every_replica(projects: Projects, endless: dict[str, str]) -> None:
    (port,) = free_ports(1)
    project = projects("rl", "agent", PROMETHEUS_IMAGE=IMAGE, PROMETHEUS_PORT=str(port), **endless)
    done = project.run("docker", "compose", "--profile", "monitoring", "up", "--detach", "--no-build", "prometheus")
    assert done.returncode == 0, done.stdout
    watch, container = Prometheus(port), Container(f"{project.name}-prometheus-1")

    def scraped(*services: str) -> None:
        """Wait until the targets are the running containers of `services`, and all of them answer."""
        ranks = [one for service in services for one in project.containers(service)]
        addresses = {f"{one.address(project.network('metrics'))}:8000" for one in (*ranks, container)}
        until(lambda: watch.targets() == dict.fromkeys(addresses, "up"), f"targets {addresses}")

    project.up()
    scraped("agent", "observer")
    project.up("--scale", "observer=3")
    assert len(project.containers("observer")) == 3
    scraped("agent", "observer")
    until(lambda: len(watch.ask('rolecall:rank:info{job="rl"}')) == 4, "the rules' records")

    # on loopback, and nowhere else
    bound = inspect(container.name)["NetworkSettings"]["Ports"]
    assert bound == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    others = [at.address for found in psutil.net_if_addrs().values() for at in found if at.family == socket.AF_INET]
    for address in set(others) - {"127.0.0.1"}:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, port)) != 0, address
    until(lambda: container.state["Health"]["Status"] == "healthy", "its health")
    # ranks only
    printed = project.make("metrics").stdout
    assert printed.count("rolecall_rank_info{") == printed.count("# ======== ") == 4
    # a job that is gone leaves no targets behind
    project.compose("kill")
    project.compose("rm", "--force")
    scraped()
