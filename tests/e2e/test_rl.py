"""`rl` in containers: solved, scaled, watched, killed, stopped and resumed, and closed to everybody else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from rolecall.declare import registry
from tests.e2e.capture import capture, encrypted
from tests.e2e.conftest import Projects
from tests.e2e.containers import (
    DEADLINE,
    IMAGE,
    PORTS,
    SCAN,
    Container,
    Project,
    docker,
    each_role_serves_its_metrics,
    open_ports,
)
from tests.integration.cluster import until

JOB = registry.get("rl")
# the beginning of what pickle writes, and a name that what ranks send each other holds there
PICKLE = re.compile(rb"\x80[\x02-\x05].{0,32}?rollout", re.DOTALL)  # a request


@pytest.mark.timeout(600)  # it trains twice
def test_make_up_rl_solves_then_says_so_then_starts_anew(projects: Projects) -> None:
    project = projects("rl", "agent")
    project.token_file.unlink()
    done = project.make("up-rl")
    assert done.returncode == 0, done.stdout
    assert f"rolecall: the ranks' token is in {project.token_file}" in done.stdout
    token = project.token_file.read_text()
    assert "Solved! Mean return of the last 100 episodes is" in done.stdout
    assert len(project.containers("observer", everyone=True)) == 2
    assert not project.containers()  # all have ended
    assert all(one.state["ExitCode"] == 0 for one in project.containers(everyone=True))

    again = project.make("up-rl")
    assert again.returncode == 0, again.stdout
    assert "this job has finished already" in again.stdout
    assert "Solved!" not in again.stdout
    assert project.token_file.read_text() == token
    assert token not in done.stdout + again.stdout

    anew = project.make("up-rl", RESUME="0", INFERENCE="observer", PIPELINE="1", SOLVED_BY="running")
    assert anew.returncode == 0, anew.stdout
    assert re.search(r"an earlier run's checkpoints were moved .*to=/checkpoints/earlier-000001", anew.stdout)
    assert "Solved! Running reward is now" in anew.stdout

    assert project.make("down").returncode == 0
    assert not project.left()


def test_wrong_settings_are_no_endless_restart(projects: Projects) -> None:
    project = projects("rl", "agent", RESTARTS="1")
    project.up(GAMMA="2")
    for one in until(lambda: project.containers(everyone=True), "containers"):
        until(lambda one=one: one.state["Status"] == "exited" and one.restarts == 1, f"the end of {one.name}")
        assert one.state["ExitCode"] == 2
        assert one.logs().splitlines() == ["rolecall: wrong settings: GAMMA='2': " + LINE] * 2


LINE = "input should be less than or equal to 1 (float, 0 to 1)"


@pytest.fixture(scope="module")
def training(projects: Projects, endless: dict[str, str]) -> Project:
    """A job that trains for as long as the tests below need; each leaves it training with two observers."""
    project = projects("rl", "agent", **endless)
    project.up()
    project.trains()
    return project


def test_every_rank_is_locked_down(training: Project) -> None:
    code = """
import json, os, socket
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
def written(path):
    try:
        open(path, 'w').close()
    except OSError as error:
        return error.errno
    return 0
