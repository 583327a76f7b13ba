"""The shards of `ps`: the servers' updates against torch's optimizers, and the whole of sync against one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from rolecall import Context, Peer, Rows, UsageError
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings, data, model
from rolecall.jobs.ps.ledger import Ledger
from rolecall.jobs.ps.messages import Assignment, GradientPart, PartAnswer, UpdateShard
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.model import Part
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.shard import Shard
from rolecall.jobs.ps.wire import pack
from tests.context.contexts import Supervisor
from tests.integration import learning
from tests.jobs.ps_calls import Calls, trainer_id

TOTAL = 100
OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "sgd", "momentum": 0},
    {"optimizer": "adam", "lr": 0.01},
]
WEIGHTS = {Key("t0", 1): 0.5, Key("t1", 1): 0.3, Key("t2", 4): 0.2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def settings_of(**changed: Any) -> PsSettings:
    return PsSettings(job="ps", **changed)


def cut(total: int, servers: int) -> list[list[tuple[int, Part]]]:
    """Two parts for each server, by server."""
    edges = [total * n // (2 * servers) for n in range(2 * servers + 1)]
    parts = [(n, Part(edges[n], edges[n + 1], n // 2)) for n in range(2 * servers)]
    return [parts[2 * server : 2 * server + 2] for server in range(servers)]


def make(settings: PsSettings, flat: Tensor) -> list[Shard]:
    shards = [Shard(parts, settings, len(flat)) for parts in cut(len(flat), settings.servers)]
    for shard in shards:
        shard.begin_with([flat[:30], flat[30:40].view(2, -1), flat[40:]])
    return shards


def joined(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The whole vectors that the shards' rows are of."""
    whole: dict[str, Tensor] = {}
    for shard in shards:
        for name, rows in shard.rows().items():
            target = Rows((whole.setdefault(name, torch.zeros(rows.total)),), rows.total)
            target.put(rows.copy(0, len(rows)), 0, rows.first, rows.step)
    return whole


def resume(settings: PsSettings, state: dict[str, Tensor]) -> list[Shard]:
    shards = make(settings, torch.zeros(TOTAL))
    for shard in shards:
        for name, rows in shard.prepare({name: tuple(value.shape) for name, value in state.items()}).items():
            rows.put(state[name], 0, 0, 1)
    return shards


def send(shards: Sequence[Shard], key: Key, gradient: Tensor | None) -> dict[int, Future[Any]]:
    """Sends a whole gradient; the answers to it, by part."""
    answers: dict[int, Future[Any]] = {}
    for shard in shards:
        whole = []
        for index, extent in reversed(shard.parts.items()):
            answers[index] = Future()
            part = None if gradient is None else gradient[shard.start : shard.stop][extent].clone()
            whole.append(shard.receive(key, index, part, answers[index]))
        assert whole == [False] * (len(whole) - 1) + [True]
    return answers


def flat_of(shards: Sequence[Shard]) -> Tensor:
    return torch.cat([shard.flat for shard in shards])


def apply(shards: Sequence[Shard], weights: dict[Key, float], rate: float = 1) -> None:
    for shard in shards:
        for part in shard.parts:
            shard.apply(part, weights, rate)


def answer(shards: Sequence[Shard], keys: Iterable[Key], assigned: dict[Key, Assignment] | None = None) -> None:
    keys = list(keys)
    for shard in shards:
        for part in shard.parts:
            shard.answer(part, keys, shard.encode(part, keys), assigned or {})


def step(shards: Sequence[Shard], gradients: dict[Key, Tensor], weights: dict[Key, float], rate: float = 1) -> None:
    for key, gradient in gradients.items():
        send(shards, key, gradient)
    apply(shards, weights, rate)
    answer(shards, weights)


def reference(settings: PsSettings, flat: Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(flat.clone())
    if settings.optimizer == "adam":
        return parameter, torch.optim.Adam([parameter], settings.lr)
    return parameter, torch.optim.SGD([parameter], settings.lr, settings.momentum)


# ---- updates


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("chosen", OPTIMIZERS)
def test_updates_are_those_of_torch_with_the_weighted_mean(servers: int, chosen: dict[str, Any]) -> None:
    settings = settings_of(servers=servers, **chosen)
    start = torch.randn(TOTAL)
    shards, (parameter, optimizer) = make(settings, start), reference(settings, start)
    for rate in (1, 1, 0.25, 1, 0.5, 1):
        gradients = {key: torch.randn(TOTAL) for key in WEIGHTS}
        step(shards, gradients, WEIGHTS, rate)
        optimizer.param_groups[0]["lr"] = settings.lr * rate
        parameter.grad = torch.stack([weight * gradients[key] for key, weight in WEIGHTS.items()]).sum(0)
        optimizer.step()
        torch.testing.assert_close(flat_of(shards), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(3, 3), (1, 3), (3, 2)])
