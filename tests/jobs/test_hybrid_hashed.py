"""Hashed tables of `hybrid`: births, evictions and rows against a model that is written with dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from torch import Tensor

from rolecall import UsageError, telemetry
from rolecall.checkpoint import capture, checkpoint
from rolecall.export import exporting
from rolecall.jobs.hybrid import JOB, HybridSettings, data, evaluate, export, hashed, hashed_ids
from rolecall.jobs.hybrid.hashed import HashedTable
from rolecall.jobs.hybrid.hashed_ids import Filter
from rolecall.jobs.hybrid.hashed_map import SlotMap
from rolecall.jobs.hybrid.model import LocalModel, build_table
from rolecall.jobs.hybrid.table import Bags
from tests.context.contexts import value
from tests.export import exports
from tests.jobs.test_hybrid_sharded import make_step as make_step_at
from tests.jobs.test_hybrid_sharded import together

WIDTH = 3
IDS = [0, 1, -1, 2**63 - 1, -(2**63), *(hashed_ids.mix(np.arange(1, 61)).view(np.int64).tolist())]


def chosen(**changes: Any) -> HybridSettings:
    # the filter has so many cells that no two ids of a test share one
    return HybridSettings(
        **{"table": "hashed", "embedding_dim": WIDTH, "max_rows": 40, "filter_ids": 2**18, "lr": 0.5, **changes}
    )


def bags(*each: Sequence[int]) -> Bags:
    lengths = torch.tensor([0, *map(len, each)])
    return Bags(torch.tensor([one for ids in each for one in ids], dtype=torch.int64), lengths.cumsum(0), None)


def gradient_of(ids: Tensor) -> Tensor:
    """One for each id, by which rows differ."""
    return torch.from_numpy(hashed_ids.initial(ids.numpy(), WIDTH, 99)) * 5


def make_step(servers: Sequence[HashedTable], ids: Iterable[int]) -> None:
    """One bag for each id, of which the gradient is that of the id."""
    lookup = bags(*([each] for each in ids))
    for table, share in zip(servers, lookup.route(len(servers), servers[0].settings.cells), strict=True):
        plan = table.plan([share])
        table.advance(plan, plan.gradient(gradient_of(lookup.rows)))


def values(servers: Sequence[HashedTable], ids: Iterable[int]) -> Tensor:
    """The vectors of `ids`, as an evaluation gets them."""
    lookup = bags(*([each] for each in ids))
    shares = lookup.route(len(servers), servers[0].settings.cells)
    return sum((table(share).detach() for table, share in zip(servers, shares, strict=True)), torch.zeros(()))


def build(servers: int, **changes: Any) -> list[HashedTable]:
    built = [build_table(chosen(servers=servers, **changes), ordinal) for ordinal in range(servers)]
    assert all(isinstance(table, HashedTable) for table in built)
    return built  # type: ignore[return-value]


class Model:
    """What a hashed table of one server must come to."""

    def __init__(self, given: HybridSettings) -> None:
        self.settings, self.step = given, 0
        self.sighted: set[int] = set()
        self.seen: dict[int, int] = {}
        self.rows: dict[int, Tensor] = {}
        self.squares: dict[int, float] = {}

    def make_step(self, ids: Iterable[int]) -> None:
        s, looked_up = self.settings, set(ids)
        self.step += 1
        if s.ttl:
            for each in [each for each, seen in self.seen.items() if self.step - seen > s.ttl]:
                del self.seen[each], self.rows[each]
        new = [each for each in looked_up if each not in self.rows and each in self.sighted]
        excess = len(self.rows) + len(new) - s.max_rows
        for each in sorted(set(self.rows) - looked_up, key=lambda one: (self.seen[one], mixed(one)))[: max(0, excess)]:
            del self.seen[each], self.rows[each]
        new = sorted(new, key=mixed)[: s.max_rows - len(self.rows)]
        self.sighted |= looked_up - set(self.rows)
        for each in new:
            self.sighted.discard(each)
            self.rows[each] = torch.from_numpy(hashed_ids.initial(np.array([each]), WIDTH, s.seed))[0]
            self.squares[each] = 0.0
        for each in looked_up & set(self.rows):
            gradient = gradient_of(torch.tensor([each]))[0]
            self.squares[each] += float(gradient.square().mean())
            self.rows[each] = self.rows[each] - s.lr * gradient / self.squares[each] ** 0.5
            self.seen[each] = self.step

    def values(self, ids: Iterable[int]) -> Tensor:
        none = torch.zeros(WIDTH)
        return torch.stack(
            [
                self.rows.get(each, none)
                if not self.settings.ttl or self.step + 1 - self.seen.get(each, 0) <= self.settings.ttl
                else none
                for each in ids
            ]
        )


def mixed(number: int) -> int:
    return int(hashed_ids.mix(np.array([number]))[0])


steps_of_ids = st.lists(st.sets(st.sampled_from(IDS), max_size=30), max_size=25)


@settings(max_examples=40, deadline=None)
@given(steps_of_ids, st.sampled_from([0, 1, 3, 20]), st.sampled_from([1, 5, 15]))
def test_rows_are_born_and_forgotten_as_in_a_model(steps: list[set[int]], ttl: int, most: int) -> None:
    """With MAX_ROWS below 2 * 16 one row is evicted at a time, so that the model needs no batches."""
    (table,) = build(1, ttl=ttl, max_rows=most)
    model = Model(table.settings)
    for ids in steps:
        make_step([table], ids)
        model.make_step(ids)
        torch.testing.assert_close(values([table], IDS), model.values(IDS))
        assert len(model.rows) <= table.alive <= most


@settings(max_examples=20, deadline=None)
@given(steps_of_ids, st.sampled_from([0, 4]), st.sampled_from([2, 3, 5]))
def test_it_does_not_depend_on_the_number_of_servers(steps: list[set[int]], ttl: int, count: int) -> None:
    one, several = build(1, ttl=ttl, max_rows=100), build(count, ttl=ttl, max_rows=100)
    for ids in steps:
        make_step(one, ids)
        make_step(several, ids)
    assert torch.equal(values(one, IDS), values(several, IDS))
    assert sum(table.alive for table in several) == one[0].alive


@pytest.mark.parametrize("weighted", [False, True])
def test_with_one_sighting_a_table_is_a_fixed_one_without_shared_rows(weighted: bool) -> None:
    (table,) = build(1, sightings=1)
    ids = torch.tensor(IDS[:6])
    fixed = build_table(HybridSettings(num_embeddings=6, embedding_dim=WIDTH, lr=0.5), 0)
    fixed.weight.detach().copy_(torch.from_numpy(hashed_ids.initial(ids.numpy(), WIDTH, table.settings.seed)))
    for rows in ([0, 1, 0], [2, 1, 5], [0, 1, 2], [3, 3, 4]):
        lookup = Bags(torch.tensor(rows), torch.tensor([0, 0, 2, 3]), torch.rand(3) if weighted else None)
        other = Bags(ids[lookup.rows], lookup.offsets, lookup.weights)
        torch.testing.assert_close(table(other).detach(), fixed(lookup).detach())
        outer = torch.randn(3, WIDTH)
        for each, bag in ((table, other), (fixed, lookup)):
            plan = each.plan([bag])
            each.advance(plan, plan.gradient(outer))
    torch.testing.assert_close(values([table], ids.tolist()), fixed.weight.detach())
    assert table.alive == 6


def test_a_table_that_no_memory_is_large_enough_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"MAX_ROWS=2147483647: no memory for rows of EMBEDDING_DIM=65536"):
        build(1, max_rows=2**31 - 1, embedding_dim=65536)


def test_filter_ids_of_a_fixed_table_may_change() -> None:
    """They are pinned."""
    fixed = [HybridSettings(filter_ids=each).model_dump()["filter_ids"] for each in (2**10, 2**12)]
    assert fixed[0] == fixed[1]
    assert chosen(filter_ids=2**10).model_dump()["filter_ids"] == 2**10


def test_a_bag_leaves_out_ids_without_a_row() -> None:
    (table,) = build(1)
    for _ in range(2):
        make_step([table], [1, 2])
    one, two = values([table], [1, 2])
    lookup = Bags(torch.tensor([5, 1, 6, 2, 2, 7]), torch.tensor([0, 0, 3, 5, 6]), torch.arange(1.0, 7.0))
    expected = torch.stack([torch.zeros(WIDTH), 2 * one, 4 * two + 5 * two, torch.zeros(WIDTH)])
    torch.testing.assert_close(table(lookup).detach(), expected)


def test_batches_of_the_least_recently_used_go() -> None:
    (table,) = build(1, max_rows=320)
    ids = hashed_ids.mix(np.arange(400)).view(np.int64)
    for begin in range(0, 320, 40):
        for _ in range(2):
            make_step([table], ids[begin : begin + 40])
    assert table.alive == 320
    metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
    make_step([table], ids[320:321])
    make_step([table], [*ids[:10], ids[320]])
    table.count(metrics)
    assert table.alive == 320 - 20 + 1
    assert value(metrics.hybrid_evictions.labels("max_rows")) == 20
    assert value(metrics.hybrid_births) == 1
    assert value(metrics.hybrid_table_rows) == 301
    alive = values([table], ids).any(1)
    assert alive[:10].all()  # they were looked up in that step
    assert alive[10:40].sum() == 10
    assert alive[40:321].all()


def test_expired_rows_are_removed_without_a_lookup() -> None:
    (table,) = build(1, ttl=70)
    for _ in range(2):
        make_step([table], [1, 2, 3])
    for _ in range(140):
        make_step([table], [1])
    assert table.alive == 1


# ---- the map and the filter


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=50), max_size=6), st.randoms())
def test_the_map_is_a_dictionary(batches: list[set[int]], random: Any) -> None:
    index, model, free = SlotMap(300), dict[int, int](), list(range(300))
    for batch in batches:
        new = np.array(sorted(batch - set(model)), np.int64)
        slots = np.array([free.pop() for _ in new], np.int64)
        assert index.insert(new, slots).all()
        model |= dict(zip(new.tolist(), slots.tolist(), strict=True))
        gone = random.sample(sorted(model), len(model) // 3)
        index.remove(np.array(gone, np.int64))
        free += [model.pop(each) for each in gone]
        asked = np.array([*model, *gone, 0, 1, -1], np.int64)
        assert index.find(asked).tolist() == [model.get(each, -1) for each in asked.tolist()]


def test_the_map_holds_as_many_as_it_was_made_for() -> None:
    index, ids = SlotMap(100_000), hashed_ids.mix(np.arange(150_000)).view(np.int64)
    assert index.insert(ids[:100_000], np.arange(100_000)).all()
    for begin in range(0, 50_000, 5_000):  # as many go as come
        index.remove(ids[begin : begin + 5_000])
        assert index.insert(ids[100_000 + begin : 105_000 + begin], np.arange(begin, begin + 5_000)).all()
    assert (index.find(ids[100_000:]) == np.arange(50_000)).all()
    assert (index.find(ids[:50_000]) == -1).all()


def test_an_id_without_a_place_in_the_map_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "SlotMap", lambda most: SlotMap(most, buckets=8))  # 64 cells
    (table,) = build(1, max_rows=200)
    ids = hashed_ids.mix(np.arange(200)).view(np.int64)
    for _ in range(4):
        make_step([table], ids)
    assert 40 < table.alive == values([table], ids).any(1).sum() <= 64


def test_a_filter_forgets_what_others_displace_and_rarely_takes_an_id_for_another() -> None:
    sighted = Filter(chosen(filter_ids=1000), 0)
    ids = hashed_ids.mix(np.arange(200_000)).view(np.int64)
    sighted.note(ids[:500])
    assert sighted.fill == pytest.approx(1 - np.exp(-0.5), abs=0.05)
    kept = sighted.has(ids[:500])
    assert kept.mean() == pytest.approx((1 - np.exp(-0.5)) / 0.5, abs=0.06)
    assert sighted.has(ids[500:]).sum() < 20  # 200,000 / 65,536 times the fill
    sighted.note(ids[500:1500])
    assert sighted.has(ids[:500]).sum() < kept.sum() / 2
    sighted.erase(ids[:1500])
    assert sighted.fill == 0


# ---- checkpoints


@pytest.mark.parametrize("after", [2, 1, 3])
def test_a_resumed_training_is_the_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    """The checkpoint is read while rows are born, evicted, and take the slots of others."""
    monkeypatch.setattr(capture.Capture.__init__, "__defaults__", (0.2, 256, 0, 2**20))  # copies nothing at once
    generator = np.random.default_rng(1)
    pool = hashed_ids.mix(np.arange(600)).view(np.int64)
    ids = [generator.choice(pool, 60, replace=False) for _ in range(30)]
    same = {"table": "hashed", "filter_ids": 2**14, "ttl": 9}
    first = together(tmp_path, 2, max_rows=80, **same)
    first.context.restore({"embeddings": first})
    first.start(0)
    for number in range(10):
        step(first, ids[number])
    first.begin(11)
    for number in range(10, 20):
        step(first, ids[number])
    first.context.save(11, {"embeddings": first}, drain=False)
    assert first.context.require_saver().wait(60)
    second = together(tmp_path, after, max_rows=80 if after == 2 else 200, **same)
    second.context.restore({"embeddings": second})
    second.start(11)
    for number in range(11, 20 if after == 2 else 11):
        step(second, ids[number])
    if after == 2:
        assert torch.equal(looked_up(first, pool), looked_up(second, pool))
        assert filters(first) == filters(second)
        assert [table.alive for table in held(first)] == [table.alive for table in held(second)]
        return
    undisturbed = build(2, max_rows=80, ttl=9, filter_ids=2**14, lr=0.05)
    for number in range(11):
        make_step(undisturbed, ids[number])
    assert torch.equal(values(undisturbed, pool), looked_up(second, pool))
    assert sum(table.alive for table in held(second)) == sum(table.alive for table in undisturbed) > 100
    # what was seen once is known, too, to the server that it belongs to
    step(second, pool)
    make_step(undisturbed, pool)
    assert sum(table.alive for table in held(second)) > sum(table.alive for table in undisturbed) == 160


@pytest.mark.parametrize("saves", [False, True])
def test_a_kept_table_is_a_fresh_one_in_the_next_generation(tmp_path: Path, saves: bool) -> None:
    generator = np.random.default_rng(1)
    pool = hashed_ids.mix(np.arange(300)).view(np.int64)
    ids = [generator.choice(pool, 60, replace=False) for _ in range(20)]
    same: dict[str, Any] = {"table": "hashed", "filter_ids": 2**14, "ttl": 9, "max_rows": 80}
    first = together(tmp_path, 2, **same)
    first.context.restore({"embeddings": first})
    first.start(0)
    for number in range(5):
        step(first, ids[number])
    if saves:
        first.context.save(5, {"embeddings": first}, drain=False)
        assert first.context.require_saver().wait(60)
    for number in range(5, 8):
        step(first, ids[number])
    again = together(tmp_path, 2, 2, kept=first.context.group.transport.servers, **same)
    fresh = together(tmp_path, 2, 2, **same)
    for whole in (again, fresh):
        whole.context.restore({"embeddings": whole})
        whole.start(5 if saves else 0)
        for number in range(5 if saves else 0, 20):
            step(whole, ids[number])
    assert torch.equal(looked_up(again, pool), looked_up(fresh, pool))
    assert filters(again) == filters(fresh)
    assert [table.alive for table in held(again)] == [table.alive for table in held(fresh)]


def test_a_checkpoint_of_another_table_is_refused() -> None:
    (table,) = build(1)
    with pytest.raises(UsageError, match=r"TABLE=hashed: the checkpoint has another table \(weight \[50, 3\]\)"):
        table.prepare({"weight": (50, WIDTH), "squares": (50,)})
    with pytest.raises(UsageError, match=r"another table \(0of1.weight \[50, 4\]\)"):
        table.prepare({"0of1.ids": (50,), "0of1.weight": (50, 4), "filter": (2**18,)})


def test_of_rows_that_there_is_no_room_for_the_least_recently_used_are_left_out() -> None:
    whole = build(3)
    ids = hashed_ids.mix(np.arange(60)).view(np.int64)
    for begin in range(0, 60, 20):
        for _ in range(2):
            make_step(whole, ids[begin : begin + 20])
    columns = {name: rows.tensors[0] for table in whole for name, rows in table.rows().items()}
    small = build_table(chosen(max_rows=40), 0)
    columns["filter"] = torch.zeros(2**18, dtype=torch.int16)
    targets = small.prepare({name: tuple(tensor.shape) for name, tensor in columns.items()})  # type: ignore[misc]
    for name, tensor in columns.items():
        targets[name].put(tensor, 0, 0, 1)
    small.start(6)
    assert torch.equal(values([small], ids[20:]), values(whole, ids[20:]))  # type: ignore[list-item]
    assert not values([small], ids[:20]).any()  # type: ignore[list-item]


# ---- samples, evaluation and export


def any_ids() -> object:
    return (
        [([5, -(2**63)], [1.0, 2.0], 0), ([2**62], [0.5], 1), ([5, 7], [1.0, 1.0], 0)],
        [([5, 2**62, 9], [1.0, 1.0, 1.0], 1), ([], [], 0), ([7], [3.0], 0)],
    )


def test_the_default_task_has_ids_of_64_bits() -> None:
    hashed, fixed = data.load(chosen(dataset="stdlib")), data.load(HybridSettings())
    assert torch.equal(hashed.train.bags.offsets, fixed.train.bags.offsets)
    ids, rows = hashed.train.bags.rows.unique(), fixed.train.bags.rows.unique()
    assert len(ids) > len(rows)  # which share rows
    assert int(ids.min()) < -(2**62) < 2**62 < int(ids.max())


@pytest.mark.parametrize("form", ["onnx", "torch", "safetensors"])
def test_a_checkpoint_is_evaluated_and_exported(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"dataset": f"{__name__}:any_ids", "table": "hashed", "embedding_dim": WIDTH, "filter_ids": 2**10}
    served = build(2, dataset=given["dataset"], filter_ids=2**10)
    samples = data.load(served[0].settings)
    for _ in range(2):
        make_step(served, [5, 7, -(2**63), 2**62])
    model = LocalModel(served[0].settings, samples.classes)
    state = {
        "step": 2,
        "epoch": 1,
        "position": 0,
        "accuracy": 0.5,
        "classes": samples.classes,
        "digest": samples.digest,
        "dense": {"weights": model.dense.state_dict()},
    }
    path = exports.write(tmp_path / "run", "hybrid", state, given, embeddings=[table.rows() for table in served])
    snapshot = checkpoint.read(path, "hybrid").whole()
    restored = evaluate.restore(chosen(**given), snapshot.state)
    assert torch.equal(values([restored.table], IDS), values(served, IDS))  # type: ignore[list-item]
    exported = export.ExportedTable(restored.table)  # type: ignore[arg-type]
    assert torch.equal(exported(torch.tensor(IDS)).detach(), values(served, IDS))
    words = ["hybrid", "--checkpoint", str(path), "--format", form, "--output", str(tmp_path)]
    assert exporting.run([*words, "--dataset", given["dataset"]]) == 0
    assert "accuracy" in capsys.readouterr().out


def held(whole: Any) -> list[HashedTable]:
    return [server.table for server in whole.context.group.transport.servers.values()]


def looked_up(whole: Any, ids: Any) -> Tensor:
    return values(held(whole), ids)


def filters(whole: Any) -> list[list[int]]:
    return [table.rows()["filter"].tensors[0].tolist() for table in held(whole)]


def step(whole: Any, ids: Any) -> None:
    """A step at every server."""
    lookup = bags(*([each] for each in ids.tolist()))
    servers = list(whole.context.group.transport.servers.values())
    for server, share in zip(servers, lookup.route(len(servers), server_cells(servers)), strict=True):
        make_step_at(server, share, gradient_of(lookup.rows))


def server_cells(servers: list[Any]) -> int:
    cells: int = servers[0].settings.cells
    return cells
