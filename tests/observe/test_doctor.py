"""`rolecall doctor`, as far as rank 0 and the network are concerned: each check, and what breaks exactly that."""

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

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from rolecall import config
from rolecall.config import Settings
from rolecall.declare import describe
from rolecall.errors import UsageError
from rolecall.launch.local import free_ports
from rolecall.observe.doctor import command, diagnosis, network, ports, rank0, report
from rolecall.observe.doctor.checks import Check, Finding, examine, ok, warning
from rolecall.observe.doctor.patient import admit
from rolecall.observe.doctor.secrets import AUTHORITY
from rolecall.observe.doctor.steps import Once, shown
from rolecall.tunnel import keys
from tests.observe import doctors
from tests.observe.doctors import Lead, look, patient
from tests.tunnel.tunnel_process import JOB, RANK_0
from tests.tunnel.tunnels import TOKEN, Server, Tunnel

OTHER_TOKEN = TOKEN[::-1]
ABOUT_RANK_0 = ("rank 0's port", "token", "TLS handshake", "rank 0", "settings in common", "clocks", "versions",
                "large messages")  # fmt: skip


@pytest.fixture(scope="module")
def lead() -> Iterator[Lead]:
    one = Lead()
    yield one
    one.close()


@pytest.fixture
def closed() -> int:
    """A port at which nothing listens."""
    return free_ports(1)[0]


# ---- all is well


def test_all_is_well(lead: Lead, tmp_path: Path) -> None:
    one = lead.patient(tmp_path)
    findings = {name: look(name, one) for name in ABOUT_RANK_0}
    assert {finding.state for finding in findings.values()} == {"ok"}, findings
    assert findings["token"].text == f"fingerprint {keys.fingerprint(one.settings, JOB)} on both sides"
    assert not [finding for finding in findings.values() if TOKEN in finding.text]
    one.rank0.close()


def test_the_visit_is_none_of_a_stranger(lead: Lead, tmp_path: Path) -> None:
    one = lead.patient(tmp_path)
    before = {reason: lead.tunnel.refused(reason) for reason in ("certificate", "protocol")}
    assert look("TLS handshake", one).state == "ok"
    one.rank0.close()
    assert {reason: lead.tunnel.refused(reason) for reason in before} == before
    assert "connection rejected" not in lead.tunnel.log()


# ---- settings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {name.upper() for name in Settings.model_fields} & set(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JOB", "rl")
    monkeypatch.setenv("JOB_TOKEN", TOKEN)
    return monkeypatch


