"""What a member keeps for gradients that cross calls: forward passes, parameters' gradients, and optimizers.

Everything belongs to a pass, a block `with context.gradients()` at some member, whose key goes along with each call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rolecall.context.group import Group
from rolecall.declare.remote import remote
from rolecall.errors import PeerLostError, UsageError
from rolecall.wire import apart, codec
from rolecall.wire.future import Future
from rolecall.wire.messages import Deadline, Forward, PassKey, Request
from rolecall.wire.session import Session

Forwards = tuple[tuple[PassKey, PassKey], ...]  # passes and the places of calls in them


class Answer(NamedTuple):
    """What a method with `grad` has returned. Of the tensors in `value`, those whose numbers are in `differentiable`
    have a gradient; its values say which are on a GPU there. All travel as the CPU's, as their gradients do: a thread
    of torch's for a GPU must not wait for a peer, whose calls it may have to serve."""

    value: Any
    differentiable: dict[int, bool]


class Backward(NamedTuple):
    """Gradients of what the call at `place` has returned, None for what was not used. `parameters`: the pass asks for
    those of parameters too."""

    key: PassKey
    place: PassKey
    grads: tuple[Tensor | None, ...]
    parameters: bool


class InputGradients(NamedTuple):
    """The answer: gradients of the inputs, and the `holders` of parameters' gradients, as far as they are known."""

    grads: tuple[Tensor | None, ...]
    holders: frozenset[str]


class Step(NamedTuple):
    """A step with the gradients of a pass, multiplied by `scale`."""

    key: PassKey
    scale: float


@dataclass(eq=False)
class Kept:
    """A forward pass: its inputs that need a gradient, and what was returned that has one."""

    inputs: list[Tensor]
    outputs: list[GradientEdge]
    root: Tensor


@dataclass(eq=False)
class Calls:
    """The calls that this member makes in a pass, which ends with the `session`. It refers to nothing that was
    computed: autograd's nodes refer to it, and a circle through them is never collected."""

    session: Session
    kept: dict[PassKey, str] = field(default_factory=dict)  # by place, who may keep something
    futures: WeakSet[Future[Any]] = field(default_factory=WeakSet)
    going: dict[str, Future[Any]] = field(default_factory=dict)  # by peer, a backward pass that nobody waits for yet


@dataclass(eq=False)
class State:
    """What this member knows of a pass."""

    calls: Calls
    forwards: dict[PassKey, Kept | None] = field(default_factory=dict)  # by place; None while it runs
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter
    holders: set[str] = field(default_factory=set)  # others that have gradients


class Within:
    """What the thread's calls belong to. Their gradients lead to `root`, so that a backward pass which asks for
    parameters goes through them though none is here."""

    def __init__(self, key: PassKey, calls: Calls) -> None:
        self.key, self.calls, self.root = key, calls, torch.zeros((), requires_grad=True)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block's calls belong to this."""
        token = within.set(self)
        try:
            yield
        finally:
            within.reset(token)


within: ContextVar[Within | None] = ContextVar("within", default=None)


@dataclass(frozen=True)
class Optimization:
    """An optimizer of this member's parameters; see `Context.optimize`."""

    optimizer: torch.optim.Optimizer
    schedule: Any
    hogwild: bool

    @property
    def parameters(self) -> list[Tensor]:
        """What it changes."""
        return [each for group in self.optimizer.param_groups for each in group["params"]]


