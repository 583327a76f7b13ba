"""Gradients across calls, at the member that calls: each answer is a node of its autograd graph."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolecall.context.passes import Answer, Backward, InputGradients, Passes, Step, Within, arrived, map_tensors, within
from rolecall.errors import UsageError
from rolecall.wire.future import Future
from rolecall.wire.messages import Forward, PassKey
from rolecall.wire.session import belongs_to

Send = Callable[[str, str, Any], Future[Any]]  # to a peer's worker, a method of its own services, its argument


class Crossing:
    """A call of the method `name` with `grad`, at the peer `to`, in the pass `here`. `send` calls for the backward
    pass, with the options of the call. Nothing here refers to what the call has returned: it ends with the last tensor
    of that, and if no backward pass has gone through it, the peer learns that it need not keep the forward pass."""

    def __init__(self, passes: Passes, here: Within, to: str, name: str, send: Send) -> None:
        self._open = False  # the peer keeps something
        self._passes, self._here, self._to, self._name, self._send = passes, here, to, name, send
        self._place = passes.next_key()
        self._inputs = list[Tensor]()
        self.calls = here.calls
        self._link: Any = None

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        """The message with the method's arguments. Tensors of a GPU that need a gradient travel as the CPU's; see
        `Answer`."""
        wanted = dict[int, bool]()

        def leave(number: int, tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                wanted[number] = not tensor.is_cpu
                tensor = tensor.cpu()
                self._inputs.append(tensor)
            return tensor.detach()

        args, kwargs = map_tensors((args, kwargs), leave)
        self.calls.kept[self._place] = self._to
        self._open = True
        dropped = self._passes.take_dropped(self._to)
        return Forward(args, kwargs, self._here.key, self._place, wanted=wanted, released=dropped)

    def attach(self, answer: Answer) -> Any:
        """What the method has returned, with its gradient."""
        inputs, self._inputs = self._inputs, []
        if not answer.differentiable:
            self._close()
            return answer.value
        outputs = list[Tensor]()

        def collect(number: int, tensor: Tensor) -> None:
            if number in answer.differentiable:
                outputs.append(tensor)

        map_tensors(answer.value, collect)
        with torch.enable_grad():
            link = self._here.root.view(())
            self._link = link.grad_fn
            tensors = iter(_Node.apply(self, outputs, link, *inputs))

            def give(number: int, tensor: Tensor) -> Tensor:
                on_gpu = answer.differentiable.get(number)
                return tensor if on_gpu is None else arrived(next(tensors), on_gpu)

            return map_tensors(answer.value, give)

    def back(self, grads: tuple[Tensor | None, ...], count: int) -> tuple[Tensor | None, ...]:
        """The backward pass: the gradients of the `count` inputs. Raises PeerLostError and CallTimeoutError,
        RemoteError for what it has raised at the peer, and UsageError for a second one. Without inputs, it goes on
        while those at other peers do, and what it raises is raised at their end; a peer adds gradients up in one
        order, so that their sums have the same bits each time."""
        what, session = f"{self._name} at {self._to}", self.calls.session
        if torch.is_grad_enabled():
            raise UsageError(f"{what}: create_graph does not cross ranks; leave it out")
        if not self._open:
            raise UsageError(f"{what}: a backward pass has gone through it; no graph is retained: call again")
        if session.ended:
            raise session.error()
        if not self._passes.goes_on(self._here.key):
            raise UsageError(f"{what}: the block `with context.gradients()` that it was called in is over")
        self._open = False
        parameters = torch._C._will_engine_execute_node(self._link)
        message = Backward(self._here.key, self._place, grads, parameters)
        with belongs_to(session):
            if before := self.calls.going.pop(self._to, None):
                before.exception()  # is raised below, by the one who waits for it
            call = self._send(self._to, "backward", message)
        if count:
            return self._end(call)
        self.calls.going[self._to] = call

        def wait() -> None:
            self._end(call)

        torch.autograd.Variable._execution_engine.queue_callback(wait)
        return ()

    def _end(self, call: Future[Any]) -> tuple[Tensor | None, ...]:
        answer: InputGradients = call.result()
        self.calls.kept.pop(self._place, None)  # after an error the peer may have something
        self._passes.learn(self._here.key, answer.holders)
        return answer.grads

    def _close(self) -> None:
        self._open = False
        self.calls.kept.pop(self._place, None)

    def __del__(self) -> None:
        if self._open and self.calls.kept.pop(self._place, ""):
            self._passes.drop(self._to, self._here.key, self._place)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, outputs: list[Tensor], _: Tensor, *inputs: Tensor) -> Any:
        ctx.crossing, ctx.count = crossing, len(inputs)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.crossing.back(grads, ctx.count)


def cross(passes: Passes, send: Send, to: str, method: Callable[..., Any]) -> Crossing | None:
    """A call of a method with `grad`, if it is to be differentiable. Raises UsageError outside a pass."""
    if not torch.is_grad_enabled():
        return None
    here, name = within.get(), method.__qualname__
    if here is None:
        raise UsageError(
            f"{name} has grad=True: call it in a block `with context.gradients()`, in its thread, or under "
            f"torch.no_grad()"
        )
    return Crossing(passes, here, to, name, send)


class Differentiable(Future[Any]):
    """The answer of a call with `grad`; `result` makes its tensors a part of the graph."""

    def __init__(self, call: Future[Any], crossing: Crossing | None) -> None:
        super().__init__(call.cancel, call.drop)
        self._crossing, self._attaching = crossing, threading.Lock()
        self._value: tuple[Any, ...] = ()
        if crossing is not None:
            crossing.calls.futures.add(self)
        call.then(self._ended)

    def _ended(self, call: concurrent.futures.Future[Any]) -> None:
        if not call.cancelled():
            error = call.exception()
            self.end(None if error else call.result(), error)

    def result(self, timeout: float | None = None) -> Any:
        """The answer; waits for it."""
        answer: Answer = super().result(timeout)
        with self._attaching:
            if not self._value:
                self._value = (self._crossing.attach(answer) if self._crossing else answer.value,)
        return self._value[0]


class Gradients:
    """The gradients of one pass, which a block `with context.gradients() as gradients` gives. `key` names the pass in a
    method of a peer that takes its gradients itself, by `Context.take_gradients`."""

    def __init__(self, passes: Passes, key: PassKey, send: Send) -> None:
        self.key, self._passes, self._send = key, passes, send
        self._norm: float | None = None

    def _call(self, method: str, argument: Any) -> list[Future[Any]]:
        """Calls all other members that have gradients."""
        if not self._passes.goes_on(self.key):
            raise UsageError(f"{method}: the block `with context.gradients()` is over")
        return [self._send(peer, method, argument) for peer in sorted(self._passes.holders(self.key))]

    def norm(self) -> float:
        """The norm of all gradients that `backward` has gathered, at every member. The next `step` clips by it."""
        calls = self._call("square_norm", self.key)
        squares = [self._passes.square_norm(self.key), *(call.result() for call in calls)]
        self._norm = sum(squares) ** 0.5
        return self._norm

    def step(self, max_norm: float | None = None) -> None:
        """Makes a step of the optimizers of every member that has gradients, and of this one's, at once: see
        `Context.optimize`. With `max_norm`, gradients are scaled as by torch's `clip_grad_norm_`, by the norm over all
        members. Raises PeerLostError, CallTimeoutError, and RemoteError for what a step has raised."""
        scale = 1.0
        if max_norm is not None:
            scale = min(1.0, max_norm / ((self.norm() if self._norm is None else self._norm) + 1e-6))
        calls, self._norm = self._call("step", Step(self.key, scale)), None
        self._passes.step(Step(self.key, scale))
        for call in calls:
            call.result()