@pytest.mark.parametrize("chosen", OPTIMIZERS)
def test_goes_on_from_a_saved_state_as_if_uninterrupted(before: int, after: int, chosen: dict[str, Any]) -> None:
    start = torch.randn(TOTAL)
    steps = [{key: torch.randn(TOTAL) for key in WEIGHTS} for _ in range(6)]
    whole = make(settings_of(servers=before, **chosen), start)
    for gradients in steps[:3]:
        step(whole, gradients, WEIGHTS)
    state = joined(whole)
    assert torch.equal(state["parameters"], flat_of(whole))
    resumed = resume(settings_of(servers=after, **chosen), state)
    torch.testing.assert_close(joined(resumed), state, rtol=0, atol=0)
    for gradients in steps[3:]:
        step(whole, gradients, WEIGHTS)
        step(resumed, gradients, WEIGHTS)
    # cut otherwise, other elements fall to the vector instructions, whose last bit differs
    exact = {"rtol": 0, "atol": 0} if before == after else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(flat_of(resumed), flat_of(whole), **exact)
    torch.testing.assert_close(joined(resumed), joined(whole), **exact)


def test_momenta_that_are_not_used_are_not_kept() -> None:
    shards = make(settings_of(servers=2), torch.randn(TOTAL))
    step(shards, {key: torch.randn(TOTAL) for key in WEIGHTS}, WEIGHTS)
    resumed = resume(settings_of(servers=2, momentum=0), joined(shards))
    torch.testing.assert_close(joined(resumed), joined(shards), rtol=0, atol=0)
    step(resumed, {Key("t0", 1): torch.ones(TOTAL)}, {Key("t0", 1): 1.0})
    assert joined(resumed).keys() == {"parameters"}
    assert not torch.equal(flat_of(resumed), flat_of(shards))


# ---- answers


def test_answers_of_async_are_copies_that_later_updates_do_not_change() -> None:
    shards = make(settings_of(servers=3, update_mode="async"), torch.randn(TOTAL))
    answers = send(shards, Key("t0", 0), None)
    before = flat_of(shards)
    assignment = Assignment(0, [])
    answer(shards, [Key("t0", 0)], {Key("t0", 0): assignment})
    step(shards, {key: torch.ones(TOTAL) for key in WEIGHTS}, WEIGHTS)
    assert not torch.equal(flat_of(shards), before)
    values: list[PartAnswer] = [answers[index].result() for index in sorted(answers)]
    copies = [value.parameters for value in values if value.parameters is not None]
    assert torch.equal(torch.cat(copies), before)
    assert [value.assignment for value in values] == [assignment] + [None] * 5


def test_only_those_in_the_update_are_answered_and_once() -> None:
    [shard] = make(settings_of(), torch.randn(TOTAL))
    waiting = {name: send([shard], Key(name, 0), None) for name in ("t0", "t1")}
    answer([shard], [Key("t0", 0)])
    assert [[one.done() for one in answers.values()] for answers in waiting.values()] == [[True] * 2, [False] * 2]
    answer([shard], [Key("t0", 0), Key("t1", 0)])  # a second answer to t0 would raise
    assert all(one.done() for one in waiting["t1"].values())


def test_a_caller_that_is_gone_is_not_answered() -> None:
    """The wire cancels what it has yet to answer, before the lead knows of the loss."""
    [shard] = make(settings_of(), torch.randn(TOTAL))
    gone, stays = send([shard], Key("t0", 0), None), send([shard], Key("t1", 0), None)
    assert all(one.cancel() for one in gone.values())
    answer([shard], [Key("t0", 0), Key("t1", 0)])
    assert all(one.done() for one in stays.values())


def test_a_lost_trainer_is_neither_applied_nor_answered() -> None:
    [shard] = make(settings_of(momentum=0, lr=1), torch.zeros(TOTAL))
    lost = send([shard], Key("t0", 1), torch.full((TOTAL,), 100.0)) | send([shard], Key("t0", 2), torch.ones(TOTAL))
    stays = send([shard], Key("t1", 1), torch.ones(TOTAL))
    shard.drop("t0")
    apply([shard], {Key("t1", 1): 1.0})
    answer([shard], [Key("t0", 1), Key("t0", 2), Key("t1", 1)])
    assert torch.equal(flat_of([shard]), -torch.ones(TOTAL))
    assert not any(one.done() for one in lost.values())
    assert all(one.done() for one in stays.values())
    for part in shard.parts:  # was on its way
        assert not shard.receive(Key("t0", 3), part, torch.ones(TOTAL), Future())


