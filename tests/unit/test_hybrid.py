"""The table of `hybrid`: bags, routes, updates; and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolecall import config
from rolecall.config import UsageError
from rolecall.job import rpc, stdlib
from rolecall.jobs.hybrid import HybridSettings, data, server, snapshot
from rolecall.jobs.hybrid.table import Bags, Plan, Table

SMALL = {"num_embeddings": 50, "embedding_dim": 3, "lr": 0.5}


def settings(**own: object) -> HybridSettings:
    return HybridSettings(**{**SMALL, **own})  # type: ignore[arg-type]


def filled(own: HybridSettings, ordinal: int = 0) -> Table:
    table = Table(own, ordinal)
    table.fill()
    return table


def bags(weighted: bool, seed: int = 0) -> Bags:
    """Five bags; the second and the last are empty, and rows come several times."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(12, (9,), generator=generator) * 4
    return Bags(rows, torch.tensor([0, 4, 4, 6, 9, 9]), torch.rand(9, generator=generator) if weighted else None)


def pooled(weight: Tensor, one: Bags) -> Tensor:
    """Written out."""
    found = []
    for begin, end in zip(one.offsets[:-1], one.offsets[1:], strict=True):
        factors = torch.ones(int(end - begin)) if one.weights is None else one.weights[begin:end]
        found.append((weight[one.rows[begin:end]] * factors[:, None]).sum(0))
    return torch.stack(found)


# ---- the table


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_shards_together_are_one_table(servers: int, weighted: bool) -> None:
    whole = filled(settings())
    shards = [filled(settings(servers=servers), ordinal) for ordinal in range(servers)]
    assert sum(len(one.weight) for one in shards) == 50
    for number, shard in enumerate(shards):
        assert torch.equal(whole.weight[number::servers], shard.weight)
    one = bags(weighted)
    found = sum(shard(share) for shard, share in zip(shards, one.route(servers), strict=True))
    torch.testing.assert_close(found, whole(one))
    torch.testing.assert_close(whole(one), pooled(whole.weight, one))
    assert not whole(one)[[1, 4]].any()


def test_first_values_are_of_the_seed_and_small() -> None:
    one, two, other = filled(settings()), filled(settings()), filled(settings(seed=2))
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(one.weight, other.weight)
    assert float(one.weight.detach().abs().max()) <= 1 / 3


@pytest.mark.parametrize("weighted", [False, True])
def test_a_plan_makes_the_gradient_that_autograd_makes(weighted: bool) -> None:
    lookups = [bags(weighted, seed) for seed in range(3)]
    weight = torch.randn(50, 3, requires_grad=True)
    outer = torch.randn(15, 3)
    (torch.cat([pooled(weight, one) for one in lookups]) * outer).sum().backward()
    plan = Plan.of(lookups)
    assert plan.rows.tolist() == sorted({row for one in lookups for row in one.rows.tolist()})
    assert weight.grad is not None
    torch.testing.assert_close(plan.gradient(outer), weight.grad[plan.rows])
    untouched = torch.ones(50, dtype=torch.bool).index_fill(0, plan.rows, False)
    assert not weight.grad[untouched].any()


def test_a_plan_of_empty_bags_changes_nothing() -> None:
    table = filled(settings())
    before = table.weight.clone()
    plan = Plan.of([Bags(torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), None)])
    table.update(plan.rows, plan.gradient(torch.ones(2, 3)))
    assert torch.equal(table.weight, before)


def test_sgd_is_torchs() -> None:
    table = filled(settings(optimizer="sgd"))
    other = nn.Parameter(table.weight.detach().clone())
    optimizer = torch.optim.SGD([other], lr=0.5)
    for step in range(3):
        rows, gradient = torch.tensor([3, 7, 20 + step]), torch.randn(3, 3)
        table.update(rows, gradient.clone())
        other.grad = torch.zeros_like(other).index_add(0, rows, gradient)
        optimizer.step()
    torch.testing.assert_close(table.weight, other)


def test_adagrad_has_one_state_a_row() -> None:
    table = filled(settings(optimizer="adagrad"))
    before, squares = table.weight.detach().clone(), torch.zeros(50)
    for _ in range(3):
        rows, gradient = torch.tensor([3, 7]), torch.randn(2, 3)
        table.update(rows, gradient.clone())
        for row, one in zip(rows.tolist(), gradient, strict=True):
            squares[row] += (one**2).mean()
            before[row] -= 0.5 * one / squares[row].sqrt()
    torch.testing.assert_close(table.weight.detach(), before)
    torch.testing.assert_close(table.squares, squares)


@pytest.mark.parametrize("index", [50, -1, 2**31 - 1])
@pytest.mark.parametrize("servers", [1, 3])
def test_an_index_out_of_range_is_named(index: int, servers: int) -> None:
    one = Bags(torch.tensor([4, index]), torch.tensor([0, 2]), None)
    ordinal = index % servers
    table, share = filled(settings(servers=servers), ordinal), one.route(servers)[ordinal]
    with pytest.raises(IndexError, match=f"index {index} is out of range: NUM_EMBEDDINGS=50"):
        table(share)


