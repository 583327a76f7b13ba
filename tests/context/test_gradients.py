"""Gradients across calls, in one process: as those of the same program without calls, and nothing that is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rolecall import CallTimeoutError, Context, Job, PeerLostError, RemoteError, Role, Run, Settings, UsageError, remote
from rolecall.context.passes import Kept
from rolecall.testing import RunJob
from rolecall.wire.messages import MAX_RUNNING
from tests import commands
from tests.inprocess.jobs import summary_of
from tests.wire.wires import until

ROOT = Path(__file__).parents[2]
WIDTH = 4
NAMES = ("stage_0", "stage_1", "lead_0")


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
    """The methods of all members."""

    def __init__(self, context: Context[Any]) -> None:
        self.context, self.net = context, Net(context.me.name)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        context.optimize(self.optimizer, torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5))
        self.go, self.begun, self.ended = threading.Event(), list[int](), list[int]()

    @remote(grad=True)
    def numbered(self, number: int) -> Tensor:
        """Its backward pass is overtaken by the next one if that begins meanwhile."""

        def note(_: Tensor) -> None:
            self.begun.append(number)
            self.go.set() if len(self.begun) > 1 else self.go.wait(0.3)
            self.ended.append(number)

        product = self.net.linear.weight * number
        product.register_hook(note)
        return product

    @remote
    def orders(self) -> tuple[list[int], list[int]]:
        return self.begun, self.ended

    @remote(grad=True)
    def look_up(self, words: Tensor) -> Tensor:
        return self.net.table(words)  # type: ignore[no-any-return]

    @remote(grad=True)
    def look_up_sparse(self, words: Tensor) -> Tensor:
        return self.net.rows(words)  # type: ignore[no-any-return]

    @remote(grad=True)
    def layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net.linear(x))

    @remote(grad=True)
    def compiled(self, x: Tensor) -> Tensor:
        return torch.compile(self.layer, backend="aot_eager")(x)

    @remote(grad=True, serial=True)
    def mixed(self, values: dict[str, Any], /, *, times: int) -> dict[str, Any]:
        """Integers, a tensor without gradient, one that is not used, and what is no tensor."""
        x, (y, mask) = values["x"], values["rest"]
        total = times * self.net.linear(x) * y
        others = {"unused": total.exp(), "pair": (x + y, "text"), "plain": torch.ones(2)}
        return {"total": total * mask, "argmax": total.argmax(-1), **others}

    @remote(grad=True)
    def chain(self, x: Tensor, to: list[str]) -> Tensor:
        x = self.net.linear(x)
        return x + self.context.call(to[0], Member.chain, x.sin(), to[1:]).result() if to else x

    @remote(grad=True)
    def meet(self, x: Tensor, to: list[str]) -> Tensor:
        """A chain, whose backward pass goes on once all have begun theirs."""
        return During.apply(self.chain(x, to), BARRIER.wait)  # type: ignore[no-any-return]

    @remote(grad=True)
    def pass_on(self, words: Tensor, to: str) -> Tensor:
        """Of another member's parameters only."""
        return 2 * self.context.call(to, Member.look_up, words).result()

    @remote(grad=True)
    def wait_back(self, x: Tensor) -> Tensor:
        return During.apply(self.net.linear(x), self.go.wait)  # type: ignore[no-any-return]

    @remote(grad=True)
    def fail_back(self, x: Tensor) -> Tensor:
        return During.apply(x, lambda _: 1 / 0)  # type: ignore[no-any-return]

    @remote
    def go_on(self) -> None:
        self.go.set()

    @remote
    def gradients(self, key: Any) -> dict[str, Tensor | None]:
        gradients = self.context.take_gradients(key)
        return {name: gradients.get(parameter) for name, parameter in self.net.named_parameters()}

    @remote
    def weights(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    @remote
    def be_hogwild(self) -> None:
        self.context._passes._optimizations.clear()
        self.context.optimize(self.optimizer, hogwild=True)

    @remote
    def begin_at(self, to: str, x: Tensor) -> None:
        """Begins a pass, and does not end it."""
        passes = self.context._passes
        with passes.begin(passes.next_key()).entered():
            self.answer = self.context.call(to, Member.layer, x).result()

    @remote
    def kept(self) -> int:
        passes = self.context._passes
        return len(passes._states) + sum(map(len, passes._dropped.values()))


BARRIER = threading.Barrier(MAX_RUNNING + 6)


class During(torch.autograd.Function):
    """Runs a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[float], object]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.function(30)
        return grads[0], None


class Again(torch.autograd.Function):
    """A function whose backward pass makes the forward pass once more, as gradcheck makes several of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.function = x.detach().requires_grad_(), function
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            return *torch.autograd.grad(ctx.function(ctx.x), [ctx.x], grads), None


def play(test: Callable[[Context[Any], Run], object], folder: Path, minimum: int | None = None) -> None:
    """Runs `test` at rank 0 of three members, of which the two stages are elastic with a `minimum`."""
    begun = concurrent.futures.Future[Run]()

    class Lead(Member):
        def run(self) -> None:
            test(self.context, begun.result(60))
            stages = self.context.peers("stage")
            until(
                lambda: not any([self.kept(), *(self.context.call(peer, Member.kept).result() for peer in stages)]),
                "nothing is kept",
            )

    roles = [Role("lead", Lead), Role("stage", Member, count=2, minimum=minimum)]
    summary = summary_of(Job(roles, settings=Settings), begun.set_result, checkpoint_dir=folder)
    assert summary["state"] == "finished", summary


@contextlib.contextmanager
def joined(context: Context[Any], name: str) -> Iterator[threading.Event]:
    """An event that is set once the member of that name has joined again."""
    event = threading.Event()
    context.on_joined(lambda joined: event.set() if joined == name else None)
    yield event


def local() -> dict[str, Net]:
    return {name: Net(name) for name in NAMES}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


WORDS = torch.tensor([[1, 2], [2, 5]])


def across(context: Any, x: Tensor, one: str, two: str, lead: str) -> Tensor:
    """A diamond, a member that is called twice, a chain, calls back into the caller, and a call whose only parameters
    are another member's."""
    words = context.call(one, Member.look_up, WORDS)
    a = context.call(one, Member.layer, x).result()
    b = context.call(one, Member.layer, a).result()
    c = context.call(two, Member.chain, a, [lead, one]).result()
    d = context.call(lead, Member.layer, b * c).result()
    e = context.call(two, Member.pass_on, WORDS, one).result()
    return (d * a).sum() + (words.result() * e).sum()  # type: ignore[no-any-return]


def test_gradients_and_steps_are_those_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        nets = local()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets.values()]
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]

        def here(x: Tensor) -> Tensor:
            first, second, third = nets.values()
            a = torch.tanh(first.linear(x))
            b, c = torch.tanh(first.linear(a)), second.linear(a)
            inner = third.linear(c.sin())
            d = torch.tanh(third.linear(b * (c + (inner + first.linear(inner.sin())))))
            return (d * a).sum() + (first.table(WORDS) * (2 * first.table(WORDS))).sum()

        for step in range(3):
            x, y = double(2, WIDTH, seed=step), double(2, WIDTH, seed=step)
            for each in optimizers:
                each.zero_grad()
            with context.gradients() as gradients:
                loss, expected = across(context, x, *NAMES), here(y)
                loss.backward()
                expected.backward()
                assert torch.equal(loss, expected)
                assert torch.equal(grad_of(x), grad_of(y))
                both = [p.grad for net in nets.values() for p in net.parameters() if p.grad is not None]
                assert gradients.norm() == pytest.approx(float(nn.utils.get_total_norm(both)), rel=1e-12)
                gradients.step()
            for each in (*optimizers, *schedules):
                each.step()
            weights = {name: context.call(name, Member.weights).result() for name in nets}
            assert all(equal(weights[name], net.state_dict()) for name, net in nets.items())
        with context.gradients() as gradients:  # clipped
            x = double(2, WIDTH)
            across(context, x, *NAMES).backward()
            gradients.step(max_norm=0.1)
        for each in optimizers:
            each.zero_grad()
        here(x).backward()
        nn.utils.clip_grad_norm_([p for net in nets.values() for p in net.parameters()], 0.1)
        for each in optimizers:
            each.step()
        for name, net in nets.items():
            torch.testing.assert_close(context.call(name, Member.weights).result(), dict(net.state_dict()))

    play(test, tmp_path)


