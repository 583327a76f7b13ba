"""Settings and identity: every kind of error, the tables, and the rank of a process."""

from __future__ import annotations

import pickle
import re
import socket
from pathlib import Path
from typing import Any

import pydantic
import pytest

from rolecall import config
from rolecall.declare import registry
from rolecall.declare.registry import Identity
from rolecall.errors import UsageError
from rolecall.fields import variables
from rolecall.jobs.rl import RlSettings

SECRET = "correct-horse-battery"
RL = registry.get("rl")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has none of the variables."""
    for name in RlSettings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> RlSettings:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return config.load(RlSettings)


def refusal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    with pytest.raises(UsageError) as refused:
        load(monkeypatch, **variables)
    return str(refused.value)


# ---- errors

BAD = {
    "MASTER_PORT": "0",
    "METRICS_PORT": "65536",
    "PORT": "eighty",
    "CHECKPOINT_INTERVAL": "-1",
    "LEASE_SECONDS": "soon",
    "SEED": "1.5",
    "ORDINAL": "-1",
    "CHECKPOINT_KEEP": "0x10",
    "ON_FINISH": "maybe",
    "DEVICE": "tpu",
    "LOG_FORMAT": "JSON",
    "OBSERVERS": "0",
    "NUM_ENVS": "1e9",
    "LR": "nan",
    "GAMMA": "1.0001",
    "INFERENCE": "both",
    "CLIP_RATIO": "1,5",
    "RPC_TIMEOUT": "0",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named_with_what_would_be_right(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    message = refusal(monkeypatch, **{name: BAD[name]})
    assert message.startswith(f"wrong settings: {name}={BAD[name]!r}: ")
    assert "\n" not in message
    assert re.findall(r"[A-Z_]+=", message) == [f"{name}="]
    row = next(row for row in variables(RlSettings) if row[0] == name)
    assert row[1] in message  # its type
    assert row[3] in message  # its bounds


def test_all_errors_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = {**BAD, "JOB_TOKEN_FILE": str(tmp_path / "none")}
    message = refusal(monkeypatch, **bad, HIDDEN_SIZE="64", POLICY="x:y")
    assert [name for name in bad if not re.search(rf"\b{name}=", message)] == []
    assert "\n" not in message
    assert "HIDDEN_SIZE" not in message
    assert "POLICY" not in message


def test_the_jobs_errors_and_the_shared_ones_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank loads them: JOB itself comes from the environment."""
    for name, value in {"JOB": "rl", "MASTER_PORT": "0", "LR": "-1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        registry.load()
    assert "MASTER_PORT='0'" in str(refused.value)
    assert "LR='-1'" in str(refused.value)


def test_overrides_win_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBSERVERS", "5")
    assert config.load(RlSettings, observers=7).observers == 7
    with pytest.raises(UsageError, match="OBSERVERS='0'"):
        config.load(RlSettings, observers=0)


def test_what_the_environment_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch, OBSERVERS="5", LR="3e-4", CHECKPOINT_DIR="a/b", ON_FINISH="linger")
    given = settings.observers, settings.lr, settings.checkpoint_dir, settings.on_finish
    assert given == (5, 3e-4, Path("a/b"), "linger")