def test_bags_arrive_as_they_were_sent() -> None:
    for one in (bags(True), bags(False)):
        found = Bags.from_wire(one.to_wire())
        assert torch.equal(found.rows, one.rows)
        assert torch.equal(found.offsets, one.offsets)
        assert (found.weights is None and one.weights is None) or torch.equal(found.weights, one.weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_a_table_that_is_fetched_in_pieces_is_restored_to_any_number_of_servers(
    monkeypatch: pytest.MonkeyPatch, servers: int, rows: int
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", rows * 12)
    own = settings(servers=servers)
    tables = {f"ps_{number}": filled(own, number) for number in range(servers)}
    for table in tables.values():
        table.squares.uniform_()
    calls: list[tuple[str, int, Tensor, Tensor]] = []

    def begin(name: str, function: object, *args: Any) -> torch.futures.Future[Any]:
        answer: torch.futures.Future[Any] = torch.futures.Future()
        if function is server.part:
            _, first, end = args
            answer.set_result((tables[name].weight.detach()[first:end], tables[name].squares[first:end]))
        else:
            calls.append((name, *args))
            answer.set_result(None)
        return answer

    pieces, squares = snapshot.fetch(begin, list(tables), 7, own)
    assert torch.equal(torch.cat(pieces), filled(settings()).weight)
    assert all(len(piece) <= rows * servers for piece in pieces)
    snapshot.restore(begin, ["ps_0", "ps_1"], pieces, squares, settings(servers=2))
    whole = torch.full((50, 3), torch.nan)
    for name, first, weight, _ in calls:
        whole[int(name[-1]) :: 2][first : first + len(weight)] = weight
    assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [198.19.16.3]:37780. This is", True),
        ("[/x/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation", True),
        ("EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_an_all_reduce_that_loses_a_peer_is_no_failure_of_the_trainer(said: str, lost: bool) -> None:
    assert rpc.is_lost(RuntimeError(said)) is lost


# ---- data


def test_samples_are_taken_and_split() -> None:
    packed = data.pack([([1, 2], [0.5, 2.0], 0), ([], [], 1), ([7], [1.0], 2), ([3, 3], [1.0, 1.0], 0)])
    assert packed.bags.offsets.tolist() == [0, 2, 2, 3, 5]
    taken = packed.take(torch.tensor([2, 1, 0]))
    assert (taken.bags.rows.tolist(), taken.bags.offsets.tolist()) == ([7, 1, 2], [0, 1, 1, 3])
    assert taken.labels.tolist() == [2, 1, 0]
    assert taken.bags.weights is not None
    assert taken.bags.weights.tolist() == [1.0, 0.5, 2.0]
    one, two = taken.split([1, 2])
    assert (one.bags.rows.tolist(), two.bags.rows.tolist(), two.bags.offsets.tolist()) == ([7], [1, 2], [0, 0, 2])
    assert two.labels.tolist() == [1, 0]


def test_no_file_of_the_standard_library_is_in_both_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("one", "two", "few"):
        (tmp_path / package).mkdir()
        for number in range(3 if package == "few" else 10):
            lines = "\n".join(f"{package}{number}x{line} = 1" for line in range(20))
            (tmp_path / package / f"{number}.py").write_text(lines)
    (tmp_path / "alone.py").write_text("x = 1\n" * 50)
    monkeypatch.setattr(stdlib, "root", lambda: tmp_path)
    monkeypatch.setattr(data, "FILES", 4)
    found = data.load(settings(num_embeddings=2**31 - 1, ngrams=1))
    assert found.classes == 2
    assert (len(found.train), len(found.test)) == (2 * 8 * 4, 2 * 2 * 4)
    # but for "=" and "1" they share no word
    common = set(found.train.bags.rows.tolist()) & set(found.test.bags.rows.tolist())
    assert len(common) == 2
    assert found.train.bags.weights is not None
    assert float(found.train.bags.weights.sum()) == pytest.approx(len(found.train))


def test_the_default_task_is_there() -> None:
    found = data.load(HybridSettings())
    assert found.classes > 10
    assert len(found.train) > 5000
    assert len(found.test) > 1000
    assert int(found.train.bags.rows.max()) < 1_000_000


def in_range() -> object:
    return [([1, 2], 0), ([49], 1)], [([3], 1)]


def out_of_range() -> object:
    return [([1, 2], 0), ([49, 50], 1)], [([3], 1)]


def negative() -> object:
    return [([1, 2], 0)], [([3], 1), ([-5], 0)]


def bad_label() -> object:
    return [([1, 2], -1)], [([3], 1)]


def not_finite() -> object:
    return [([1, 2], [1.0, float("nan")], 0)], [([3], [1.0], 1)]


def few_weights() -> object:
    return [([1, 2], [1.0], 0)], [([3], [1.0], 1)]


def nothing() -> object:
    return [], [([3], 1)]


def no_pair() -> object:
    return 7


def test_samples_of_ones_own() -> None:
    found = data.load(settings(dataset=f"{__name__}:in_range"))
    assert (len(found.train), len(found.test), found.classes) == (2, 1, 2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("out_of_range", "training sample 1 has the index 50, which is out of range: NUM_EMBEDDINGS=50"),
        ("negative", "test sample 1 has the index -5, which is out of range"),
        ("bad_label", "training sample 0 has the label -1"),
        ("not_finite", "training sample 0 has a weight that is not finite"),
        ("few_weights", "sample 0 must have one weight for each row"),
        ("nothing", "there are no training samples"),
        ("no_pair", "it must return two sequences"),
        ("is_not_there", "cannot be imported"),
    ],
)
def test_bad_samples_are_refused(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refusal:
        data.check(settings(dataset=f"{__name__}:{name}", role="trainer"))
    assert f"DATASET={__name__}:{name}" in str(refusal.value)


def test_a_table_that_no_index_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_EMBEDDINGS", str(2**31))
    with pytest.raises(UsageError, match="NUM_EMBEDDINGS"):
        config.load(HybridSettings)