def test_a_member_adds_gradients_up_in_one_order(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        with context.gradients():
            answers = [context.call(NAMES[0], Member.numbered, number) for number in range(4)]
            torch.stack([answer.result() for answer in answers]).sum().backward()
        begun, ended = context.call(NAMES[0], Member.orders).result()
        assert ended == begun == [3, 2, 1, 0]

    play(test, tmp_path)


def test_gradients_are_those_of_torchs_distributed_autograd(tmp_path: Path) -> None:
    done = commands.run([sys.executable, "-m", "tests.context.distributed", str(tmp_path / "grads")], timeout=120)
    assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "grads")

    def test(context: Context[Any], _: Run) -> None:
        x = double(2, WIDTH)
        with context.gradients() as gradients:
            across(context, x, *NAMES).backward()
            grads = {name: context.call(name, Member.gradients, gradients.key).result() for name in NAMES}
            torch.testing.assert_close({**grads, "x": grad_of(x)}, expected, rtol=1e-14, atol=1e-14)

    play(test, tmp_path / "run")


def test_a_model_split_over_three_ranks_learns_though_one_is_killed(run_job: RunJob) -> None:
    """In processes."""
    run = run_job(ROOT / "examples" / "split.py", in_process=False, kills={"first_0": 20}, updates=120)
    assert run.result["loss"] < 0.3


