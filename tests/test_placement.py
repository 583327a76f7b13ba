"""Where a process that srun or torchrun has started finds itself and rank 0."""

from __future__ import annotations

from typing import Any

import pytest

from rolecall import config, placement
from rolecall.config import Settings
from rolecall.declare import registry
from rolecall.errors import UsageError
from rolecall.jobs.rl import RlSettings
from rolecall.launch import here
from rolecall.placement import FIRST_METRICS_PORT, FIRST_PORT, SLOTS, Placement

RL = registry.get("rl")
SRUN = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "3"}
SRUN |= {"SLURM_STEP_NODELIST": "node[2-4]", "SLURMD_NODENAME": "node2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "host"}
TORCHRUN |= {"MASTER_PORT": "29500", "LOCAL_RANK": "1"}
OWN = {"SLURMD_NODENAME": ""}
HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_STEP_NODELIST": "node[1,3]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node1",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment has no variables of a rank's place."""
    for name in {*Settings.model_fields, *RlSettings.model_fields, *map(str.lower, {*SRUN, *TORCHRUN, *HETEROGENEOUS})}:
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def load(started: pytest.MonkeyPatch, environment: dict[str, str], **settings: Any) -> RlSettings:
    for name, value in environment.items():
        started.setenv(name, value)
    return config.load(RlSettings, **settings)


def place(environment: dict[str, str]) -> Placement:
    found = placement.find(environment)
    assert found is not None
    return found


# ---- node lists


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a", "a"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("a,b[01-02]-x,c", "a b01-x b02-x c"),
        ("n[08-11,100]", "n08 n09 n10 n11 n100"),
        ("rack[0-1]node[1-2],z", "rack0node1 rack0node2 rack1node1 rack1node2 z"),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text: str, expected: str) -> None:
    assert [*placement.hosts(text)] == expected.split()


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[a-b]", "n[[1]]", "n[]", "n[1-2-3]"])
def test_an_unreadable_node_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read; set MASTER_ADDR"):
        list(placement.hosts(text))


def test_the_first_of_many_nodes_is_found_at_once() -> None:
    assert place(SRUN | {"SLURM_STEP_NODELIST": "n[1-10000000]"}).address == "n1"


# ---- srun


def test_a_task_of_srun_is_a_rank(started: pytest.MonkeyPatch) -> None:
    settings = load(started, SRUN)
    assert (settings.rank, settings.world_size, settings.master_addr) == (1, 3, "node2")
    assert registry.identity(registry.roles(RL, settings), settings, "x").role == "observer"
    assert settings.rank0_port == load(started, {"SLURM_PROCID": "0"}).port


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"ROLE": "observer"}, "rank", None),
        ({"RANK": "2"}, "rank", 2),
        ({"RANK": "2"}, "world_size", None),
        ({"MASTER_ADDR": "node2-ib"}, "master_addr", "node2-ib"),
        ({"PORT": "30000"}, "port", 30000),
        ({"PORT": "30000"}, "rank0_port", 30000),
        ({"MASTER_PORT": "30000"}, "rank0_port", 30000),
        ({"METRICS_PORT": "30001"}, "metrics_port", 30001),
        ({"ROLE": "", "PORT": ""}, "rank", 1),
    ],
)
def test_a_variable_that_is_set_wins(
    started: pytest.MonkeyPatch, given: dict[str, str], field: str, expected: object
) -> None:
    assert getattr(load(started, SRUN | given), field) == expected


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_a_process_without_srun_has_no_place(started: pytest.MonkeyPatch, missing: str) -> None:
    settings = load(started, {name: value for name, value in SRUN.items() if name != missing})
    assert (settings.rank, settings.port) == (None, Settings().port)
    assert config.outside_step() == ("12" if missing == "SLURM_STEP_ID" else "")


def test_of_a_heterogeneous_job_the_first_component_has_rank_0() -> None:
    assert place(SRUN | HETEROGENEOUS).address == "node3"
    assert place(SRUN | HETEROGENEOUS | {"SLURM_STEP_NODELIST": "node1"}).address == "node1"


