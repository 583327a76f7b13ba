"""Torch's own rendezvous, once it is adopted: who meets whom, and what a program finds in its environment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, Store, TCPStore, rpc
from torch.distributed.rendezvous import _rendezvous_handlers, rendezvous

from rolecall import config
from rolecall.config import Settings
from rolecall.torch_rpc import adopt


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch and the environment are afterwards as they were."""
    handlers = dict(_rendezvous_handlers)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(rpc, "init_rpc", rpc.init_rpc)
    yield
    _rendezvous_handlers.update(handlers)
    multiprocessing.current_process()._config.pop(adopt.INHERITED, None)  # type: ignore[attr-defined]


@pytest.fixture
def store() -> Store:
    """That of generation 1."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return PrefixStore("generation-1", store)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(job="script", checkpoint_dir=tmp_path, master_addr="127.0.0.1", port=4000)


def meet(url: str, rank: int = -1, world_size: int = -1) -> tuple[Store, int, int]:
    return next(rendezvous(url, rank, world_size))


def keys_of(store: Store, before: Store) -> bool:
    """Whether both are the same meeting's."""
    before.set("key", "value")
    before.get("key")  # set() waits for no answer; one connection's requests are handled in their order
    return bool(store.check(["key"]))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("env://", "env://", True),
        ("tcp://localhost:1", "tcp://rank-0.somewhere:1", True),  # a host has more than one name
        ("tcp://localhost:1", "tcp://localhost:2", False),
        ("tcp://localhost:4000", "env://", False),
        ("file:///tmp/a", "file:///tmp/a", True),
        ("file:///tmp/a", "file:///tmp/b", False),
    ],
)
def test_who_meets(store: Store, settings: Settings, one: str, other: str, same: bool) -> None:
    adopt.adopt(settings, 0, 2, 1, store)
    first, rank, world_size = meet(one, 0, 2)
    assert (rank, world_size) == (0, 2)
    for size in (2, 3):
        assert not keys_of(meet(one, 0, size)[0], first)  # a second meeting, or another group's, finds none of its keys
    first.delete_key("key")
    adopt.adopt(settings, 1, 2, 1, store)  # as in another process
    second, rank, world_size = meet(other, 1, 2)
    assert (rank, world_size) == (1, 2)
    assert keys_of(second, first) is same
    first.delete_key("key")


def test_rank_and_world_size_are_those_of_the_environment(store: Store, settings: Settings) -> None:
    adopt.adopt(settings, 1, 3, 1, store)
    assert meet("env://")[1:] == (1, 3)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "2"  # a program may set its own
    assert meet("env://")[1:] == (0, 2)


def test_a_rank_that_meets_in_the_place_of_another_is_refused(store: Store, settings: Settings) -> None:
    """As the ranks of a program do that starts its ranks itself, and is started in each rank all the same."""
    adopt.adopt(settings, 0, 2, 1, store)
    meet("env://", 0, 2)
    adopt.adopt(settings, 1, 2, 1, store)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 has met in rank 0.*FILE\.py:FUNCTION"):
        meet("env://", 0, 2)
    meet("env://", 0, 1)  # a group of its own


def test_a_program_that_is_only_loaded_meets_nobody(settings: Settings) -> None:
    adopt.adopt(settings, 0, 2)
    with pytest.raises(RuntimeError, match="a program that is imported meets nobody"):
        meet("tcp://localhost:1", 0, 2)


def test_rpc_and_a_group_meet_apart_over_tcp(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def init_rpc(name: str, backend: object, rank: int, world_size: int, options: object) -> None:
        calls.append((name, rank, world_size, options, meet("env://", rank, world_size)[0]))

    monkeypatch.setattr(rpc, "init_rpc", init_rpc)
    adopt.adopt(settings, 0, 2, 1, store)
    adopt.adopt(settings, 0, 2, 1, store)
    group = meet("env://", 0, 2)[0]
    given = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=7, init_method="tcp://localhost:9")
    rpc.init_rpc("one", rank=0, world_size=2)
    rpc.init_rpc("two", rank=0, world_size=2, rpc_backend_options=given)
    (one, _, _, default, first), (two, _, _, options, second) = calls
    assert (one, two) == ("one", "two")
    assert (default.num_worker_threads, default.rpc_timeout, default.init_method) == (16, 60, "env://")
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (3, 7, "tcp://localhost:9")
    assert not keys_of(first, group)
    assert not keys_of(second, first)


def test_options_of_another_backend_are_left_to_torch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(rpc, "init_rpc", lambda *arguments: taken.append(arguments[-1]))
    adopt.adopt(settings, 0, 2)
    rpc.init_rpc("one", rpc_backend_options="mine")
    assert taken == ["mine"]


def test_torchruns_variables_on_one_machine_and_with_one_for_each_rank(settings: Settings, tmp_path: Path) -> None:
    variables = adopt.variables(settings, 1, 3, generation=4)
    assert variables == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "rank",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "script",
        "ROLECALL_GENERATION": "4",
        "CHECKPOINT_DIR": str(tmp_path / "files"),
    }
    apart = adopt.variables(settings.model_copy(update={"master_addr": "192.0.2.1"}), 1, 3, generation=1)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [apart[name] for name in names] == ["0", "1", "1", "3"]
    adopt.adopt(settings, 1, 3, 4)
    assert variables.items() <= config.child_environment().items()


def test_torchruns_own_place_on_a_node_is_kept(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in adopt.variables(settings, 1, 3, 1):
        monkeypatch.setenv(name, "")  # as it is restored after this test
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    adopt.adopt(settings, 2, 4)
    assert [config.exported(name) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == ["2", "1", "1"]
