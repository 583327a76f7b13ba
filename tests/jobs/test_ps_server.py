"""A server of ps: its updates beside torch's optimizers, whom it answers, and what it tells the lead."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from rolecall import Context, Peer
from rolecall.declare.task import Attachment
from rolecall.jobs.ps import PsSettings
from rolecall.jobs.ps.messages import Assignment, GradientPart, PartAnswer, UpdateShard
from rolecall.jobs.ps.messages import GradientKey as Key
from rolecall.jobs.ps.model import VectorPart
from rolecall.jobs.ps.server import Server
from rolecall.jobs.ps.shard import Shard
from rolecall.weights.packing import pack
from rolecall.wire.messages import Deadline, Request
from tests.context.contexts import Supervisor
from tests.jobs.ps_calls import HERE, Gang, trainer_id

TOTAL = 100
WEIGHTS = {Key(trainer_id(0), 1): 0.5, Key(trainer_id(1), 1): 0.3, Key(trainer_id(2), 4): 0.2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make(flat: Tensor, **chosen: Any) -> list[Shard]:
    """Shards of two parts each."""
    settings = PsSettings(job="ps", **chosen)
    count = 2 * settings.servers
    edges = [len(flat) * n // count for n in range(count + 1)]
    parts = [(n, VectorPart(edges[n], edges[n + 1], n // 2)) for n in range(count)]
    return [Shard(parts[2 * n : 2 * n + 2], settings, flat) for n in range(settings.servers)]


def send(shards: Sequence[Shard], key: Key, gradient: Tensor | None) -> dict[int, Future[Any]]:
    """Sends a whole gradient; the answers to it, by part."""
    answers: dict[int, Future[Any]] = {}
    for shard in shards:
        whole = []
        for index, extent in reversed(shard.parts.items()):
            answers[index] = Future()
            part = None if gradient is None else gradient[shard.start : shard.stop][extent].clone()
            whole.append(shard.receive(GradientPart(key, index, part, None), answers[index]))
        assert whole == [False] * (len(whole) - 1) + [True]
    return answers


def update(shards: Sequence[Shard], weights: dict[Key, float], *answered: Key, rate: float = 1) -> None:
    for shard in shards:
        for part in shard.parts:
            shard.apply(part, weights, rate)
            for call, answer in shard.answers(part, answered, dict.fromkeys(answered, Assignment(0, []))):
                call.set_result(answer)


def flat_of(shards: Sequence[Shard]) -> Tensor:
    return torch.cat([shard.flat for shard in shards])


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("chosen", [{"momentum": 0.9}, {"momentum": 0}, {"optimizer": "adam", "lr": 0.01}])
def test_updates_are_those_of_torch_with_the_weighted_mean(servers: int, chosen: dict[str, Any]) -> None:
    start = torch.randn(TOTAL)
    shards, parameter = make(start, servers=servers, **chosen), nn.Parameter(start.clone())
    settings = PsSettings(job="ps", **chosen)
    optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter], settings.lr, settings.momentum)
    if settings.optimizer == "adam":
        optimizer = torch.optim.Adam([parameter], settings.lr)
    for rate in (1, 1, 0.25, 1, 0.5, 1):
        gradients = {key: torch.randn(TOTAL) for key in WEIGHTS}
        for key, gradient in gradients.items():
            send(shards, key, gradient)
        update(shards, WEIGHTS, *WEIGHTS, rate=rate)
        optimizer.param_groups[0]["lr"] = settings.lr * rate
        parameter.grad = torch.stack([weight * gradients[key] for key, weight in WEIGHTS.items()]).sum(0)
        optimizer.step()
        torch.testing.assert_close(flat_of(shards), parameter.detach(), rtol=1e-5, atol=1e-6)


# ---- answers


def test_answers_of_async_are_copies_that_later_updates_do_not_change() -> None:
    shards, asked = make(torch.randn(TOTAL), servers=3, update_mode="async"), Key(trainer_id(0), 0)
    answers, waiting = send(shards, asked, None), send(shards, Key(trainer_id(1), 0), None)
    before = flat_of(shards)
    update(shards, {}, asked)
    for key in WEIGHTS:
        send(shards, key, torch.ones(TOTAL))
    update(shards, WEIGHTS)
    assert not torch.equal(flat_of(shards), before)
    values: list[PartAnswer] = [answers[index].result() for index in sorted(answers)]
    assert torch.equal(torch.cat([value.parameters for value in values if value.parameters is not None]), before)
    assert [value.assignment for value in values] == [Assignment(0, [])] + [None] * 5
    assert not any(one.done() for one in waiting.values())


def test_a_lost_trainer_counts_for_nothing_and_one_that_returns_is_another() -> None:
    [shard] = make(torch.zeros(TOTAL), momentum=0, lr=1, wire_dtype="int8")
    old, new = trainer_id(0), trainer_id(0, join=1)
    send([shard], Key(old, 0), None)
    update([shard], {}, Key(old, 0))
    payload = pack(torch.ones(TOTAL // 2), "int8")[0]
    lost, second = ({part: Future[PartAnswer]() for part in shard.parts} for _ in range(2))
    for part, answer in lost.items():
        shard.receive(GradientPart(Key(old, 1), part, payload, None), answer)
    shard.drop(old)
    first = send([shard], Key(new, 0), None)
    update([shard], {}, Key(new, 0))
    assert all(one.result().parameters.dtype == torch.float32 for one in first.values()), "whole: it holds none yet"
    for part, answer in second.items():
        assert not shard.receive(GradientPart(Key(old, 2), part, payload, None), Future()), "it was on its way"
        shard.receive(GradientPart(Key(new, 1), part, payload, None), answer)
    update([shard], {Key(new, 1): 1.0}, Key(old, 1), Key(new, 1))
    torch.testing.assert_close(flat_of([shard]), -torch.ones(TOTAL))
    assert all(one.done() for one in second.values())
    assert not any(one.done() for one in lost.values())


def test_a_caller_that_is_gone_is_not_answered() -> None:
    """The wire cancels what it has yet to answer, before the lead knows of the loss."""
    gang = Gang(PsSettings(job="ps", model=HERE + "small", dataset=HERE + "blobs"), trainers=2)
    keys = [Key(trainer_id(n), 0) for n in range(2)]
    gone, stays = (gang.lead.exchange(GradientPart(key, 0, None, None)) for key in keys)
    assert gone.cancel()
    gang.update({}, {key: [] for key in keys})
    assert stays.done()


# ---- the lead

MEMBERS = (Peer("ps", 0, 0), Peer("ps", 1, 1), Peer("trainer", 0, 2), Peer("trainer", 1, 3))


class Lead:
    """In place of the wire: keeps what a server reports, until the test answers."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[tuple[list[Key], Future[None]]] = queue.SimpleQueue()

    def call(self, to: str, request: Request, deadline: Deadline, **_: Any) -> Future[None]:
        assert (to, request.method) == ("ps_0", "complete")
        answer: Future[None] = Future()
        self.reports.put((request.args[0], answer))
        return answer

    def lose(self, peer: Peer) -> None:
        """A lost peer is called no more."""