def test_arguments_and_answers_of_every_kind(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        net, stage, x, y = local()["stage_0"], context.peers("stage")[0], double(2, WIDTH), double(2, WIDTH)
        factor, mask = double(WIDTH, seed=1), torch.tensor([1, 0, 1, 1])
        with context.gradients() as gradients:
            answer = context.call(stage, Member.mixed, {"x": x, "rest": [factor, mask]}, times=3).result()
            total = 3 * net.linear(y) * factor
            assert torch.equal(answer["total"], total * mask)
            assert torch.equal(answer["argmax"], total.argmax(-1))
            assert [answer[name].requires_grad for name in ("argmax", "plain", "unused")] == [False, False, True]
            assert answer["pair"][1] == "text"
            seen = list[Tensor]()
            answer["total"].register_hook(seen.append)
            grads = torch.autograd.grad(answer["total"].sum() + answer["pair"][0].sum(), [x, factor])
            expected = torch.autograd.grad((total * mask).sum() + (y + factor).sum(), [y, factor])
            assert [*map(torch.equal, grads, expected)] == [True, True]
            assert torch.equal(seen[0], torch.ones(2, WIDTH, dtype=torch.double))
            gathered = context.call(stage, Member.gradients, gradients.key).result()
            assert {*gathered.values()} == {None}  # nobody has asked for them
            sparse = context.call(stage, Member.look_up_sparse, WORDS).result()
            sparse.sum().backward()
            net.rows(WORDS).sum().backward()
            gradients.step()
            torch.optim.SGD(net.rows.parameters(), lr=0.1).step()
            assert torch.equal(context.call(stage, Member.weights).result()["rows.weight"], net.rows.weight)

            def across(x: Tensor) -> Tensor:
                return context.call(stage, Member.layer, x).result()

            assert torch.autograd.gradcheck(lambda x: Again.apply(x, across), [x])
            output = across(x)
            output.sum().backward(retain_graph=True)
            with pytest.raises(UsageError, match=r"Member.layer at stage_0: .* no graph is retained"):
                output.sum().backward()
            with pytest.raises(UsageError, match=r"Member.layer at stage_0: create_graph does not cross ranks"):
                torch.autograd.grad(across(x).sum(), [x], create_graph=True)
            late = across(x)
            stages = context.options(role="stage")
            with pytest.raises(UsageError, match=r"Member.layer has grad=True: call it at one peer"):
                stages.map(Member.layer, [x])
            torch.stack([*stages.call_all(Member.layer, x)]).sum().backward()
        with pytest.raises(UsageError, match=r"Member.layer at stage_0: the block .* is over"):
            late.sum().backward()
        with pytest.raises(UsageError, match=r"Member.layer has grad=True: call it in a block"):
            across(x)
        with torch.no_grad():
            assert torch.equal(across(x), output)
            assert not across(x).requires_grad

    play(test, tmp_path)


def test_what_has_no_gradient_is_refused_where_it_is_declared() -> None:
    async def later() -> None: ...

    def items() -> Iterator[int]:
        yield 1

    for function, others in ((later, {}), (items, {"stream": True}), (across, {"idempotent": True})):
        with pytest.raises(
            UsageError, match=r"@remote\(grad=True\): .* is async, a stream or idempotent; leave that out"
        ):
            remote(grad=True, **others)(function)


def test_a_compiled_module(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        stage, linear, x, y = context.peers("stage")[0], local()["stage_0"].linear, double(2, WIDTH), double(2, WIDTH)
        with context.gradients() as gradients:
            context.call(stage, Member.compiled, x).result().sum().backward()
            weight = context.call(stage, Member.gradients, gradients.key).result()["linear.weight"]
        torch.tanh(linear(y)).sum().backward()
        torch.testing.assert_close((grad_of(x), weight), (grad_of(y), grad_of(linear.weight)))

    play(test, tmp_path)


def test_callers_passes_are_apart_and_hogwild_does_not_mind_steps_between(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        stage, both = context.peers("stage")[0], threading.Barrier(2)

        def caller(number: int, *, step: bool) -> Tensor | None:
            x = double(2, WIDTH, seed=number)
            with context.gradients() as gradients:
                answer = context.call(stage, Member.layer, x).result()
                deep = context.call(stage, Member.layer, answer).result()
                both.wait(30)
                if step and number:
                    both.wait(30)  # the other one steps
                deep.sum().backward()
                if step:
                    gradients.step()
                    if not number:
                        both.wait(30)
                    return None
                both.wait(30)
                return context.call(stage, Member.gradients, gradients.key).result()["linear.weight"]

        def play(step: bool) -> list[concurrent.futures.Future[Tensor | None]]:
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                return [pool.submit(caller, number, step=step) for number in range(2)]

        net, expected = local()["stage_0"], list[Tensor]()
        for number in range(2):
            net.zero_grad()
            torch.tanh(net.linear(torch.tanh(net.linear(double(2, WIDTH, seed=number))))).sum().backward()
            expected.append(grad_of(net.linear.weight))
        assert [torch.equal(a.result(), b) for a, b in zip(play(step=False), expected, strict=True)] == [True, True]  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match="modified by an inplace operation"):
            play(step=True)[1].result()
        context.call(stage, Member.be_hogwild).result()
        assert [each.result() for each in play(step=True)] == [None, None]

    play(test, tmp_path)


def test_nothing_is_left_of_passes_that_are_not_made(tmp_path: Path) -> None:
    def test(context: Context[Any], _: Run) -> None:
        one, two, x = *context.peers("stage"), double(2, WIDTH)

        def kept() -> int:
            return sum(type(each) is Kept for each in gc.get_objects())

        for step in range(60):
            with context.gradients() as gradients:
                for _ in range(3):
                    answer = context.call(one, Member.chain, x, [two.name]).result()
                    del answer  # no backward
                context.call(one, Member.layer, x)  # nobody waits for it
                answer = context.call(one, Member.chain, x, [two.name, "lead_0"]).result()
                unused = context.call(two, Member.layer, x).result()
                if step % 2:
                    answer.sum().backward()
                    if step % 4 == 1:
                        gradients.step()
                with pytest.raises(RemoteError, match="division by zero"):
                    context.call(one, Member.fail_back, answer).result().sum().backward()
            assert unused.requires_grad
            assert step % 10 or kept() < 20
        until(lambda: not kept(), "no forward pass is kept")

    play(test, tmp_path)


def test_peers_that_are_lost_or_late(tmp_path: Path) -> None:
    def test(context: Context[Any], run: Run) -> None:
        one, two, x = *context.peers("stage"), double(2, WIDTH)
        slow = context.options(timeout=1)
        with context.gradients():
            with pytest.raises(CallTimeoutError, match=r"stage_0 has not answered backward within 1 s \(timeout=1"):
                slow.call(one, Member.wait_back, x).result().sum().backward()
            context.call(one, Member.go_on).result()
            through = context.call(one, Member.chain, x, [two.name]).result()
            answer = context.call(two, Member.layer, x).result()
            words = context.call(two, Member.look_up, WORDS).result()
            context.call(two, Member.begin_at, one.name, x).result()  # a pass of its own, which it does not end
            with joined(context, two.name) as again:
                run.kill(two.name)
                again.wait(30)
            for tensor in (through, answer, words):
                with pytest.raises(PeerLostError):
                    tensor.sum().backward()
            until(lambda: context.call(one, Member.kept).result() <= 1, "only the pass of rank 0 is kept")

    play(test, tmp_path, minimum=1)


def test_more_passes_at_once_than_calls_run_do_not_wait_for_each_other(tmp_path: Path) -> None:
    count = BARRIER.parties

    def test(context: Context[Any], _: Run) -> None:
        one, two = context.peers("stage")
        with context.gradients(), concurrent.futures.ThreadPoolExecutor(count) as pool:
            path = [two.name, one.name]
            sums = [context.call(one, Member.meet, double(2, WIDTH), path).result().sum() for _ in range(count)]
            for ended in [pool.submit(each.backward) for each in sums]:
                ended.result(60)

    play(test, tmp_path)
