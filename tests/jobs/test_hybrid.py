"""`hybrid`: the table (bags, routes, updates), and the data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from rolecall import Context, Peer, telemetry
from rolecall.declare.task import Attachment
from rolecall.errors import UsageError
from rolecall.jobs.hybrid import JOB, HybridSettings, data, evaluate
from rolecall.jobs.hybrid.model import LocalModel
from rolecall.jobs.hybrid.server import TableServer
from rolecall.jobs.hybrid.table import Bags, Plan, Table
from rolecall.jobs.hybrid.trainer import Trainer

SMALL = {"num_embeddings": 50, "embedding_dim": 3, "lr": 0.5}
TRAINERS = [("trainer", 0), ("trainer", 1)]


def settings(**changes: object) -> HybridSettings:
    return HybridSettings(**{**SMALL, **changes})  # type: ignore[arg-type]


def filled(chosen: HybridSettings, ordinal: int = 0) -> Table:
    table = Table(chosen, ordinal)
    table.fill()
    return table


def bags(weighted: bool, seed: int = 0) -> Bags:
    """Five bags; the second and the last are empty, and rows come several times."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(12, (9,), generator=generator) * 4
    return Bags(rows, torch.tensor([0, 4, 4, 6, 9, 9]), torch.rand(9, generator=generator) if weighted else None)


def pooled(weight: Tensor, lookup: Bags) -> Tensor:
    """Written out."""
    sums = []
    for begin, end in zip(lookup.offsets[:-1], lookup.offsets[1:], strict=True):
        factors = torch.ones(int(end - begin)) if lookup.weights is None else lookup.weights[begin:end]
        sums.append((weight[lookup.rows[begin:end]] * factors[:, None]).sum(0))
    return torch.stack(sums)


# ---- the table


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_shards_together_are_one_table(servers: int, weighted: bool) -> None:
    whole = filled(settings())
    shards = [filled(settings(servers=servers), ordinal) for ordinal in range(servers)]
    assert sum(len(shard.weight) for shard in shards) == 50
    for number, shard in enumerate(shards):
        assert torch.equal(whole.weight[number::servers], shard.weight)
    lookup = bags(weighted)
    vectors = sum(shard(share) for shard, share in zip(shards, lookup.route(servers), strict=True))
    torch.testing.assert_close(vectors, whole(lookup))
    torch.testing.assert_close(whole(lookup), pooled(whole.weight, lookup))
    assert not whole(lookup)[[1, 4]].any()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_plan_makes_the_gradient_that_autograd_makes(weighted: bool) -> None:
    lookups = [bags(weighted, seed) for seed in range(3)]
    weight = torch.randn(50, 3, requires_grad=True)
    outer = torch.randn(15, 3)
    (torch.cat([pooled(weight, lookup) for lookup in lookups]) * outer).sum().backward()
    plan = Plan.of(lookups)
    assert plan.rows.tolist() == sorted({row for lookup in lookups for row in lookup.rows.tolist()})
    assert weight.grad is not None
    torch.testing.assert_close(plan.gradient(outer), weight.grad[plan.rows])
    untouched = torch.ones(50, dtype=torch.bool).index_fill(0, plan.rows, False)
    assert not weight.grad[untouched].any()


@pytest.mark.parametrize("index", [50, -1, 2**31 - 1])
@pytest.mark.parametrize("servers", [1, 3])
def test_an_index_out_of_range_is_named(index: int, servers: int) -> None:
    lookup = Bags(torch.tensor([4, index]), torch.tensor([0, 2]), None)
    ordinal = index % servers
    table, share = filled(settings(servers=servers), ordinal), lookup.route(servers)[ordinal]
    with pytest.raises(IndexError, match=f"index {index} is out of range: NUM_EMBEDDINGS=50"):
        table(share)


def test_bags_are_sent_in_fewer_bytes() -> None:
    of_64_bits = Bags(torch.tensor([2**63 - 1, -(2**63), 5]), torch.tensor([0, 3]), None)
    for sent, kind in ((bags(True), torch.int32), (bags(False), torch.int32), (of_64_bits, torch.int64)):
        narrow = sent.narrow()
        assert (narrow.rows.dtype, narrow.offsets.dtype) == (kind, torch.int32)
        received = narrow.to(torch.device("cpu"))
        assert torch.equal(received.rows, sent.rows)
        assert torch.equal(received.offsets, sent.offsets)
        assert (received.weights is None) == (sent.weights is None)
        assert received.weights is None or torch.equal(received.weights, sent.weights)  # type: ignore[arg-type]


def test_a_saved_model_is_evaluated_on_its_own_samples_only() -> None:
    chosen = settings(dataset=f"{__name__}:in_range")
    model, samples = LocalModel(chosen, 2), data.load(chosen)
    model.table.fill()
    state = {
        "classes": 2,
        "epoch": 3,
        "step": 7,
        "digest": samples.digest,
        "embeddings": {"weight": model.table.weight, "squares": model.table.squares},
        "dense": {"weights": model.dense.state_dict()},
    }
    predicted = int(model(samples.test.bags).argmax(1))
    result = evaluate.evaluate(chosen, state)
    assert result == {"accuracy": float(predicted == 1), "samples": 1, "epochs": 3, "steps": 7}
    with pytest.raises(UsageError, match=r"DATASET=.*not those that the checkpoint was trained on"):
        evaluate.evaluate(chosen, {**state, "digest": "another"})
    with pytest.raises(UsageError, match=r"the checkpoint holds no model of hybrid \(KeyError: 'dense'\)"):
        evaluate.evaluate(chosen, {"classes": 2})


# ---- commands and steps