print(json.dumps({
    'uid': os.getuid(), 'caps': [int(status[name], 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')],
    'no_new_privileges': int(status['NoNewPrivs']), 'seccomp': int(status['Seccomp']),
    'init': open('/proc/1/comm').read().strip(), 'child': open('/proc/1/task/1/children').read().split(),
    'root': written('/x'), 'code': written('/srv/rolecall/app/x'), 'tmp': written('/tmp/x'),
}))
"""
    for one in training.containers():
        found = json.loads(one.execute("python", "-c", code))
        assert found["uid"] == 10001
        assert found["caps"] == [0] * 5
        assert found["no_new_privileges"] == 1
        assert found["seccomp"] == 2
        assert found["init"] == "tini"
        assert len(found["child"]) == 1
        assert (found["root"], found["code"], found["tmp"]) == (30, 30, 0)  # EROFS
        assert until(lambda one=one: one.state["Health"]["Status"] == "healthy", f"health of {one.name}", DEADLINE)


def test_nobody_outside_reaches_a_port(training: Project) -> None:
    ranks = training.containers()
    addresses = [one.address(training.network(name)) for one in ranks for name in ("rpc", "metrics")]
    assert not any(open_ports("bridge", addresses, PORTS).values())


def test_no_rank_reaches_the_outside(training: Project, outside: str) -> None:
    (reached,) = open_ports("bridge", [outside], (8080,)).values()
    assert reached == [8080], "the test's own listener is up"
    for one in training.containers():
        (reached,) = json.loads(one.execute("python", "-c", SCAN, json.dumps([outside]), "[8080]")).values()
        assert reached == []


@pytest.fixture
def outside() -> Iterator[str]:
    """The address of a listener on port 8080 on the engine's default network, which has a way to the internet."""
    name = f"rolecall-test-listener-{os.getpid()}"
    docker("run", "--detach", "--rm", "--name", name, "--entrypoint", "python", IMAGE, "-m", "http.server", "8080")
    try:
        until(
            lambda: json.loads(docker("exec", name, "python", "-c", SCAN, '["127.0.0.1"]', "[8080]"))["127.0.0.1"],
            "a listener",
        )
        yield Container(name).address("bridge")
    finally:
        docker("rm", "--force", name)


@pytest.mark.parametrize(("name", "other"), [("rpc", "metrics"), ("metrics", "rpc")])
def test_from_beside_a_rank_has_two_ports_and_no_more(training: Project, name: str, other: str) -> None:
    network = training.network(name)
    ranks = training.containers()
    for one in ranks:  # every port
        address = one.address(network)
        assert open_ports(network, [address]) == {address: list(PORTS)}
    assert not any(open_ports(network, [one.address(training.network(other)) for one in ranks], PORTS).values())


def test_the_token_is_nowhere_but_in_its_file(training: Project) -> None:
    token = training.token_file.read_text()
    for one in training.containers():
        assert one.execute("cat", "/run/secrets/job-token") == token
        assert token not in docker("inspect", one.name)
        assert token not in one.logs()
        variables = one.execute("sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
        assert "JOB_TOKEN_FILE=/run/secrets/job-token" in variables.splitlines()
        assert token not in variables


@pytest.mark.parametrize("tls", ["require", "off"])
def test_what_crosses_the_network_is_encrypted(projects: Projects, tls: str) -> None:
    """With TLS=off the same run shows what is looked for: it would be found."""
    project = projects("rl", "agent", MAX_ITERATIONS="5", TLS=tls)
    project.compose("create", "--no-build")
    with capture(project.network("rpc")) as taken:
        project.up()
        code = docker("wait", project.rank0.name, timeout=DEADLINE)
        until(lambda: not project.containers(), "the end of the others")
    assert code == "0", project.rank0.logs()
    token, streams = project.token_file.read_bytes(), taken.streams()
    everything = b"".join(taken.frames)
    assert token not in everything
    assert not [flow for flow, stream in streams.items() if token in stream]
    if tls == "off":
        assert [flow for flow, stream in streams.items() if b"rollout" in stream]
        assert [flow for flow, stream in streams.items() if PICKLE.search(stream)]
        return
    assert b"rollout" not in everything
    assert not [flow for flow, stream in streams.items() if b"rollout" in stream or PICKLE.search(stream)]
    # and there is nothing but TLS, on the one port
    assert not [flow for flow in streams if PORTS[1] not in (flow.source_port, flow.target_port)]
    assert sum(map(encrypted, streams.values())) > 100_000


def test_metrics_of_each_role(training: Project) -> None:
    each_role_serves_its_metrics(training, JOB, "drop|lost|fail|checkpoint|^loss$|^epoch$|^left")


def test_the_doctor_sees_no_problem(training: Project) -> None:
    done = training.make("doctor", JOB="rl")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" checks: ") == len(training.containers()) == 3
    assert not re.search("^problem", done.stdout, re.MULTILINE), done.stdout