class Passes:
    """The passes that this member takes part in, its own ones and those of its callers, until each is over, its caller
    is lost, or the generation ends. Without a lock, `drop` may be called by a finalizer."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.changing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self._lock = threading.RLock()  # again, where a graph is freed
        self._states: dict[PassKey, State] = {}
        self._session: Session | None = None  # that they belong to
        self._numbers = itertools.count(1)
        self._dropped: dict[str, deque[tuple[PassKey, PassKey]]] = {}  # by the member that keeps them
        self._optimizations: list[Optimization] = []
        self._stepping = threading.Lock()
        group.on_lost.append(self._lost)

    # ---- passes

    def next_key(self) -> PassKey:
        """A new pass of this member, or a new call's place."""
        me = self.group.attachment.me
        return PassKey(me.name, me.join, next(self._numbers))

    def begin(self, key: PassKey) -> Within:
        """What calls of a pass belong to, which begins here unless it has before."""
        with self._lock:
            session = self.group.session
            assert session is not None  # the worker has been a part of a generation
            if session is not self._session:
                self._states, self._dropped, self._session = {}, {}, session
                session.on_end(self._end_session)
            return Within(key, self._states.setdefault(key, State(Calls(session))).calls)

    def _end_session(self) -> None:
        with self._lock:
            states, self._states, self._dropped = self._states, {}, {}
        states.clear()

    def goes_on(self, key: PassKey) -> bool:
        """Whether a pass that has begun here is not over."""
        return key in self._states

    def holders(self, key: PassKey) -> set[str]:
        """The other members that have gradients of a pass."""
        state = self._states.get(key)
        return state.holders - {self.group.me.name} if state else set()

    def end(self, key: PassKey) -> None:
        """A pass is over, here and at every member that was called in it."""
        with self._lock:
            state = self._states.pop(key, None)
        if state is None:
            return
        for future in [*state.calls.futures]:
            future.cancel()
        peers = {*state.holders, *state.calls.kept.values()} - {self.group.me.name}
        state.calls.kept.clear()
        del state  # frees graphs, and with them calls at other members
        self._tell(peers, (), (key,))
        self.flush()

    def learn(self, key: PassKey, holders: Iterable[str]) -> None:
        """These members have gradients of a pass."""
        with self._lock:
            state = self._states.get(key)
            if state is not None:
                state.holders.update(holders)
                return
        self._tell({*holders}, (), (key,))  # it is over

    def _tell(self, peers: Iterable[str], forwards: Forwards, keys: tuple[PassKey, ...]) -> None:
        transport = self.group.transport
        if transport is None:
            return  # with which all has ended
        for peer in peers:
            request = Request("release", (forwards, keys), {}, 0.0, internal=True)
            transport.wire.call(peer, request, Deadline(self.group.settings.rpc_timeout), urgent=True, waits=False)

    # ---- forward passes that are not kept any more

    def drop(self, to: str, key: PassKey, place: PassKey) -> None:
        """No backward pass goes through a call at `to`, as it learns soon."""
        self._dropped.setdefault(to, deque()).append((key, place))

    def take_dropped(self, to: str) -> Forwards:
        """What is to be released at `to` with the next call."""
        dropped = self._dropped.get(to)
        return tuple(dropped.popleft() for _ in range(len(dropped))) if dropped else ()

    def flush(self) -> None:
        """Has others release what was dropped."""
        for peer in [*self._dropped]:
            if forwards := self.take_dropped(peer):
                self._tell((peer,), forwards, ())

    @remote
    def release(self, forwards: Forwards, keys: tuple[PassKey, ...]) -> None:
        """Forward passes at these places are not kept any more, and these passes are over."""
        for key, place in forwards:
            with self._lock:
                state = self._states.get(key)
                kept = state.forwards.pop(place, None) if state else None
                self._forget_empty(key)
            del kept, state
        for key in keys:
            self.end(key)
        self.flush()

    def _forget_empty(self, key: PassKey) -> None:
        """Forgets a caller's pass of which nothing is left here. With the lock held."""
        state = self._states.get(key)
        if state and key.member != self.group.me.name and not (state.forwards or state.gradients or state.holders):
            del self._states[key]

    def _lost(self, name: str) -> None:
        if self._states:
            apart.run(self._forget_lost, name)  # the group's lock is held

    def _forget_lost(self, name: str) -> None:
        """A member is lost, perhaps to join again: ends its passes, and those calls of others' that were its."""
        member, lost = self.group.member(name), name in self.group.lost

        def is_gone(key: PassKey) -> bool:
            return key.member == name and key.join < member.join + lost

        with self._lock:
            ended = [key for key in self._states if is_gone(key)]
            forwards = [(key, place) for key, state in self._states.items() for place in state.forwards]
        self.release(tuple((key, place) for key, place in forwards if is_gone(place)), tuple(ended))

    # ---- what callers ask for

    def forward(self, method: Callable[..., Any], message: Forward) -> Answer:
        """Calls a method of the role's object for a peer that may differentiate what it returns."""
        if message.released:
            self.release(message.released, ())
        key, place = message.key, message.place
        if key is None:
            with torch.no_grad():
                value = _plain(method, method(*message.args, **message.kwargs))
                return Answer(map_tensors(value, lambda _, tensor: tensor.detach()), {})
        inputs, outputs, differentiable = list[Tensor](), list[GradientEdge](), dict[int, bool]()

        def take(number: int, tensor: Tensor) -> Tensor:
            if number not in message.wanted:
                return tensor
            inputs.append(tensor.requires_grad_())
            return arrived(tensor, message.wanted[number])

        def give(number: int, tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                differentiable[number] = not tensor.is_cpu
                tensor = tensor.cpu()
                outputs.append(get_gradient_edge(tensor))
            return tensor.detach()

        with self._lock:
            here = self.begin(key)
            state = self._states[key]
            state.forwards[place] = None
        try:
            with torch.enable_grad(), here.entered():
                args, kwargs = map_tensors((message.args, message.kwargs), take)
                value = map_tensors(_plain(method, method(*args, **kwargs)), give)
        except BaseException:
            self.release(((key, place),), ())
            raise
        with self._lock:
            if place in state.forwards:  # otherwise it was given up meanwhile
                state.forwards[place] = Kept(inputs, outputs, here.root)
        if not outputs:
            self.release(((key, place),), ())
        return Answer(value, differentiable)

    @remote
    def backward(self, message: Backward) -> InputGradients:
        """The backward pass of a call. Gradients of parameters stay here."""
        key = message.key
        with self._lock:
            state = self._states.get(key)
            kept = state.forwards.get(message.place) if state else None
            if state is None or kept is None:
                raise PeerLostError(f"{self.group.me} does not have the forward pass any more: it has joined again")
            state.forwards[message.place] = None
        used = [(edge, grad) for edge, grad in zip(kept.outputs, message.grads, strict=True) if grad is not None]
        outputs, grads = [edge for edge, _ in used], [grad for _, grad in used]
        known, parameters = [*kept.inputs, kept.root], list[Tensor]()
        if message.parameters:
            parameters = [each for each in leaves(outputs) if all(each is not other for other in known)]
        wanted, count = [*kept.inputs, *parameters, *([kept.root] if message.parameters else [])], len(kept.inputs)
        del used, kept
        try:
            results = torch.autograd.grad(outputs, wanted, grads, allow_unused=True) if wanted else ()
            with self._lock:
                _add(state.gradients, zip(parameters, results[count:], strict=False))
            holders = state.holders | ({self.group.me.name} if state.gradients or state.holders else set())
        finally:
            del outputs, grads  # and with them the graph
            self.release(((key, message.place),), ())
        if not self.goes_on(key):  # the caller does not learn of them
            self._tell(state.holders, (), (key,))
        return InputGradients(tuple(results[:count]), frozenset(holders))

    # ---- gradients of parameters

    def optimize(self, optimizer: torch.optim.Optimizer, schedule: Any, *, hogwild: bool) -> None:
        """See `Context.optimize`."""
        self._optimizations.append(Optimization(optimizer, schedule, hogwild))

    def _gradients(self, key: PassKey) -> dict[Tensor, Tensor]:
        """Of a pass, at the member that it is of with those that its parameters have themselves."""
        with self._lock:
            state = self._states.get(key)
            gradients = {**state.gradients} if state else {}
        if key.member == self.group.me.name:
            parameters = {each: each.grad for one in self._optimizations for each in one.parameters}
            _add(gradients, parameters.items())
        return gradients

    @remote
    def square_norm(self, key: PassKey) -> float:
        """The square of the norm of the gradients of a pass here."""
        values = (grad.coalesce().values() if grad.is_sparse else grad for grad in self._gradients(key).values())
        return sum((float(torch.linalg.vector_norm(each)) ** 2 for each in values), 0.0)

    def take(self, key: PassKey) -> dict[Tensor, Tensor]:
        """The gradients of a pass here, by parameter. They are not kept any more."""
        with self._lock:
            state = self._states.get(key)
            if state is None:
                return {}
            gradients, state.gradients, state.holders = state.gradients, {}, set()
            self._forget_empty(key)
        return gradients

    @remote
    def step(self, step: Step) -> None:
        """Makes a step of this member's optimizers. Raises UsageError if none has a parameter that has a gradient."""
        key, scale = step
        with self._stepping, self.changing():
            gradients = self._gradients(key)
            rest = gradients.keys() - {each for one in self._optimizations for each in one.parameters}
            if rest:
                shapes = ", ".join(sorted(str(tuple(each.shape)) for each in rest))
                raise UsageError(
                    f"{self.group.me} has gradients of parameters that no optimizer has ({shapes}): give it "
                    f"to context.optimize(...), or take them by context.take_gradients(key)"
                )
            self.take(key)
            for each in self._optimizations:
                _step(each, gradients, scale)


# ---- tensors


def _plain(method: Callable[..., Any], value: Any) -> Any:
    """What a method has returned. Raises UsageError for a future, whose value has no gradient yet."""
    if isinstance(value, concurrent.futures.Future):
        raise UsageError(f"@remote(grad=True): {method.__qualname__} returns a Future; return tensors")
    return value


def map_tensors(value: Any, change: Callable[[int, Tensor], Any], numbers: Iterator[int] | None = None) -> Any:
    """`value` with each tensor in its lists, tuples and dicts replaced by what `change` makes of it, by number."""
    numbers = numbers or itertools.count()
    if isinstance(value, Tensor):
        return change(next(numbers), value)
    if isinstance(value, list | tuple):
        items = [map_tensors(each, change, numbers) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: map_tensors(each, change, numbers) for name, each in value.items()}
    return value


def arrived(tensor: Tensor, on_gpu: bool) -> Tensor:
    """A tensor of a peer that has it on a GPU, or not, where such ones arrive."""
    return tensor.to(codec.arrival()) if on_gpu else tensor


def leaves(outputs: Iterable[GradientEdge]) -> list[Tensor]:
    """The tensors that `outputs` were computed from and that gather gradients."""
    seen, todo = set[Any](), [edge.node for edge in outputs]
    variables = list[Tensor]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            variables.append(variable)
        todo += [each for each, _ in node.next_functions if each is not None]
    return variables


def _add(sums: dict[Tensor, Tensor], grads: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Adds gradients to the sums of their parameters, in memory that nothing else has, laid out as the parameter."""
    memory = set[int]()
    for parameter, grad in grads:
        if grad is None:
            continue
        before = sums.get(parameter)
        if before is not None:
            sums[parameter] = grad + before if before.is_sparse else before + grad
            continue
        if not grad.is_sparse:
            address = grad.untyped_storage().data_ptr()
            if address in memory or grad.stride() != parameter.stride():
                grad = torch.empty_like(parameter).copy_(grad)
            memory.add(address)
        sums[parameter] = grad


@torch.no_grad()
def _step(one: Optimization, gradients: Mapping[Tensor, Tensor], scale: float) -> None:
    parameters = one.parameters
    for parameter in parameters:
        grad = gradients.get(parameter)
        parameter.grad = grad if grad is None or scale == 1.0 else grad * scale
    try:
        if one.hogwild:
            with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):  # type: ignore[attr-defined]
                one.optimizer.step()
        else:
            one.optimizer.step()
        if one.schedule is not None:
            one.schedule.step()
    finally:
        one.optimizer.zero_grad()