def test_a_lost_trainer_that_returns_is_another_one() -> None:
    [shard] = make(settings_of(momentum=0, lr=1, wire_dtype="int8"), torch.zeros(TOTAL))
    old, new = trainer_id(0), trainer_id(0, join=1)
    send([shard], Key(old, 0), None)
    answer([shard], [Key(old, 0)])
    payload = pack(torch.ones(TOTAL // 2), "int8")[0]
    for part in shard.parts:
        shard.receive(Key(old, 1), part, payload, Future())
    shard.drop(old)
    first = send([shard], Key(new, 0), None)
    answer([shard], [Key(new, 0)])
    assert all(one.result().parameters.dtype == torch.float32 for one in first.values()), "whole: it holds none yet"
    second: dict[int, Future[Any]] = {part: Future() for part in shard.parts}
    for part, one in second.items():
        assert not shard.receive(Key(old, 2), part, payload, Future()), "it was on its way"
        shard.receive(Key(new, 1), part, payload, one)
    apply([shard], {Key(new, 1): 1.0})
    answer([shard], [Key(old, 1), Key(new, 1)])
    torch.testing.assert_close(flat_of([shard]), -torch.ones(TOTAL))
    assert all(one.done() for one in second.values())


def test_a_server_applies_what_the_lead_orders_though_the_trainer_was_lost_since() -> None:
    """Each server learns of a loss by itself: a lead that learns of it later counts the gradient."""
    members = (Peer("ps", 0, 0), Peer("ps", 1, 1), Peer("trainer", 0, 2), Peer("trainer", 1, 3))
    supervisor = Supervisor()
    context = Context(
        settings_of(servers=2, momentum=0, lr=1),
        Attachment(1, members[1], members),
        MagicMock(),
        supervision=supervisor,
    )
    first = Server(Context(settings_of(servers=2), Attachment(1, members[0], members), MagicMock()))
    calls = Calls()
    context.group.use(calls)
    calls.roles["ps_0"] = first
    server = Server(context)
    server.shard.begin_with([torch.zeros(server.total)])
    [part] = server.shard.parts
    keys = [Key("trainer_0", 1), Key("trainer_1", 1)]
    gradient = torch.ones(len(server.shard.flat))
    answers = [server.exchange(GradientPart(key, part, gradient.clone(), None)) for key in keys]
    assert [first.inbox.get_nowait() for _ in keys] == keys
    context.group.lose(members[2])
    server.update(UpdateShard(1, dict.fromkeys(keys, 0.5), 1.0, tuple(keys)), {})
    assert torch.equal(answers[1].result(30)[0], -gradient)
    server.update(UpdateShard(1, {}, 1.0, (), ("trainer_0",)), {})  # answers only, as at the start of a generation
    server.exchange(GradientPart(Key("trainer_0", 2), part, gradient, None))
    assert first.inbox.empty(), "the lead has told that it is lost"
    assert supervisor.steps == [1]


# ---- another job's checkpoint


@pytest.mark.parametrize(("saved", "wanted"), [("adam", "sgd"), ("sgd", "adam")])
def test_refuses_the_state_of_another_optimizer(saved: str, wanted: str) -> None:
    [shard] = make(settings_of(optimizer=saved), torch.randn(TOTAL))
    step([shard], {key: torch.randn(TOTAL) for key in WEIGHTS}, WEIGHTS)
    state = joined([shard])
    resume(settings_of(optimizer=saved), state)
    with pytest.raises(UsageError, match=f"OPTIMIZER={wanted}"):
        resume(settings_of(optimizer=wanted), state)
    [larger] = make(settings_of(optimizer=saved), torch.randn(TOTAL + 1))
    with pytest.raises(UsageError, match=r"MODEL=ConvNet: has 101 parameters.* 100;"):
        larger.prepare({name: tuple(value.shape) for name, value in state.items()})


# ---- the whole of it


def gradient_of(module: nn.Module, split: data.Split, indices: Tensor) -> Tensor:
    inputs, targets = split.batch(indices)
    gradients = torch.autograd.grad(model.loss(module(inputs), targets), list(module.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def test_three_trainers_learn_what_one_process_does_with_three_times_the_batch() -> None:
    servers = 3
    settings = settings_of(servers=servers, batch_size=8, lr=0.05)
    train, _ = data.load(settings)
    module = model.build(settings).eval()  # without dropout
    parts = list(enumerate(model.parts(module, settings)))
    start = learning.flatten(module)
    shards = [
        Shard([each for each in parts if each[1].server == server], settings, len(start)) for server in range(servers)
    ]
    for shard in shards:
        shard.begin_with([start])
    parameter, optimizer = reference(settings, start)
    # 58 samples: two whole steps, and an end of the epoch of 10, which is shared 4, 3, 3
    ledger = Ledger(58, 8, 2, 0, ["t0", "t1", "t2"], sync=True)
    for name in ledger.trainers:
        send(shards, Key(name, 0), None)
        update = ledger.take(Key(name, 0), 0, 0)
    sizes = []
    for number in range(1, 5):
        batches = {key.trainer: torch.from_numpy(given[0]) for key, given in update.batches.items()}
        answer(shards, update.batches)
        learning.unflatten(flat_of(shards), module)
        for name, batch in batches.items():
            send(shards, Key(name, number), gradient_of(module, train, batch))
            update = ledger.take(Key(name, number), ledger.version, len(batch))
        assert update
        apply(shards, update.weights, update.rate)
        learning.unflatten(parameter.detach(), module)
        parameter.grad = gradient_of(module, train, torch.cat(list(batches.values())))
        optimizer.step()
        sizes.append(sum(map(len, batches.values())))
        torch.testing.assert_close(flat_of(shards), parameter.detach(), rtol=1e-4, atol=1e-6)
    assert sizes == [24, 24, 10, 24]
