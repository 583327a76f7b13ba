"""Gradients across calls, in one process: as those of the same program without calls, and nothing that is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolecall import CallTimeoutError, Context, Job, PeerLostError, RemoteError, Role, Run, Settings, UsageError, remote
from rolecall.context.passes import Passes
from tests.inprocess.jobs import summary_of
from tests.wire.wires import until

WIDTH = 4
NAMES = ("stage_0", "stage_1", "lead_0")


def passes_of(context: Context[Any]) -> Passes:
    return context._passes


class Net(nn.Module):
    """What one member has, in double precision, with what no call changes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(NAMES.index(name))  # a process has one of its own, and three members
        self.table = nn.Embedding(8, WIDTH, dtype=torch.double)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
        self.rows = nn.Embedding(8, WIDTH, sparse=True, dtype=torch.double)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)


class Member:
    """The methods of all members. `other` stands for a call of the next one, and `lead` for one of rank 0."""

    def __init__(self, context: Context[Any]) -> None:
        self.context, self.net = context, Net(context.me.name)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        context.optimize(self.optimizer, self.schedule)
        self.entered, self.go = threading.Event(), threading.Event()
        self.served = 0

    @remote(grad=True)
    def look_up(self, words: Tensor) -> Tensor:
        return self.net.table(words)

    @remote(grad=True)
    def look_up_sparse(self, words: Tensor) -> Tensor:
        return self.net.rows(words)

    @remote(grad=True)
    def layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net.linear(x))

    @remote(grad=True, serial=True)
    def mixed(self, values: dict[str, Any], /, *, times: int = 2) -> dict[str, Any]:
        """Integers, a tensor without gradient, one that is not used, and what is no tensor."""
        x, (y, mask) = values["x"], values["rest"]
        total = times * self.net.linear(x) * y
        return {
            "total": total * mask,
            "argmax": total.argmax(-1),
            "unused": total.exp(),
            "pair": (x + y, "text"),
            "plain": torch.ones(2),
        }

    @remote(grad=True)
    def chain(self, x: Tensor, to: list[str]) -> Tensor:
        """Through further members, the last of which has no parameters in it."""
        x = self.net.linear(x)
        if to:
            x = x + self.context.call(to[0], Member.chain, x.sin(), to[1:]).result()
        return x

    @remote(grad=True)
    def pass_on(self, words: Tensor, to: str) -> Tensor:
        """Of another member's parameters only."""
        return 2 * self.context.call(to, Member.look_up, words).result()

    @remote(grad=True)
    def wait_back(self, x: Tensor) -> Tensor:
        return _Waits.apply(self.net.linear(x), self)

    @remote(grad=True)
    def fail_back(self, x: Tensor) -> Tensor:
        return _Fails.apply(x)

    @remote
    def gradient(self, key: Any) -> Tensor | None:
        return self.context.take_gradients(key).get(self.net.linear.weight)

    @remote
    def weights(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    @remote
    def kept(self) -> int:
        return len(passes_of(self.context)._states) + sum(map(len, passes_of(self.context)._dropped.values()))


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, member: Member) -> Tensor:
        ctx.member = member
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.member.entered.set()
        ctx.member.go.wait(30)
        return grad, None


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ValueError("no such luck")


def play(test: Callable[[Context[Any], Run], object], folder: Path, minimum: int | None = None, **settings: Any) -> None:
    """Runs `test` at rank 0 of three members, of which the two stages are elastic with a `minimum`."""
    from concurrent.futures import Future

    begun = Future[Run]()

    class Lead(Member):
        def run(self) -> None:
            self.context.restore({})
            for _ in self.context.steps(1):
                test(self.context, begun.result(60))
                everybody = lambda: [self.context.call(peer, Member.kept).result() for peer in self.context.peers("stage")]  # noqa: E731
                until(lambda: not any([*everybody(), self.kept()]), "nothing is kept")

    roles = [Role("lead", Lead), Role("stage", Member, count=2, minimum=minimum)]
    summary = summary_of(Job(roles, settings=Settings), begun.set_result, checkpoint_dir=folder, **settings)
    assert summary["state"] == "finished", summary


def local() -> dict[str, Net]:
    return {name: Net(name) for name in NAMES}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


WORDS = torch.tensor([[1, 2], [2, 5]])


def test_x(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        nets, x, y = local(), double(2, WIDTH), double(2, WIDTH)
        (one, two), lead = context.peers("stage"), context.me

        def distributed(x: Tensor) -> Tensor:
            words = context.call(one, Member.look_up, WORDS)
            a = context.call(one, Member.layer, x).result()  # a diamond, and a member that is called twice
            b = context.call(one, Member.layer, a).result()
            c = context.call(two, Member.chain, a, [lead.name, "stage_0"]).result()  # back into the caller
            d = context.call(lead, Member.layer, b * c).result()
            e = context.call(two, Member.pass_on, WORDS, "stage_0").result()
            return (d * a).sum() + (words.result() * e).sum()

        def one_process(x: Tensor) -> Tensor:
            first, second, third = nets["stage_0"], nets["stage_1"], nets["lead_0"]
            words = first.table(WORDS)
            a = torch.tanh(first.linear(x))
            b = torch.tanh(first.linear(a))
            c = second.linear(a)
            inner = third.linear(c.sin())
            c = c + (inner + first.linear(inner.sin()))
            d = torch.tanh(third.linear(b * c))
            e = 2 * first.table(WORDS)
            return (d * a).sum() + (words * e).sum()

        with context.gradients() as gradients:
            loss = distributed(x)
            loss.backward()
            expected = one_process(y)
            expected.backward()
            assert torch.equal(loss, expected)
            assert torch.equal(x.grad, y.grad), (x.grad - y.grad)
            norm = gradients.norm()
            print(norm)
            gradients.step()
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets.values()]
            total = nn.utils.get_total_norm([p.grad for net in nets.values() for p in net.parameters() if p.grad is not None])
            assert abs(norm - total) < 1e-9
            for each in optimizers:
                each.step()
            for name in NAMES:
                w = context.call(name, Member.weights).result()
                for k in w:
                    print(name, k, (w[k] - nets[name].state_dict()[k]).abs().max())

    play(test, tmp_path)