def reporting(**chosen: Any) -> tuple[Server, Lead, Supervisor]:
    """The second of two servers, which has one part."""
    supervisor, lead = Supervisor(), Lead()
    settings = PsSettings(job="ps", servers=2, model=HERE + "small", **chosen)
    context = Context(settings, Attachment(1, MEMBERS[1], MEMBERS), MagicMock(), supervision=supervisor)
    context.group.use(lead)
    return Server(context), lead, supervisor


def test_a_report_is_under_way_and_what_comes_meanwhile_goes_with_the_next() -> None:
    made, lead, _ = reporting()
    keys = [Key(trainer_id(0), number) for number in range(6)]

    def comes(*several: Key) -> None:
        for key in several:
            made.exchange(GradientPart(key, 1, None, None))

    comes(keys[0])
    first, answer = lead.reports.get(timeout=30)
    comes(*keys[1:4])
    assert first == keys[:1], "an idle lead hears of each at once"
    assert lead.reports.empty()
    with capture_logs() as logs:
        answer.set_exception(RuntimeError("no answer\nwithin 30 s"))
        second, answer = lead.reports.get(timeout=30)
    assert second == keys[1:4], "the first is not repeated: the lead may have received it"
    assert [line["problem"] for line in logs] == ["no answer"]
    answer.set_result(None)
    comes(keys[4])
    assert lead.reports.get(timeout=30)[0] == keys[4:5]


def test_a_server_applies_what_the_lead_orders_though_the_trainer_was_lost_since() -> None:
    """Each server learns of a loss by itself: a lead that learns of it later counts the gradient."""
    made, _, supervisor = reporting(momentum=0, lr=1)
    keys, before = [Key(trainer_id(0), 1), Key(trainer_id(1), 1)], made.shard.flat
    gradient = torch.ones(len(before))
    answers = [made.exchange(GradientPart(key, 1, gradient.clone(), None)) for key in keys]
    made.context.group.lose(MEMBERS[2])
    made.update(UpdateShard(1, dict.fromkeys(keys, 0.5), 1.0, tuple(keys)), {})
    assert torch.equal(answers[1].result(30)[0], before - gradient)
    made.update(UpdateShard(1, {}, 1.0, (), (trainer_id(0),)), {})  # answers only, as at the start of a generation
    assert not made.shard.receive(GradientPart(Key(trainer_id(0), 2), 1, gradient, None), Future()), "it is lost"
    assert supervisor.steps == [1]
