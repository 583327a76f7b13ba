"""Who else uses the machine, as far as a run warns of them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rolecall import machine
from rolecall.config import Settings
from rolecall.torch_rpc import store

ACCOUNTS = {"root": (0, "/bin/bash"), "postgres": (101, "/bin/bash"), "nobody": (65534, "/bin/sh")}
ACCOUNTS |= {"me": (1000, "/bin/sh"), "bob": (1002, "/bin/fish"), "alice": (1001, "")}
ACCOUNTS |= {"mail": (1003, "/usr/sbin/nologin"), "ftp": (1004, "/bin/false")}
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Gives the machine ACCOUNTS and `unlisted` ones, and processes, by name with their users, of which the numbers
    begin with `first`. This process is user 1000's.
    """

    def give(processes: dict[str, int], unlisted: dict[str, tuple[int, str]] | None = None, first: int = 1) -> None:
        accounts = {**ACCOUNTS, **(unlisted or {})}
        entries = {
            number: SimpleNamespace(pw_name=name, pw_uid=number, pw_shell=shell)
            for name, (number, shell) in accounts.items()
        }
        infos = [
            {"pid": pid, "name": name, "uids": SimpleNamespace(real=user)}
            for pid, (name, user) in enumerate(processes.items(), first)
        ]
        ended = {"pid": 99, "name": "sh", "uids": None}
        monkeypatch.setattr(psutil, "process_iter", lambda _: [SimpleNamespace(info=each) for each in [*infos, ended]])
        monkeypatch.setattr(pwd, "getpwall", lambda: [entries[number] for number, _ in ACCOUNTS.values()])
        monkeypatch.setattr(pwd, "getpwuid", entries.__getitem__)
        monkeypatch.setattr(os, "getuid", lambda: 1000)
        connect(monkeypatch, lo=True, eth0=True)

    return give


def connect(monkeypatch: pytest.MonkeyPatch, **up: bool) -> None:
    """Gives the machine network interfaces."""
    statuses = {name: SimpleNamespace(isup=is_up) for name, is_up in up.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: statuses)


@pytest.mark.parametrize("service", ["sshd", "systemd-logind"])
def test_accounts_that_can_log_in_are_people(run: Run, service: str) -> None:
    run({"systemd": 0, service: 0, "bash": 1000})
    assert machine.other_people() == ["alice", "bob"]


def test_where_processes_are_hidden_accounts_are_people(run: Run) -> None:
    run({"bash": 1000}, first=4711)
    assert machine.other_people() == ["alice", "bob"]


def test_where_nobody_can_log_in_owners_of_processes_are(run: Run) -> None:
    """As in a container. Accounts of a directory service are in no list, users of another container have none."""
    processes = {"tini": 0, "bash": 1000, "postgres": 101, "nginx": 65534, "vim": 50_000, "node": 100_999, "cron": 1003}
    run(processes, {"carol": (50_000, "/bin/bash")})
    assert machine.other_people() == ["carol"]


def test_nobody_is_in_a_network_namespace_of_the_runs_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run({"sshd": 0, "vim": 1002})
    connect(monkeypatch, lo=True, tunl0=False)
    assert machine.other_people() == []


@pytest.mark.parametrize("names", [[], ["alice", "bob", "carol", "dave", "eve"]])
def test_where_torch_listens_other_people_are_named_in_one_line(
    names: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "other_people", lambda: names)
    settings = Settings(master_addr="127.0.0.1", bind_addr="127.0.0.1")
    store.open_store(settings, generation=1, rank=0, world_size=1, port=0)
    lines = capfd.readouterr().err.splitlines()
    warnings = [line for line in lines if "[c10d]" not in line]  # torch's own, of a machine without names
    assert len(warnings) == bool(names)
    assert all("(alice, bob, carol and 2 more)" in line and store.OTHER_USERS_DOC in line for line in warnings)


def test_the_warnings_page_has_what_it_names() -> None:
    page, _, heading = store.OTHER_USERS_DOC.partition("#")
    lines = (Path(__file__).parents[1] / page).read_text().splitlines()
    assert f"##-{heading}" in [line.lower().replace(" ", "-") for line in lines]
