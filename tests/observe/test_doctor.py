"""`rolecall doctor`: the checks that concern rank 0 and the network, and the report."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from rolecall.config import Settings
from rolecall.observe.doctor import checks, command, diagnosis
from rolecall.observe.doctor.checks import Check, Finding, examine, ok, warning
from rolecall.observe.doctor.subject import Subject
from rolecall.tunnel import keys
from tests.observe import doctors
from tests.observe.doctors import Lead, look, subject
from tests.ports import free_ports
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import TOKEN, Server, Tunnel

OTHER_TOKEN = TOKEN[::-1]
NEED_RANK_0 = ("credentials", "rank 0", "settings in common", "clocks", "versions")


@pytest.fixture(scope="module")
def lead() -> Iterator[Lead]:
    one = Lead()
    yield one
    one.close()


def states(one: Subject, *names: str) -> set[str]:
    return {look(name, one).state for name in names}


def test_a_member_finds_nothing_wrong_and_shows_no_token(lead: Lead, tmp_path: Path) -> None:
    one, refused = lead.subject(tmp_path), lead.tunnel.refused("certificate")
    findings = {name: look(name, one) for name in ("name resolution", "rank 0's port", *NEED_RANK_0)}
    assert {finding.state for finding in findings.values()} == {"ok"}, findings
    assert findings["credentials"].text == f"fingerprint {keys.fingerprint(one.settings, JOB)} on both sides"
    assert not [finding for finding in findings.values() if TOKEN in finding.text]
    assert lead.tunnel.refused("certificate") == refused


# ---- names, routes and ports


def test_a_name_that_does_not_resolve_is_a_problem_of_all_ranks_but_rank_0(tmp_path: Path) -> None:
    one = subject(tmp_path, master_addr="nowhere.invalid")
    assert look("name resolution", one).state == "problem"
    assert states(one, "rank 0's port", "rank 0") == {"not checked"}
    assert states(subject(tmp_path, master_addr="nowhere.invalid", role="lead"), "name resolution") == {"warning"}


def test_a_name_with_several_addresses_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert states(subject(tmp_path, master_addr="lead.rpc"), "name resolution") == {"warning"}


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(30))
    one = subject(tmp_path, parts={"timeout": 0.05}, master_addr="lead.rpc")
    finding = look("name resolution", one)
    over.set()
    assert (finding.state, "no answer within 0.05 s" in finding.text) == ("problem", True)


def test_a_closed_port_of_rank_0_is_the_only_problem(tmp_path: Path) -> None:
    one = subject(tmp_path, master_port=free_ports(1)[0])
    assert look("rank 0's port", one).state == "problem"
    assert states(one, *NEED_RANK_0) == {"not checked"}


def test_rank_0_is_waited_for_while_it_starts(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    listeners: list[socket.socket] = []
    start = threading.Timer(0.7, lambda: listeners.append(socket.create_server(("127.0.0.1", port))))
    start.start()
    assert states(subject(tmp_path, parts={"wait": 30.0}, master_port=port), "rank 0's port") == {"ok"}
    start.join()
    listeners[0].close()


@pytest.mark.parametrize("name", ["port", "metrics_port"])
def test_a_port_that_another_program_holds_is_a_problem(name: str, tmp_path: Path) -> None:
    one = subject(tmp_path)
    assert look("ports", one).state == "ok"
    with socket.create_server(("127.0.0.1", getattr(one.settings, name))):
        finding = look("ports", dataclasses.replace(one, timeout=0.2))
    assert (finding.state, f"{name.upper()}=" in finding.text) == ("problem", True)


def metrics_of(role: str, job: str = JOB) -> Server:
    """Serves the metrics of the rank `role` 0."""
    text = f'rolecall_rank_info{{job="{job}",role="{role}",ordinal="0",version="1"}} 1.0\n'

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    return Server(serve)


@pytest.mark.parametrize(
    ("role", "job", "state"), [("worker", JOB, "ok"), ("lead", JOB, "problem"), ("worker", "other", "problem")]
)
def test_ports_may_be_held_by_this_rank_only(role: str, job: str, state: str, tmp_path: Path) -> None:
    served = metrics_of(role, job)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = subject(tmp_path, port=listener.getsockname()[1], metrics_port=served.port)
        assert states(one, "ports") == {state}
    served.close()


# ---- membership


def test_another_token_is_named_by_both_fingerprints(lead: Lead, tmp_path: Path) -> None:
    one = lead.subject(tmp_path, job_token=OTHER_TOKEN)
    finding = look("credentials", one)
    assert finding.state == "problem"
    assert all(keys.fingerprint(Settings(job_token=token), JOB) in finding.text for token in (TOKEN, OTHER_TOKEN))
    assert states(one, "rank 0") == {"problem"}
    assert states(one, "settings in common", "clocks", "versions") == {"not checked"}


def test_without_a_token_nothing_is_accepted(lead: Lead, tmp_path: Path) -> None:
    one = lead.subject(tmp_path, job_token=None)
    assert states(one, "credentials", "rank 0") == {"problem"}
    assert states(lead.subject(tmp_path, job_token=None, tls="off"), "credentials") == {"warning"}


def test_another_job_at_rank_0s_port_is_refused(lead: Lead, tmp_path: Path) -> None:
    assert states(lead.subject(tmp_path, described=doctors.job("other")), "credentials", "rank 0") == {"problem"}


@pytest.mark.parametrize(
    ("member", "text"), [("worker_1", "is not that of lead_0"), (RANK_0, "nothing serves control")]
)
def test_handshake_names_what_answers_for_the_coordinator(member: str, text: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tunnel = Tunnel(member, port, port)
    try:
        one = subject(tmp_path, master_port=port)
        finding = look("rank 0", one)
        assert (finding.state, text in finding.text) == ("problem", True), finding
        assert look("credentials", one).state == "ok"
    finally:
        tunnel.close()


def test_another_program_at_rank_0s_port_is_a_problem_of_the_handshake(tmp_path: Path) -> None:
    served = metrics_of("worker")
    one = subject(tmp_path, master_port=served.port)
    finding = look("rank 0", one)
    served.close()
    assert (finding.state, "speaks no TLS 1.3" in finding.text) == ("problem", True)
    assert look("rank 0's port", one).state == "ok"


def test_a_fingerprint_depends_on_token_and_job_and_is_in_the_certificate() -> None:
    one, other = Settings(job_token=TOKEN), Settings(job_token=OTHER_TOKEN)
    assert len({keys.fingerprint(settings, job) for settings in (one, other) for job in ("a", "b")}) == 4
    assert keys.fingerprint(Settings(tls="off"), "a") == ""
    _, certificate = keys.issue(*keys.derive_authority(TOKEN, "a"), "")
    (extension,) = [e.value for e in certificate.extensions if isinstance(e.value, x509.AuthorityKeyIdentifier)]
    assert extension.key_identifier == bytes.fromhex(keys.fingerprint(one, "a"))


def files_of(directory: Path, begin: float = 0) -> dict[str, Path]:
    """A certificate that is valid from `begin` hours from now on, its key, and its authority."""
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=begin)
    key, certificate = keys.issue(*keys.derive_authority(TOKEN, "users"), "127.0.0.1", when)
    (directory / "tls.key").write_bytes(keys.pem(key, certificate).partition(b"-----BEGIN CERT")[0])
    (directory / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / "tls.ca").write_bytes(keys.derive_authority(TOKEN, "users")[1].public_bytes(Encoding.PEM))
    return {"tls_cert": directory / "tls.crt", "tls_key": directory / "tls.key", "tls_ca": directory / "tls.ca"}


@pytest.mark.parametrize(("begin", "state"), [(0, "ok"), (-72, "problem"), (3, "problem")])
def test_a_certificate_must_be_valid_now(begin: float, state: str, tmp_path: Path) -> None:
    assert look("credentials", subject(tmp_path, **files_of(tmp_path, begin))).state == state


def test_files_that_are_not_certificates_are_a_problem(lead: Lead, tmp_path: Path) -> None:
    files = files_of(tmp_path)
    assert look("rank 0", lead.subject(tmp_path, **files)).state == "problem"  # rank 0 has a token
    files["tls_cert"].write_text("not a certificate")
    assert look("credentials", subject(tmp_path, **files)).state == "problem"


def test_without_tls_rank_0_is_asked_for_its_fingerprint(lead: Lead, tmp_path: Path) -> None:
    badge = keys.badge(TOKEN, JOB)
    body = json.dumps({"unix_s": 0, "fingerprint": keys.fingerprint(Settings(job_token=TOKEN), JOB), "gang": {}})

    def serve(connection: socket.socket) -> None:
        status = "200 OK" if f"Authorization: Bearer {badge}" in connection.recv(4096).decode() else "401 Unauthorized"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    served = Server(serve)
    right = subject(tmp_path, master_port=served.port, tls="off")
    assert [look(name, right).state for name in ("credentials", "rank 0")] == ["ok", "warning"]
    assert states(subject(tmp_path, master_port=served.port, tls="off", job_token=OTHER_TOKEN), "credentials") == {
        "problem"
    }
    served.close()
    assert states(lead.subject(tmp_path, tls="off"), "rank 0") == {"problem"}  # rank 0 has TLS


# ---- what this rank and rank 0 have in common


@pytest.mark.parametrize(
    ("gang", "state"),
    [
        ({"state": "running"}, "ok"),
        ({"state": "gathering", "missing": ["worker (0 of 2 in)"]}, "warning"),
        ({"state": "failed"}, "problem"),
    ],
)
def test_state_of_the_gang_is_reported(gang: dict[str, Any], state: str, lead: Lead, tmp_path: Path) -> None:
    with lead.answering(gang=gang):
        assert look("rank 0", lead.subject(tmp_path)).state == state


def test_settings_that_differ_are_named_with_both_values(lead: Lead, tmp_path: Path) -> None:
    finding = look("settings in common", lead.subject(tmp_path, instance="b", seed=7))
    assert (finding.state, finding.text) == ("problem", "INSTANCE='b' here, '' at rank 0; SEED=7 here, 1 at rank 0")
    other = dataclasses.replace(doctors.job(), version="0.0.9")
    assert states(lead.subject(tmp_path, described=other), "settings in common") == {"problem"}


@pytest.mark.parametrize(
    ("ahead", "state", "text"),
    [
        (0.0, "ok", " s "),
        (30.0, "warning", "s behind this one"),
        (-30.0, "warning", "s ahead of this one"),
        (7200.0, "problem", "s behind this one"),
    ],
)
def test_clocks_that_differ_by_seconds_are_a_warning_and_by_hours_a_problem(
    lead: Lead, tmp_path: Path, ahead: float, state: str, text: str
) -> None:
    one = lead.subject(tmp_path)
    clock = one.clock
    one.clock = lambda: clock() + ahead
    finding = look("clocks", one)
    assert (finding.state, text in finding.text) == (state, True), finding


@pytest.mark.parametrize(
    ("there", "state"),
    [
        ({"rolecall": "0.0.9"}, "problem"),
        ({"torch": "2.0.1"}, "warning"),
        ({"python": "3.9.1"}, "warning"),
        ({"torch": diagnosis.versions()["torch"].partition("+")[0] + "+cu130"}, "ok"),
    ],
)
def test_versions_must_fit_in_their_first_two_numbers(
    lead: Lead, tmp_path: Path, there: dict[str, str], state: str
) -> None:
    with lead.answering(versions={**diagnosis.versions(), **there}):
        assert look("versions", lead.subject(tmp_path)).state == state


# ---- checks and the report


def test_a_check_that_hangs_or_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, one = threading.Event(), subject(tmp_path, parts={"timeout": 0.05})
    monkeypatch.setattr(checks, "SLACK_SECONDS", 0.0)
    hanging = Check("slow", "", "do this", lambda _: ok(str(over.wait(30))))
    assert examine(hanging, one) == Finding("problem", "no answer within 0.05 s", "do this")
    over.set()
    assert examine(Check("broken", "", "", lambda _: ok({}["x"])), one).state == "not checked"
    assert examine(Check("brief", "", "do this", lambda _: warning("w")), one).advice == "do this"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {name.upper() for name in Settings.model_fields} & set(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JOB", "rl")
    monkeypatch.setenv("JOB_TOKEN", TOKEN)
    return monkeypatch


def told(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, dict[str, str]]:
    """The checks of the command's report."""
    assert command.run([*words, "--json", "--timeout", "3"]) == code
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_the_command_reports_a_problem_and_ends_with_2(
    lead: Lead, environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, metrics = free_ports(2)
    for name, value in {
        "PORT": port,
        "METRICS_PORT": metrics,
        "CHECKPOINT_DIR": tmp_path,
        "ROLE": "observer",
        "MASTER_PORT": lead.port,
        "BIND_ADDR": "127.0.0.1",
    }.items():
        environment.setenv(name, str(value))
    found = told(capsys, 2)
    assert {name for name, one in found.items() if one["state"] == "problem"} == {"credentials", "rank 0"}
    assert TOKEN not in json.dumps(found)
    assert command.run(["--timeout", "3"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("problem      credentials ") and " -> give all ranks" in line for line in lines)
    assert lines[-1].startswith(f"{len(found)} checks: ")
    with pytest.raises(SystemExit):
        command.run(["--timeout", "-1"])


def test_without_a_ranks_environment_only_the_machine_is_examined(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.delenv("JOB_TOKEN")
    found = told(capsys, 0, "ps")
    assert {found[name]["text"] for name in ("rank 0's port", "ports", "credentials", "rank 0")} == {command.NO_RANK}
    assert found["open files"]["state"] != "not checked"
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    assert told(capsys, 2, "ps")["credentials"]["state"] == "problem"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"LR": "fast", "PORT": "0"}, "LR='fast'"),
        ({"JOB": "nothing"}, "nothing"),
        ({"LEASE_SECONDS": "-1"}, "LEASE"),
        ({"JOB_TOKEN": "short"}, "JOB_TOKEN=***"),
    ],
)
def test_wrong_settings_are_the_only_problem(
    variables: dict[str, str], text: str, environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    found = told(capsys, 2)
    assert (found["settings"]["state"], text in found["settings"]["text"]) == ("problem", True)
    assert {one["state"] for name, one in found.items() if name != "settings"} == {"not checked"}