def context(rank: int, **changes: object) -> Context[HybridSettings]:
    """That of the server, or of one of two trainers, whose failures are recorded."""
    members = tuple(Peer(role, number, rank) for rank, (role, number) in enumerate([("ps", 0), *TRAINERS]))
    metrics = telemetry.build([*telemetry.WORKER, *JOB.metrics], CollectorRegistry())
    made = Context(settings(**changes), Attachment(1, members[rank], members), metrics, supervision=MagicMock())
    made.torch = MagicMock()
    return made


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(context(1, dataset=f"{__name__}:in_range"))


def test_commands_run_after_their_step_however_they_arrive(trainer: Trainer) -> None:
    made: list[int] = []

    def command(step: int) -> None:
        with trainer._command(step):
            made.append(step)
            trainer.step += 1

    with ThreadPoolExecutor() as pool:
        list(pool.map(command, (2, 0, 1, 3)))
    assert made == [0, 1, 2, 3]


def test_an_error_of_a_command_is_the_trainers_own(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="broken") as raised, trainer._command():
        raise ValueError("broken")
    trainer.context.supervision.fail.assert_called_once_with(raised.value)  # type: ignore[attr-defined]


@pytest.fixture
def server() -> TableServer:
    """A server for two trainers, with a table that is the one after 5 steps."""
    server = TableServer(context(0, optimizer="sgd"))
    server.hold(filled(server.settings))
    server.attached(server.context)
    server.start(5, fill=False)
    return server


def test_a_step_is_made_with_the_mean_of_all_trainers_gradients(server: TableServer) -> None:
    before = server.table.weight.detach().clone()
    lookups, gradients = [bags(True, seed) for seed in range(2)], torch.randn(2, 5, 3)
    for trainer in (1, 0):
        pooled_now = server.exchange(5, trainer=trainer, gradient=None, bags=lookups[trainer].narrow(), later=None)
        torch.testing.assert_close(pooled_now.result(0), pooled(before, lookups[trainer]))
    answer = server.exchange(6, trainer=1, gradient=gradients[1], bags=lookups[0], later=None)
    assert not answer.done()
    assert not len(server.exchange(6, trainer=0, gradient=gradients[0], bags=None, later=None).result(0))
    vectors = answer.result(60)
    weight = before.clone().requires_grad_()
    sum(
        (pooled(weight, lookup) * gradient).sum() for lookup, gradient in zip(lookups, gradients, strict=True)
    ).backward()
    assert weight.grad is not None
    expected = before - 0.5 * weight.grad / 2
    torch.testing.assert_close(server.table.weight.detach(), expected)
    torch.testing.assert_close(vectors, pooled(expected, lookups[0]))
    assert server.step == 6
    server.context.supervision.fail.assert_not_called()  # type: ignore[attr-defined]


def test_a_lookup_or_an_update_that_fails_ends_the_server(server: TableServer) -> None:
    outside, fail = Bags(torch.tensor([50]), torch.tensor([0, 1]), None), server.context.supervision.fail
    with pytest.raises(IndexError) as raised:
        server.lookup(5, outside)
    fail.assert_called_once_with(raised.value)  # type: ignore[attr-defined]
    for trainer in (0, 1):
        server.add_bags(trainer, outside)
        server.add_gradient(trainer, torch.ones(1, 3))
    server._pool.shutdown()
    assert isinstance(fail.call_args[0][0], IndexError)  # type: ignore[attr-defined]
    assert fail.call_count == 2  # type: ignore[attr-defined]
    assert server.step == 5


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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A standard library of two packages that are classes."""
    monkeypatch.setattr(data, "standard_library", lambda: (tmp_path, sorted(tmp_path.rglob("*.py"))))
    for package in ("email", "xml"):
        modules(tmp_path / package, 10)
    return tmp_path


def modules(package: Path, count: int) -> None:
    """Makes the package, of modules that share no word but `=` and `1`."""
    package.mkdir()
    for number in range(count):
        lines = "\n".join(f"{package.name}{number}x{line} = 1" for line in range(20))
        (package / f"{number}.py").write_text(lines)


def test_no_file_of_the_standard_library_is_in_both_parts(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setattr(data, "NGRAMS", 1)
    loaded = data.load(settings(num_embeddings=2**31 - 1))
    assert loaded.classes == 2
    assert (len(loaded.train), len(loaded.test)) == (2 * 8 * 4, 2 * 2 * 4)
    # but for "=" and "1" they share no word
    common = set(loaded.train.bags.rows.tolist()) & set(loaded.test.bags.rows.tolist())
    assert len(common) == 2
    assert loaded.train.bags.weights is not None
    assert float(loaded.train.bags.weights.sum()) == pytest.approx(len(loaded.train))


def test_what_some_distributions_leave_out_is_no_data(library: Path) -> None:
    modules(library / "ctypes", 5)
    before = data.load(settings()).digest
    (library / "alone.py").write_text("x = 1\n" * 50)
    for package in ("tkinter", "distutils", "ensurepip", "turtledemo", "ctypes/macholib"):
        modules(library / package, 10)
    assert data.load(settings()).digest == before
    modules(library / "urllib", 4)
    assert data.load(settings()).digest != before


def test_the_default_task_is_there() -> None:
    loaded = data.load(HybridSettings())
    assert loaded.classes == len(data.PACKAGES)
    assert len(loaded.train) > 5000
    assert len(loaded.test) > 1000
    assert int(loaded.train.bags.rows.max()) < 1_000_000


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
    loaded = data.load(settings(dataset=f"{__name__}:in_range"))
    assert (len(loaded.train), len(loaded.test), loaded.classes) == (2, 1, 2)


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