def test_process_0_on_another_node_is_refused() -> None:
    moved = SRUN | {"SLURM_PROCID": "0", "SLURMD_NODENAME": "node3"}
    with pytest.raises(UsageError, match="SLURM_PROCID=0 runs on node3, and the others look for it on node2"):
        placement.find(moved)
    assert place(moved | {"MASTER_ADDR": "node3"}).number == 0


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="SLURM_NTASKS='x': is no number"):
        placement.find(SRUN | {"SLURM_NTASKS": "x"})


def ports(**changed: str) -> list[int]:
    found = place(SRUN | changed)
    return [found.port, found.metrics_port]


def test_ranks_of_a_job_and_of_its_neighbours_have_ports_of_their_own() -> None:
    jobs = [str(number) for number in range(4000, 4010)]
    taken = [
        port for job in jobs for rank in range(64) for port in ports(SLURM_JOB_ID=job, SLURM_PROCID=str(rank), **OWN)
    ]
    assert len({*taken}) == len(taken)
    assert min(taken) >= FIRST_PORT
    assert max(taken) < FIRST_METRICS_PORT + 2 * SLOTS <= here.PORTS[0]
    assert all(port % 2 == 0 for port in taken)  # rank 0 may take the next one too


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    steps = [ports(SLURM_STEP_ID=str(step), SLURM_PROCID=str(rank), **OWN) for step in range(4) for rank in range(64)]
    assert len({port for step in steps for port in step}) == 2 * len(steps)


# ---- torchrun


def test_a_process_of_torchrun_is_a_rank(started: pytest.MonkeyPatch) -> None:
    settings = load(started, TORCHRUN)
    assert (settings.rank, settings.world_size, settings.master_addr) == (1, 3, "host")
    assert 29500 not in (settings.port, settings.rank0_port, settings.metrics_port)
    assert settings.rank0_port == load(started, {"RANK": "0"}).port


def test_torchrun_in_a_step_of_srun_decides(started: pytest.MonkeyPatch) -> None:
    assert load(started, SRUN | TORCHRUN | {"RANK": "2"}).rank == 2


def test_a_process_below_torchrun_that_has_a_role_is_no_rank_of_it(started: pytest.MonkeyPatch) -> None:
    settings = load(started, TORCHRUN | {"ROLE": "observer", "PORT": "30000"})
    assert (settings.master_port, settings.port) == (29500, 30000)


def test_without_torchrun_master_port_is_rank_0s(started: pytest.MonkeyPatch) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert load(started, variables).rank0_port == 29500


# ---- what is wrong


def test_too_few_or_too_many_tasks_are_refused_by_their_variable(started: pytest.MonkeyPatch) -> None:
    settings = load(started, SRUN | {"SLURM_NTASKS": "2"})
    with pytest.raises(UsageError, match=r"SLURM_NTASKS=2: the counts make 3 \(1 agent \+ 2 observer\), at most 65"):
        registry.identity(registry.roles(RL, settings), settings, "x")


def test_tasks_beyond_the_counts_join_an_elastic_role(started: pytest.MonkeyPatch) -> None:
    settings = load(started, SRUN | {"SLURM_NTASKS": "9", "SLURM_PROCID": "8"})
    assert registry.identity(registry.roles(RL, settings), settings, "x").role == ""


def test_a_port_that_is_taken_says_what_it_follows_from(started: pytest.MonkeyPatch) -> None:
    assert config.port_advice("PORT") == "choose another"
    load(started, SRUN)
    assert "SLURM_JOB_ID: submit the job again" in config.port_advice("PORT")
    started.setenv("PORT", "30000")
    assert config.port_advice("PORT") == "choose another"
    started.delenv("PORT")
    load(started, TORCHRUN)
    assert "MASTER_PORT: start torchrun with another --master-port" in config.port_advice("METRICS_PORT")