def test_empty_values_are_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose and Kubernetes files set variables to nothing to mean the default."""
    empty = {name.upper(): "" for name in RlSettings.model_fields}
    assert load(monkeypatch, **empty) == RlSettings()


def test_settings_do_not_change() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        RlSettings().lr = 1.0  # type: ignore[misc]


def test_settings_travel_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch, JOB_TOKEN=SECRET, OBSERVERS="4", CHECKPOINT_DIR="a/b")
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.token == SECRET


# ---- bounds, and the table that names them

NUMBERS = [row for row in variables(RlSettings) if row[1] in ("int", "float") and row[3]]


def tries(kind: str, bounds: str) -> tuple[list[str], list[str]]:
    """Values that bounds such as `1 to 9`, `above 0 to 1`, `0 to below 1` let in, and values that they do not."""
    low, _, high = bounds.partition(" to ")
    good, bad = [], []
    for text, sign in ((low, -1.0), (high, 1.0)):
        if not text:
            continue
        bound, is_open = float(text.split()[-1]), text.startswith(("above", "below"))
        step = 1.0 if kind == "int" else max(abs(bound), 1.0) * 1e-6
        (bad if is_open else good).append(bound)
        bad.append(bound + sign * step)
        good.append(bound - sign * step)
    show = "{:.0f}" if kind == "int" else "{!r}"
    return [show.format(value) for value in good], [show.format(value) for value in bad]


@pytest.mark.parametrize(("name", "kind", "bounds"), [(row[0], row[1], row[3]) for row in NUMBERS])
def test_bounds_are_as_the_table_says(monkeypatch: pytest.MonkeyPatch, name: str, kind: str, bounds: str) -> None:
    good, bad = tries(kind, bounds)
    assert good
    assert bad
    for value in good:
        assert getattr(load(monkeypatch, **{name: value}), name.lower()) == float(value)
    for value in bad:
        assert f"{name}='{value}'" in refusal(monkeypatch, **{name: value})


def test_the_table_has_every_variable() -> None:
    rows = variables(RlSettings)
    assert sorted(row[0].lower() for row in rows) == sorted(RlSettings.model_fields)
    for name, kind, _, _, meaning in rows:
        assert re.fullmatch(r"str|int|float|bool|path|secret|[a-z]+(\|[a-z]+)+", kind), name
        assert len(meaning) > 10, name


def test_the_tables_defaults_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {name: default for name, _, default, _, _ in variables(RlSettings) if default}
    assert {"PORT", "ENV_TIMEOUT", "ENV_ID", "ON_FINISH", "CHECKPOINT_DIR"} <= set(shown)
    assert load(monkeypatch, **shown) == RlSettings()
    unset = {row[0].lower() for row in variables(RlSettings)} - {name.lower() for name in shown}
    assert all(getattr(RlSettings(), name) in (None, "") for name in unset)


# ---- the token


def test_the_token_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"\n  {SECRET}\n")
    assert load(monkeypatch, JOB_TOKEN_FILE=str(file)).token == SECRET
    assert load(monkeypatch, JOB_TOKEN=SECRET[::-1]).token == SECRET[::-1]  # given outright, it wins
    monkeypatch.delenv("JOB_TOKEN_FILE")
    assert load(monkeypatch).token == SECRET[::-1]


def test_a_token_that_can_be_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("fifteen letters\n")
    for variable, value in (("JOB_TOKEN_FILE", str(file)), ("JOB_TOKEN", "fifteen letters")):
        message = refusal(monkeypatch, **{variable: value})
        assert f"{variable}=" in message
        assert "has fewer than 128 bits; `rolecall token` makes one" in message
        assert "fifteen letters" not in message
        monkeypatch.delenv(variable)


def test_with_tls_off_a_token_file_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load(monkeypatch, TLS="off", JOB_TOKEN_FILE=str(tmp_path / "none"))
    assert (settings.secure, settings.token) == (False, "")


def test_a_certificate_goes_with_its_key_and_its_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TLS_KEY and TLS_CA missing" in refusal(monkeypatch, TLS_CERT="a.pem")
    assert load(monkeypatch, TLS_KEY="b.pem", TLS_CA="c.pem").tls_cert == Path("a.pem")


@pytest.mark.parametrize(
    "content", [None, b"", b" \n\t\n", b"\xff\xfe\x00"], ids=["directory", "empty", "blank", "binary"]
)
def test_a_token_file_of_no_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path if content is None else tmp_path / "token"  # a directory is none
    if content is not None:
        file.write_bytes(content)
    message = refusal(monkeypatch, JOB_TOKEN_FILE=str(file))
    assert message.startswith(f"wrong settings: JOB_TOKEN_FILE='{file}': ")
    assert message.count("JOB_TOKEN_FILE") == 1
    assert "\n" not in message


@pytest.mark.parametrize("from_file", [True, False])
def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, from_file: bool) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    settings = load(monkeypatch, **({"JOB_TOKEN_FILE": str(file)} if from_file else {"JOB_TOKEN": SECRET}))
    assert settings.token == SECRET
    shown = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json(), str(vars(settings))]
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(UsageError) as refused:
        config.load(RlSettings)
    shown += [str(refused.value), repr(refused.value)]
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UsageError) as refused:
        config.load(RlSettings, job_token={"not": SECRET})
    shown += [str(refused.value)]
    assert "JOB_TOKEN=" in shown[-1]
    assert [text for text in shown if SECRET in text] == []


# ---- misspelt names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OBSERVER", "OBSERVERS"),
        ("MASTER_ADRR", "MASTER_ADDR"),
        ("master_adrr", "MASTER_ADDR"),
        ("MAX_ITERATION", "MAX_ITERATIONS"),
        ("CHECKPOINTS_DIR", "CHECKPOINT_DIR"),
        ("NUM_ENV", "NUM_ENVS"),
        ("JOBTOKEN", "JOB_TOKEN"),
        ("LEASE_SECOND", "LEASE_SECONDS"),
    ],
)
def test_a_misspelt_name_is_recognised(name: str, meant: str) -> None:
    assert config.misspelt(RlSettings.model_fields, {name: "1", "PATH": "/bin"}) == [(name, meant)]


def test_others_names_are_left_alone() -> None:
    others = (
        "PATH HOME HOSTNAME LANG LC_ALL PWD SHLVL TERM USER _ TZ PYTHONPATH PYTHONUNBUFFERED OMP_NUM_THREADS "
        "LOCAL_RANK GROUP_RANK KUBERNETES_SERVICE_HOST KUBERNETES_PORT_443_TCP AGENT_PORT AGENT_SERVICE_HOST "
        "OBSERVER_PORT_8000_TCP GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES "
        "PROMETHEUS_MULTIPROC_DIR"
    )
    known = {name.upper(): "" for name in RlSettings.model_fields} | {"observers": "2"}
    assert config.misspelt(RlSettings.model_fields, {**dict.fromkeys(others.split(), "1"), **known}) == []


def test_misspelt_names_are_looked_for_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBSERVER", "4")
    assert ("OBSERVER", "OBSERVERS") in config.misspelt(RlSettings.model_fields)


# ---- the job and its roles


def test_an_unknown_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, problem in (("", "is missing"), ("rll", "no such job"), ("os", "no such job"), ("RL", "no such job")):
        with pytest.raises(UsageError, match=rf"^JOB={name!r}: {problem} \({', '.join(registry.JOBS)}, FILE.py or "):
            registry.get(name)
    for name, problem in (("../rl", "no such file"), ("chess.py", "no such file"), ("no.chess", "cannot be imported")):
        with pytest.raises(UsageError, match=f"^{name}:? {problem}"):
            registry.get(name)
    with pytest.raises(UsageError, match="JOB='': is missing"):
        registry.load()
    monkeypatch.setenv("JOB", "chess")
    with pytest.raises(UsageError, match="JOB='chess': no such job"):
        registry.load()


def test_the_job_from_the_environment_or_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBSERVERS", "3")
    for job, settings in (registry.load("rl"), registry.load("rl", seed=4)):
        assert job is RL
        assert isinstance(settings, RlSettings)
        assert (settings.job, settings.observers) == ("rl", 3)
    monkeypatch.setenv("JOB", "rl")
    assert registry.load()[1] == registry.load("rl")[1]


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [((3, 2, 4), False), ((2, 2, 2), False), ((2, 3, 4), True), ((5, 1, 4), True), ((3, 4, 2), True)],
)
def test_a_count_lies_between_its_minimum_and_maximum(counts: tuple[int, int, int], wrong: bool) -> None:
    settings = RlSettings(observers=counts[0], min_observers=counts[1], max_observers=counts[2])
    if wrong:
        problem = "OBSERVERS={} .*MIN_OBSERVERS={} .*MAX_OBSERVERS={}, ".format(*counts)
        with pytest.raises(UsageError, match=problem):
            registry.roles(RL, settings)
        return
    agent, observer = registry.roles(RL, settings)
    assert (agent.name, agent.count, agent.minimum, agent.maximum, agent.elastic) == ("agent", 1, 1, 1, False)
    assert (observer.count, observer.minimum, observer.maximum, observer.elastic) == (*counts, True)


# ---- which rank


def identity(host: str = "3b40cf1c355c", **changed: Any) -> tuple[str, int | None]:
    settings = RlSettings(**changed)
    rank = registry.identity(registry.roles(RL, settings), settings, host)
    assert isinstance(rank, Identity)
    return rank.role, rank.ordinal


OBSERVER: dict[str, Any] = {"role": "observer"}


@pytest.mark.parametrize(
    ("settings", "hosts", "expected"),
    [
        (OBSERVER, "observer-3 observer-03 x-observer-3 rolecall-rl-observer-3 observer-observer-3", ("observer", 3)),
        (
            OBSERVER,
            "3b40cf1c355c observer-3-x observer-3-1 observer observer- observer-x3 observer--3 observer3 xobserver-3 "
            "Observer-3 agent-3 observer-agent-3 observer-12345",
            ("observer", None),
        ),
        (OBSERVER | {"ordinal": 1}, "observer-3 observer-99 x", ("observer", 1)),
        ({"role": "agent"}, "x agent-0", ("agent", 0)),
        # torch's variable, or a host name that says it, fills the roles in order
        ({"rank": 0}, "x observer-2 rank-7", ("agent", 0)),
        ({"rank": 2, "observers": 3, "world_size": 4}, "x", ("observer", 1)),
        ({}, "rank-2 mine-rank-2", ("observer", 1)),
        (OBSERVER | {"rank": 0, "world_size": 17}, "observer-5", ("observer", 5)),
        ({"role": "agent", "rank": 7}, "x", ("agent", 0)),
        # the gang places the others: an elastic role may grow
        ({"rank": 3}, "x", ("", None)),
        ({}, "3b40cf1c355c observer-3 rank-3 rank rank- rank-1-x frank-1 rank-12345", ("", None)),
        ({"world_size": 3}, "x", ("", None)),
    ],
)
def test_a_rank_is_known_by_role_number_or_host_name(
    settings: dict[str, Any], hosts: str, expected: tuple[str, int | None]
) -> None:
    assert {host: identity(host, **settings) for host in hosts.split()} == dict.fromkeys(hosts.split(), expected)


@pytest.mark.parametrize(
    ("host", "changed", "problem"),
    [
        ("x", {"role": "observer", "ordinal": 64}, "ORDINAL=64: observer has ordinals 0 to 63"),
        ("x", {"role": "observer", "ordinal": 3, "max_observers": 3}, "ORDINAL=3: observer has ordinals 0 to 2"),
        ("observer-64", {"role": "observer"}, "the host name observer-64: observer has ordinals 0 to 63"),
        ("x", {"role": "agent", "ordinal": 1}, "ORDINAL=1: agent has ordinals 0 to 0"),
        ("x", {"role": "Observer"}, r"ROLE='Observer': no such role \(agent, observer\)"),
        ("x", {"rank": 3, "world_size": 3}, "RANK=3: the job has ranks 0 to 2"),
        ("x", {"rank": 5, "observers": 4, "max_observers": 4}, "RANK=5: the job has ranks 0 to 4"),
        ("x", {"ordinal": 1}, r"ORDINAL=1: of which ROLE\? \(agent, observer\)"),
        ("x", {"rank": 0, "world_size": 2}, r"WORLD_SIZE=2: the counts make 3 \(1 agent \+ 2 observer\)"),
    ],
)
def test_an_impossible_rank_is_refused(host: str, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        identity(host, **changed)


def test_the_hosts_name_without_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "observer-2.observers.training.svc.cluster.local")
    assert config.host_name() == "observer-2"


# ---- what is handed on


def test_the_environment_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLECALL_TEST_A", "old")
    monkeypatch.delenv("ROLECALL_TEST_B", raising=False)
    child = config.child_environment(ROLECALL_TEST_A="new", ROLECALL_TEST_B="1")
    assert (child["ROLECALL_TEST_A"], child["ROLECALL_TEST_B"]) == ("new", "1")
    assert "ROLECALL_TEST_B" not in config.child_environment()
    assert config.child_environment()["ROLECALL_TEST_A"] == "old"