def test_right_settings(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ROLE", "observer")
    environment.setenv("ORDINAL", "1")
    one = admit()
    assert [look(name, one).state for name in ("settings", "spelling", "place")] == ["ok", "ok", "ok"]
    assert look("place", one).text == "observer 1"


def test_every_wrong_setting_is_named_and_the_others_hold(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"LR": "fast", "PORT": "0", "TLS_CERT": "c", "MASTER_ADDR": "lead.rpc"}.items():
        environment.setenv(name, value)
    environment.setenv("JOB_TOKEN", "short")
    one = admit()
    finding = look("settings", one)
    assert finding.state == "problem"
    assert [name for name in ("LR='fast'", "PORT='0'", "JOB_TOKEN=***") if name not in finding.text] == []
    assert one.settings.master_addr == "lead.rpc"
    assert (one.settings.port, one.settings.token, one.settings.tls_cert) == (29400, "", None)
    assert look("token", one).state == "problem"
    assert one.job is not None  # described as if they were not set
    assert (look("place", one).state, look("settings in common", one).state) == ("ok", "not checked")


@pytest.mark.parametrize("job", ["", "nothing", "missing.py", "tests/gang"])
def test_a_job_that_there_is_not(job: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("JOB", job)
    one = admit()
    assert look("settings", one).state == "problem"
    assert {look(name, one).state for name in ("place", "TLS handshake", "settings in common")} == {"not checked"}
    assert look("METRICS_PORT", one).state in ("ok", "problem")


def test_a_missing_token_file(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.delenv("JOB_TOKEN")
    environment.setenv("JOB_TOKEN_FILE", str(tmp_path / "none"))
    one = admit()
    assert "cannot be read" in look("settings", one).text
    assert look("token", one).state == "problem"


def test_a_misspelt_setting(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OBSERVRS", "3")
    finding = look("spelling", admit())
    assert (finding.state, finding.text) == ("warning", "without effect: OBSERVRS (for OBSERVERS?)")
    environment.setenv("LR", "fast")  # the job's settings are known all the same
    assert look("spelling", admit()).state == "warning"


def test_a_place_that_there_is_not(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ROLE", "judge")
    finding = look("place", admit())
    assert finding.state == "problem"
    assert "ROLE='judge': no such role" in finding.text


# ---- names and routes


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    one = patient(tmp_path, master_addr="nowhere.invalid")
    finding = look("name resolution", one)
    assert finding.state == "problem"
    assert finding.text.startswith("MASTER_ADDR=nowhere.invalid does not resolve")
    assert {look(name, one).state for name in ("route", "rank 0's port", "TLS handshake")} == {"not checked"}
    assert look("name resolution", patient(tmp_path, master_addr="nowhere.invalid", role="lead")).state == "warning"


def answers(monkeypatch: pytest.MonkeyPatch, *look_ups: list[str]) -> None:
    """The resolver answers each look-up with the next of them."""
    left = list(look_ups)

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in left.pop(0)]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)


def test_a_name_that_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = patient(tmp_path, master_addr="lead.rpc", bind_addr="")
    answers(monkeypatch, ["10.0.0.1"], ["10.0.0.2"])
    finding = look("name resolution", one)
    assert finding.state == "warning"
    assert finding.text == "MASTER_ADDR=lead.rpc is 10.0.0.2 now, and was 10.0.0.1 a second ago"


def test_a_name_of_several_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = patient(tmp_path, master_addr="lead.rpc")
    answers(monkeypatch, ["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"])
    finding = look("name resolution", one)
    assert finding.state == "warning"
    assert "several addresses (10.0.0.2, 10.0.0.1)" in finding.text


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    over = threading.Event()
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: over.wait(30))
    one = patient(tmp_path, parts={"timeout": 0.05}, master_addr="lead.rpc")
    finding = look("name resolution", one)
    over.set()
    assert finding.state == "problem"
    assert "no answer within 0.05 s" in finding.text
    assert look("rank 0's port", one).state == "not checked"


def test_no_route(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = patient(tmp_path, master_addr="255.255.255.255")  # to which no socket may be connected without asking
    finding = look("route", one)
    assert finding.state == "problem"
    assert "no route leads to 255.255.255.255" in finding.text


def test_an_interface_that_is_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = patient(tmp_path)
    assert "by lo (MTU" in look("route", one).text
    stats = {name: stat._replace(isup=False) for name, stat in psutil.net_if_stats().items()}
    monkeypatch.setattr(network.psutil, "net_if_stats", lambda: stats)
    assert "which is down" in look("route", one).text


# ---- ports


def test_nothing_listens_for_rank_0(tmp_path: Path, closed: int) -> None:
    one = patient(tmp_path, master_port=closed)
    finding = look("rank 0's port", one)
    assert finding.state == "problem"
    assert "nothing listens there" in finding.text
    assert {look(name, one).state for name in ABOUT_RANK_0[1:]} == {"not checked"}


def test_rank_0_that_starts_meanwhile_is_waited_for(tmp_path: Path, closed: int) -> None:
    one = patient(tmp_path, parts={"wait": 30.0}, master_port=closed)
    listener: list[socket.socket] = []
    real = one.rank0._connects

    def connects() -> tuple[str, int]:
        if not listener:
            listener.append(socket.create_server(("127.0.0.1", closed)))  # once it was looked for in vain
            raise ConnectionRefusedError
        return real()

    one.rank0._connects = connects  # type: ignore[method-assign]
    assert look("rank 0's port", one).state == "ok"
    listener[0].close()


def test_dropped_packets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = patient(tmp_path)

    def drop() -> tuple[str, int]:
        raise TimeoutError("timed out")

    monkeypatch.setattr(one.rank0, "_connects", drop)
    finding = look("rank 0's port", one)
    assert finding.state == "problem"
    assert "packets are dropped" in finding.text
    assert "NetworkPolicy" in finding.advice


@pytest.mark.parametrize("name", ["PORT", "METRICS_PORT"])
def test_a_port_that_another_program_has(name: str, tmp_path: Path) -> None:
    one = patient(tmp_path)
    assert look(name, one).state == "ok"
    number = one.settings.port if name == "PORT" else one.settings.metrics_port
    with socket.create_server(("127.0.0.1", number)) as listener:
        listener.settimeout(30)
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        finding = look(name, dataclasses.replace(one))
    assert finding.state == "problem"
    assert f"{name}={number} is held by another program" in finding.text
    assert f"process {os.getpid()})" in finding.text


def hang_up(listener: socket.socket) -> None:
    try:
        while True:
            listener.accept()[0].close()
    except OSError:  # it is closed
        return


def metrics_of(role: str, job: str = JOB) -> Server:
    text = f'rolecall_rank_info{{job="{job}",role="{role}",ordinal="0",version="1"}} 1.0\n'

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    return Server(serve)


def test_ports_that_this_rank_itself_has(tmp_path: Path) -> None:
    served = metrics_of("worker")
    (port,) = free_ports(1)
    tunnel = Tunnel("worker_0", port, port)
    try:
        one = patient(tmp_path, port=port, metrics_port=served.port)
        assert look("PORT", one).text == f"PORT={port} is held by this rank, which runs"
        assert look("METRICS_PORT", one).state == "ok"
        other = patient(tmp_path, port=port, metrics_port=served.port, ordinal=1)
        assert look("PORT", other).text.startswith(f"PORT={port} is held by another rank of this job")
        assert "held by another rank, worker 0 of tested" in look("METRICS_PORT", other).text
    finally:
        tunnel.close()
        served.close()


def test_an_address_that_is_not_of_this_machine(tmp_path: Path) -> None:
    one = patient(tmp_path, bind_addr="192.0.2.1")
    for name in ("PORT", "METRICS_PORT"):
        finding = look(name, one)
        assert finding.state == "problem"
        assert "192.0.2.1 is no address of this machine" in finding.text


def test_a_port_of_every_address_is_taken_by_one_of_them(closed: int) -> None:
    assert ports.usable("", closed) is None
    with socket.create_server(("127.0.0.1", closed)):
        assert ports.usable("", closed) is not None
    assert ports.usable("", closed) is None


# ---- the token and the handshake


def test_another_token(lead: Lead, tmp_path: Path) -> None:
    one = lead.patient(tmp_path, job_token=OTHER_TOKEN)
    finding = look("token", one)
    here, there = (keys.fingerprint(Settings(job_token=token), JOB) for token in (OTHER_TOKEN, TOKEN))
    assert finding.state == "problem"
    assert f"fingerprint {here} here, {there} at rank 0" in finding.text
    finding = look("TLS handshake", one)
    assert finding.state == "problem"
    assert finding.text == "second step, rank 0's certificate: it was made from another token"
    others = ("rank 0", "settings in common", "clocks", "large messages")
    assert {look(name, one).state for name in others} == {"not checked"}


def test_another_job(lead: Lead, tmp_path: Path) -> None:
    one = lead.patient(tmp_path, described=doctors.job("another"))
    finding = look("TLS handshake", one)
    assert finding.state == "problem"
    assert f"it is of job {JOB}, this rank of another" in finding.text


def test_another_rank_at_rank_0s_place(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tunnel = Tunnel("worker_1", port, port)
    try:
        one = patient(tmp_path, master_port=port)
        finding = look("TLS handshake", one)
        assert (finding.state, finding.text) == (
            "problem", "second step, rank 0's certificate: it is that of another rank of this job")  # fmt: skip
        assert look("token", one).state == "ok"
    finally:
        tunnel.close()


def test_a_rank_0_whose_coordinator_does_not_serve_yet(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tunnel = Tunnel(RANK_0, port, port)
    try:
        finding = look("TLS handshake", patient(tmp_path, master_port=port))
        assert finding.state == "problem"
        assert finding.text.startswith("last step, rank 0's coordinator: nothing serves control yet")
    finally:
        tunnel.close()


def test_another_program_at_rank_0s_port(tmp_path: Path) -> None:
    served = metrics_of("worker")
    one = patient(tmp_path, master_port=served.port)
    finding = look("TLS handshake", one)
    served.close()
    assert finding.state == "problem"
    assert finding.text.startswith("first step, hello: what answers speaks no TLS 1.3")
    assert look("rank 0's port", one).state == "ok"


def test_a_certificate_that_rank_0_refuses(lead: Lead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lead.patient(tmp_path)
    monkeypatch.setattr(keys, "LIFE", datetime.timedelta(minutes=-30))  # it is over before it is shown
    finding = look("TLS handshake", one)
    assert finding.state == "problem"
    assert finding.text.startswith("third step, this rank's certificate: it does not take this rank for a member")


@pytest.mark.parametrize(("hours", "text"), [(72, "expired 24 hours ago"), (-4, "is not valid for another 3 hours")])
def test_a_certificate_by_a_wrong_clock(lead: Lead, tmp_path: Path, hours: float, text: str) -> None:
    one = lead.patient(tmp_path)
    before = one.clock
    one.clock = lambda: before() + 3600 * hours
    finding = look("TLS handshake", one)
    assert finding.state == "problem"
    assert f"it {text}, by this machine's clock" in finding.text
    assert finding.advice == "set both machines' clocks"


def test_the_fingerprint_is_short_and_of_the_job() -> None:
    one, other = Settings(job_token=TOKEN), Settings(job_token=OTHER_TOKEN)
    prints = {keys.fingerprint(settings, job) for settings in (one, other) for job in ("a", "b")}
    assert len(prints) == 4
    assert {len(text) for text in prints} == {2 * keys.FINGERPRINT}
    assert keys.fingerprint(Settings(tls="off"), "a") == ""
    key, authority = keys.derive_authority(TOKEN, "a")
    _, certificate = keys.issue(key, authority, "")
    (extension,) = [e.value for e in certificate.extensions if isinstance(e.value, x509.AuthorityKeyIdentifier)]
    assert extension.key_identifier == bytes.fromhex(keys.fingerprint(one, "a"))
    assert authority.issuer.rfc4514_string() == f"CN={AUTHORITY}a"


# ---- certificates of the user's own


def files_of(
    directory: Path, signer: str, authority: str, host: str = "127.0.0.1", begin: float = 0
) -> dict[str, Path]:
    """A certificate that `signer` makes `begin` hours from now, its key, and another `authority` or the same."""
    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=begin)
    key, certificate = keys.issue(*keys.derive_authority(TOKEN, signer), host, when)
    text = keys.pem(key, certificate)
    (directory / "tls.key").write_bytes(text.partition(b"-----BEGIN CERT")[0])
    (directory / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / "tls.ca").write_bytes(keys.derive_authority(TOKEN, authority)[1].public_bytes(Encoding.PEM))
    return {"tls_cert": directory / "tls.crt", "tls_key": directory / "tls.key", "tls_ca": directory / "tls.ca"}


@pytest.mark.parametrize(
    ("changes", "role", "state", "text"),
    [
        ({}, "worker", "ok", "is of TLS_CA, for both ends, and valid for"),
        ({"signer": "nobody"}, "worker", "problem", "is not accepted by another rank with the same files"),
        ({"begin": -72}, "worker", "problem", "expired 24 hours ago"),
        ({"begin": 3}, "worker", "problem", "is not valid yet"),
        ({"begin": -47.5}, "worker", "warning", "expires in 30 minutes"),
        ({"host": "elsewhere"}, "worker", "ok", "is of TLS_CA"),  # only rank 0's must be for MASTER_ADDR
        ({"host": "elsewhere"}, "lead", "problem", "is not accepted"),
    ],
)
def test_a_certificate_of_the_users_own(
    changes: dict[str, Any], role: str, state: str, text: str, tmp_path: Path
) -> None:
    files = files_of(tmp_path, **{"signer": "users", "authority": "users", **changes})
    one = patient(tmp_path, role=role, master_addr="lead.rpc" if role == "lead" else "127.0.0.1", **files)
    finding = look("certificate", one)
    assert (finding.state, text in finding.text) == (state, True), finding


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    files = files_of(tmp_path, "users", "users")
    (tmp_path / "tls.crt").write_text("no certificate")
    finding = look("certificate", patient(tmp_path, **files))
    assert finding.state == "problem"
    assert "PEM" in finding.text


def test_a_rank_0_with_a_token_and_a_rank_with_certificates(lead: Lead, tmp_path: Path) -> None:
    finding = look("TLS handshake", lead.patient(tmp_path, **files_of(tmp_path, "users", "users")))
    assert finding.state == "problem"


# ---- TLS=off


def test_without_tls_rank_0s_word_is_asked_for_the_token(tmp_path: Path) -> None:
    badge = keys.badge(TOKEN, JOB)
    status = {f"Bearer {badge}": "200 OK"}
    body = json.dumps({"unix_s": 0, "fingerprint": keys.fingerprint(Settings(job_token=TOKEN), JOB), "gang": {}})

    def serve(connection: socket.socket) -> None:
        asked = connection.recv(4096).decode()
        shown_badge = "".join(line[15:] for line in asked.split("\r\n") if line.startswith("Authorization: "))
        line = status.get(shown_badge, "401 Unauthorized")
        connection.sendall(f"HTTP/1.1 {line}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    served = Server(serve)
    right = patient(tmp_path, master_port=served.port, tls="off")
    assert look("token", right).state == "ok"
    assert look("TLS handshake", right).state == "warning"
    wrong = patient(tmp_path, master_port=served.port, tls="off", job_token=OTHER_TOKEN)
    assert look("token", wrong).state == "problem"
    right.rank0.close()
    served.close()


def test_without_tls_at_a_rank_0_with_tls(lead: Lead, tmp_path: Path) -> None:
    finding = look("TLS handshake", lead.patient(tmp_path, tls="off"))
    assert finding.state == "problem"
    assert "no coordinator without TLS" in finding.text


# ---- what both sides say


def test_a_start_that_waits(lead: Lead, tmp_path: Path) -> None:
    with lead.saying(gang={"state": "gathering", "missing": ["worker (0 of 2 in)"]}):
        finding = look("rank 0", lead.patient(tmp_path))
    assert (finding.state, finding.text) == ("warning", "a start waits for worker (0 of 2 in)")
    with lead.saying(gang={"state": "failed", "missing": []}):
        assert look("rank 0", lead.patient(tmp_path)).state == "problem"


def test_another_instance_and_other_settings(lead: Lead, tmp_path: Path) -> None:
    finding = look("settings in common", lead.patient(tmp_path, instance="b", seed=7))
    assert finding.state == "problem"
    assert finding.text == "INSTANCE='b' here, '' at rank 0; SEED=7 here, 1 at rank 0"


def test_another_version_of_the_job(lead: Lead, tmp_path: Path) -> None:
    other = dataclasses.replace(doctors.job(), version="0.0.9")
    finding = look("settings in common", lead.patient(tmp_path, described=other))
    assert finding.state == "problem"
    assert "this rank is of tested (0.0.9), rank 0 of tested (0.1.0)" in finding.text


@pytest.mark.parametrize(
    ("ahead", "state", "text"),
    [(0.0, "ok", "ms"), (30.0, "warning", "30.0 s behind this one"), (-30.0, "warning", "30.0 s ahead of this one"),
     (7200.0, "problem", "7200.0 s behind this one")],
)  # fmt: skip
def test_clocks(lead: Lead, tmp_path: Path, ahead: float, state: str, text: str) -> None:
    one = lead.patient(tmp_path)
    before = one.clock
    one.clock = lambda: before() + ahead
    finding = look("clocks", one)
    assert (finding.state, text in finding.text, "±" in finding.text) == (state, True, True), finding


@pytest.mark.parametrize(
    ("there", "state"),
    [({}, "ok"), ({"rolecall": "0.0.9"}, "problem"), ({"torch": "2.0.1"}, "warning"), ({"python": "3.9.1"}, "warning")],
)
def test_versions(lead: Lead, tmp_path: Path, there: dict[str, str], state: str) -> None:
    with lead.saying(versions={**diagnosis.versions(), **there}):
        assert look("versions", lead.patient(tmp_path)).state == state


def test_another_build_of_torch_is_the_same_version(lead: Lead, tmp_path: Path) -> None:
    here = diagnosis.versions()
    with lead.saying(versions={**here, "torch": here["torch"].partition("+")[0] + "+cu130"}):
        assert look("versions", lead.patient(tmp_path)).state == "ok"


# ---- large messages


def test_a_large_message_that_does_not_pass(lead: Lead, tmp_path: Path) -> None:
    one = lead.patient(tmp_path)
    line = one.rank0.line.get()
    real = line.request

    def request(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if len(body) > 1400:
            raise TimeoutError("no answer in time")
        return real(method, path, body)

    line.request = request  # type: ignore[method-assign]
    finding = look("large messages", one)
    assert finding.state == "problem"
    assert "small messages pass, one of 60000 bytes does not (no answer in time)" in finding.text
    assert "fragmentation needed" in finding.advice


def test_a_path_with_small_packets(lead: Lead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lead.patient(tmp_path)
    assert look("large messages", one).state == "ok"
    assert network.path_mtu(one.rank0.line.get().sock) >= network.SMALLEST_MTU  # of loopback
    monkeypatch.setattr(network, "path_mtu", lambda sock: 576)
    finding = look("large messages", one)
    assert finding.state == "warning"
    assert "packets of at most 576 bytes" in finding.text


# ---- how it is told


def test_a_check_that_hangs_or_fails_is_a_line(tmp_path: Path) -> None:
    over = threading.Event()
    one = patient(tmp_path, parts={"timeout": 0.05})
    checks_slack = "rolecall.observe.doctor.checks.SLACK"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks_slack, 0.0)
        hanging = Check("slow", "", "do this", lambda patient: ok(str(over.wait(30))))
        assert examine(hanging, one) == Finding("problem", "no answer within 0.05 s", "do this")
    over.set()

    def fail(_: Any) -> Finding:
        raise KeyError("x")

    assert examine(Check("broken", "", "", fail), one).state == "not checked"
    assert examine(Check("brief", "", "do this", lambda _: warning("w")), one).advice == "do this"


def test_what_is_worked_out_once() -> None:
    calls: list[int] = []

    def fail() -> int:
        calls.append(1)
        raise OSError("no")

    once = Once(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            once.get()
    assert len(calls) == 1
    assert once.known is None


def test_the_report(tmp_path: Path) -> None:
    one, check = patient(tmp_path), command.CHECKS[0]
    findings = [(check, ok("a")), (check, warning("b", "c"))]
    assert report.line(*findings[1], width=10) == "warning      settings    b -> c"
    assert report.verdict(findings) == "2 checks: 1 ok, 1 warning"
    assert report.worst(findings) == "warning"
    told = json.loads(report.as_json(one, findings))
    assert (told["state"], told["rank"], told["job"]) == ("warning", "worker 0", JOB)
    assert told["checks"][1] == {"name": "settings", "state": "warning", "text": "b", "advice": "c"}


def test_sizes() -> None:
    sizes = (12, 2048, 3.5 * 2**30, 5000 * 2**40)
    assert [shown(size) for size in sizes] == ["12 bytes", "2 KiB", "3.5 GiB", "5000 TiB"]


def test_every_check_has_a_name_of_its_own_and_says_what_to_do() -> None:
    names = [check.name for check in command.CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.subject and check.action for check in command.CHECKS)


def test_the_command(
    lead: Lead, environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port, metrics = free_ports(2)
    for name, value in {"PORT": port, "METRICS_PORT": metrics, "CHECKPOINT_DIR": tmp_path, "ROLE": "observer",
                        "MASTER_PORT": lead.port, "BIND_ADDR": "127.0.0.1"}.items():  # fmt: skip
        environment.setenv(name, str(value))
    assert command.run(["--json", "--timeout", "3"]) == 2  # rank 0 is of another job
    told = json.loads(capsys.readouterr().out)
    wrong = {check["name"] for check in told["checks"] if check["state"] == "problem"}
    assert wrong == {"token", "TLS handshake"}
    assert TOKEN not in json.dumps(told)
    with pytest.raises(SystemExit):
        command.run(["--timeout", "-1"])


def test_without_a_ranks_environment_only_the_machine_is_examined(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.delenv("JOB_TOKEN")
    assert command.run(["ps", "--json"]) == 0
    told = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {told[name]["text"] for name in ("rank 0's port", "PORT", "token", "rank 0")} == {command.NO_RANK}
    assert told["open files"]["state"] != "not checked"
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    assert command.run(["ps", "--json"]) == 2
    assert "JOB_TOKEN is not set" in capsys.readouterr().out


def test_wrong_settings_are_the_doctors_finding_not_its_end(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("ROLE", "judge")
    with pytest.raises(UsageError):
        config.load(describe.registry.get("rl").settings, role="judge", lease_seconds=-1)
    environment.setenv("LEASE_SECONDS", "-1")
    environment.setattr(command, "TOPICS", {"settings": command.CHECKS[:3]})
    assert command.run([]) == 2
    assert "LEASE_SECONDS='-1'" in capsys.readouterr().out


def test_a_coordinator_that_starts_meanwhile_is_waited_for(
    lead: Lead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lead.patient(tmp_path, parts={"wait": 30.0})
    calls: list[int] = []

    def dial(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("nothing serves control yet")
        return real(*arguments)

    real = rank0.dial
    monkeypatch.setattr(rank0, "dial", dial)
    assert look("TLS handshake", one).state == "ok"
    assert len(calls) == 2
    one.rank0.close()
