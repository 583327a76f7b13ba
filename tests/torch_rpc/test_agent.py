"""The RPC agent's start: the maps of devices, and the wait for all."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.distributed import DistStoreError, HashStore, Store, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import api

from rolecall.config import Settings
from rolecall.torch_rpc import agent

CUDA = torch.device("cuda:0")


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What agents are made with; none is made."""
    made_with: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        rpc, "TensorPipeAgent", lambda *arguments, **maps: made_with.append((*arguments, *maps.values()))
    )
    monkeypatch.setattr(api, "_init_rpc_states", lambda agent: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return made_with


def start(store: Store, rank: int, world_size: int, maps: dict[str, Any] | None = None, timeout: float = 20.0) -> None:
    options: Any = SimpleNamespace(device_maps=maps or {}, rpc_timeout=timeout)
    agent._start(store, f"worker_{rank}", rank, world_size, options)


def test_a_peer_that_sends_from_its_gpu_sends_to_ours(agents: list[tuple[Any, ...]]) -> None:
    start(HashStore(), 0, 1, {"worker_1": {CUDA: CUDA}, "worker_2": {CUDA: CUDA}})
    (*_, backwards, devices) = agents[0]
    assert backwards == {"worker_1": {CUDA: CUDA}, "worker_2": {CUDA: CUDA}}
    assert devices == [CUDA]


def test_no_rank_goes_on_before_all_have_started(agents: list[tuple[Any, ...]]) -> None:
    store = HashStore()
    threads = [threading.Thread(target=start, args=(store, rank, 3), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    store.wait(["ready-0", "ready-1"], timedelta(seconds=20))
    assert not store.check(["all-ready"])
    start(store, 2, 3)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("address", "tls", "device", "scope", "expected"),
    [
        ("127.0.0.1", "require", "cpu", None, ["cma", "basic"]),
        ("127.0.0.1", "off", "cpu", "0", ["cma", "basic"]),
        ("127.0.0.1", "require", "cpu", "1", ["basic"]),
        ("127.0.0.1", "always", "cpu", None, ["basic"]),
        ("10.0.0.1", "require", "cpu", None, ["basic"]),
        ("127.0.0.1", "require", "cuda", None, ["basic", "cuda_basic"]),
    ],
)
def test_ranks_of_one_machine_read_tensors_from_each_other_where_nothing_has_to_be_opened_for_it(
    tmp_path: Path,
    address: str,
    tls: Literal["require", "always", "off"],
    device: str,
    scope: str | None,
    expected: list[str],
) -> None:
    yama = tmp_path / "ptrace_scope"
    if scope is not None:
        yama.write_text(scope + "\n")
    assert agent.channels(Settings(master_addr=address, tls=tls), device, yama) == expected


def test_memory_that_may_not_be_read_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the system call filters of some containers."""
    assert agent.reads_memory()
    monkeypatch.setattr(agent, "reads_memory", lambda: False)
    assert agent.channels(Settings(master_addr="127.0.0.1"), "cpu", tmp_path / "none") == ["basic"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_wait_for_a_rank_that_does_not_start_ends(agents: list[tuple[Any, ...]], rank: int) -> None:
    with pytest.raises(DistStoreError):
        start(HashStore(), rank, 2, timeout=0.1)
