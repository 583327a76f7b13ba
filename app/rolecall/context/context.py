"""What a role's function is given: calls, training, and the rest of a rank's generation."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rolecall import telemetry
from rolecall.checkpoint.checkpoint import Checkpoints
from rolecall.checkpoint.kept import Kept, KeptStates
from rolecall.checkpoint.saving import Saver
from rolecall.checkpoint.shards import Shares
from rolecall.config import Settings
from rolecall.context.calls import Calls
from rolecall.context.gradients import Gradients
from rolecall.context.group import Group
from rolecall.context.progress import Progress, Supervision
from rolecall.context.queues import Queue
from rolecall.context.services import Services
from rolecall.context.shared import SharedArguments
from rolecall.context.training import Training
from rolecall.context.watchdog import Phase, Watchdog
from rolecall.context.weights import Publisher, Weights
from rolecall.copies.keeping import Keeper
from rolecall.copies.store import Store
from rolecall.declare.spec import Job
from rolecall.declare.task import Attachment, Peer
from rolecall.errors import UsageError
from rolecall.record import rundir
from rolecall.record.recorder import NOOP, NoopSpan, Span, plain, recorder
from rolecall.wire.dispatch import Dispatcher
from rolecall.wire.messages import PassKey

if TYPE_CHECKING:
    import torch

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class Context(Calls, Training, Generic[S]):
    """A rank's view of its generation: of the newest that its worker has become a part of. Before the first one, what
    needs a generation waits: peers, calls, queues, rank and generation.

    Rank 0's function returns the job's summary, a dict. The other ranks serve calls until their process is ended,
    whether their function has returned or not. What a function raises is a failure, except for the loss of a peer and
    bad input (UsageError).

    The parts: `group` (identity and peers), `progress` (metrics, history, log lines) and `watchdog` (phases, stuck
    steps).
    """

    def __init__(
        self,
        settings: S,
        attachment: Attachment | None,
        metrics: Any,
        job: Job | None = None,
        supervision: Supervision | None = None,
        *,
        place: Peer | None = None,
        seeds: Sequence[int] = (),
        checkpoints: Checkpoints | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Without an `attachment`, of the member at `place`, whose `seed` depends on SEED and `seeds`."""
        supervision = supervision or Supervision()
        watchdog = watchdog or Watchdog(
            settings.phase_timeout, settings.stuck_seconds, limit_loading=attachment is None or attachment.me.rank == 0
        )
        group = Group(
            settings,
            attachment,
            place,
            job=job,
            metrics=metrics,
            supervision=supervision,
            watchdog=watchdog,
        )
        Calls.__init__(self, group)  # without options
        progress = Progress(settings, metrics, supervision, watchdog, job)
        Training.__init__(self, group, progress, Saver(checkpoints, metrics) if checkpoints else None)
        self.settings: S = settings
        self.metrics = metrics
        self.torch: Any = None  # what torch.distributed does here, a `torch_rpc.distributed.Torch`; `connect` sets it
        self._seeds = (attachment.me.rank, attachment.generation) if attachment else tuple(seeds)
        self.internal_calls = Calls(group, internal=True, passes=self._passes)
        self._passes.changing = self._changing
        self.shares = Shares(settings.checkpoint_dir / rundir.SHARDS)
        self.services = Services(group, progress, lambda: int(self.torch.start_store()))
        self.weights = Publisher(group, metrics)
        self.kept: Kept | None = None  # what this member keeps
        self.constructing = False  # its role's class makes the object
        self.kept_states = KeptStates(self) if checkpoints else None
        self.copies = Store(settings.checkpoint_dir / rundir.COPIES, self.me.name)
        if checkpoints and settings.checkpoint_copies:
            self._keep_copies(checkpoints)
        offered = self.services, group.queues, self.shares, self.weights.holdings, self.weights.registry, self._passes
        mine = [self.copies, *([self.kept_states] if self.kept_states else [])]
        self.dispatcher = Dispatcher(self.me.name, *offered, SharedArguments(), *mine, pending=watchdog.long_calls)
        self.dispatcher.forward = self._passes.forward

    def _keep_copies(self, checkpoints: Checkpoints) -> None:
        """Members hold copies of the checkpoints."""
        group, settings = self.group, self.settings
        if self.job is None or not self.job.rpc:
            self.logger.warning("CHECKPOINT_COPIES: nothing is copied, as the ranks of this job do not call each other")
            return

        def others() -> list[str]:
            return [peer.name for peer in group.members[1:] if peer.name not in group.lost]

        checkpoints.copies = keeper = Keeper(
            checkpoints,
            self.copies,
            settings,
            self.weights.connect,
            others,
            is_draining=group.drain_ordered.is_set,
            metrics=self.metrics,
        )
        group.on_lost.append(keeper.changed)
        group.on_joined.append(keeper.changed)

    # ---- identity and peers

    @property
    def me(self) -> Peer:
        """This member. Before its first generation, only its role and ordinal are known: its rank is -1."""
        return self.group.me

    @property
    def members(self) -> tuple[Peer, ...]:
        """The members of the generation, in order of rank, lost ones included. One that joins is the last; one that
        joins again has its place of before."""
        return self.group.members

    @property
    def generation(self) -> int:
        """The number of the generation."""
        return self.group.generation

    @property
    def rank(self) -> int:
        """This rank, from 0 on, among the members of the generation."""
        return self.group.attachment.me.rank

    @property
    def world_size(self) -> int:
        """The number of members of the generation, lost ones included."""
        return len(self.members)

    def peers(self, role: str) -> list[Peer]:
        """The generation's members with `role`, by ordinal, without those that were lost."""
        return self.group.peers(role)

    @property
    def lost(self) -> set[str]:
        """The names of the members that were lost."""
        return self.group.lost

    @property
    def rank0(self) -> Peer:
        """The member of rank 0."""
        return self.members[0]

    # ---- calls

    @staticmethod
    def wait_all(calls: Sequence[concurrent.futures.Future[T]]) -> list[T]:
        """The answers of calls to peers that this rank cannot do without. As soon as one fails, raises its error."""
        with recorder.span("wait"):
            for call in concurrent.futures.as_completed(calls):  # each ends at its own deadline
                call.result()
        return [call.result() for call in calls]

    def queue(self, name: str, maxsize: int, at: Peer | None = None) -> Queue[Any]:
        """The queue `name` of at most `maxsize` items, which the member `at` owns; without it, rank 0 does. Every rank
        that uses it names it, its size and its owner alike. Raises UsageError for another size."""
        owner = at or self.rank0
        items = self.group.queues.open(name, maxsize) if owner.name == self.me.name else None
        return Queue(
            name,
            maxsize,
            items,
            lambda ask, end: self.group.connected.call(owner.name, ask, end),
            self.settings.rpc_timeout,
        )

    def publish(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        version: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Publishes `tensors`, such as `model.state_dict()`, as the newest version of the weights `name`; returns its
        number, by default one more than the last. They are copied before it returns, and sent in the background. The
        newest publication wins, whatever its number: after a restart from a checkpoint, numbers may begin anew. With
        `dtype`, torch.bfloat16 or torch.int8 (of matrices, with a scale for 256 elements), floating tensors travel as
        that type. One member publishes a name. Raises UsageError for what is no strided tensor, and for another
        `dtype`.
        """
        return self.weights.publish(name, tensors, version, dtype)

    def subscribe(self, name: str) -> Weights:
        """A subscription to the weights `name`, which some member publishes sooner or later. It may be made before the
        first generation."""
        return self.weights.subscribe(name)

    def keep(self, state: Mapping[str, Any]) -> Kept:
        """This member's state is in rank 0's checkpoints from now on, and comes back to the member with its role and
        ordinal. For the constructor of a class that is not rank 0's; values are those of `restore`.

        Returns `state` as a dict. It is set to what the newest checkpoint has, Stateful values in place, after
        `attached` and before peers call and `run` is called, whenever the worker has become a part of a generation:
        all of it then belongs to rank 0's state. Without a checkpoint it is as it was made. That waits for rank 0 to
        `restore`, so rank 0 calls no such member before. Change it in a block `with kept.changing():`.

        Raises UsageError at rank 0, in another place, and for values that a checkpoint cannot hold.
        """
        if self.group.is_rank0:
            raise UsageError("keep: rank 0's own state is what it gives to `restore`")
        if not self.constructing or self.kept is not None:
            raise UsageError("keep: call it once, in the constructor of the role's class")
        self.kept = Kept(self, state)
        return self.kept

    @contextlib.contextmanager
    def gradients(self) -> Iterator[Gradients]:
        """Calls of methods marked `@remote(grad=True)` in the block, by its thread, are differentiable: `backward` and
        torch.autograd.grad go through them, and through calls that those methods make. Tensors in the arguments,
        also within lists, tuples and dicts, get gradients as usual. Parameters at other members get theirs there, apart
        for each block, until `step` of what the block is given makes a step of the optimizers, or a method there calls
        `take_gradients`. What is left at the block's end is dropped, forward passes too. A second backward pass through
        a call is refused, and a gradient has none itself.

        `backward` raises what a call raises: PeerLostError, CallTimeoutError and RemoteError.
        """
        here = self._passes.begin(self._passes.next_key())
        try:
            with here.entered():
                yield Gradients(self._passes, here.key, self._ask)
        finally:
            self._passes.end(here.key)

    def optimize(self, optimizer: torch.optim.Optimizer, schedule: Any = None, *, hogwild: bool = False) -> None:
        """`Gradients.step` makes a step of `optimizer` from now on, and then of its learning rate's `schedule`, if this
        member has gradients of the pass. At the member that makes the pass they are those of its parameters' `grad`,
        too. A step changes parameters in place, which torch refuses between another pass's forward and backward; with
        `hogwild` it does not notice."""
        self._passes.optimize(optimizer, schedule, hogwild=hogwild)

    def take_gradients(self, key: PassKey) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of this member's parameters, by parameter, which the pass `Gradients.key` has left here."""
        return self._passes.take(key)

    def _changing(self) -> contextlib.AbstractContextManager[object]:
        return self.kept.changing() if self.kept else contextlib.nullcontext()

    def on_disconnect(self, to: Peer | str, gone: Callable[[str], None]) -> None:
        """Calls `gone(name)`, from another thread, as soon as the peer `to` has ended or its connection broke. It is
        for a peer that is not called while it works: the gang notices one that falls silent.
        """
        self.group.connected.on_disconnect(to if isinstance(to, str) else to.name, gone)

    def join_group(self, role: str, timeout: float) -> None:
        """Makes torch's default process group of the members with `role`, all of which call this. Collectives time
        out after `timeout` seconds. The backend is NCCL if each has a GPU of its own, otherwise gloo. Raises
        PeerLostError.
        """
        self.torch.join_group(role, timeout)

    def serve(self, target: object) -> None:
        """Peers call the methods of `target`, this role's object, from now on. The worker calls it, with what it has
        made of the role's class."""
        if not self.group.is_rank0:
            self.watchdog.ready()
        self.dispatcher.serve(target)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(name)`, from another thread, for every peer that is lost from now on: in this generation, and
        in those that the worker becomes a part of later. Who joins meanwhile is there once it has returned: it must not
        wait for that."""
        self.group.on_lost.append(partial(self.group.listeners.run, listener))

    def on_joined(self, listener: Callable[[str], None]) -> None:
        """Calls `listener(name)`, from another thread, for every peer that joins from now on, or joins again after it
        was lost, while the generation runs."""
        self.group.on_joined.append(partial(self.group.listeners.run, listener))

    def give_up(self, peer: Peer | str, stuck: str = "") -> None:
        """Removes `peer`, which rank 0 found dead, silent or `stuck`, as that text says, and has the gang replace its
        worker. A stuck one counts as a failure. Raises UsageError for a name that no member has."""
        self.group.give_up(peer, stuck)

    def replace(self, peer: Peer | str) -> None:
        """Removes `peer`, and has the gang end its worker and start another one, which joins. Only rank 0 may call it,
        for a member of an elastic role; otherwise it raises UsageError."""
        member = self.group.member(peer)
        if not self.group.is_rank0:
            raise UsageError(
                f"replace({member.name!r}): only rank 0 has members replaced; call a method of rank 0 for it"
            )
        if not self.group.is_elastic(member.role):
            why = "this is rank 0" if member == self.me else f"the role {member.role} is fixed"
            raise UsageError(
                f"replace({member.name!r}): {why}; only a member of an elastic role can be replaced (Role(minimum=...))"
            )
        if self.group.lose(member):
            self.supervision.report_lost(member, replace=True)

    def require_peers(self, role: str) -> None:
        """Raises PeerLostError if no peer with `role` is left, unless a drain is ordered within two leases."""
        self.group.require_peers(role)

    # ---- phases

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """The block is loading, restoring, compiling, evaluating or saving: a phase, which may take PHASE_TIMEOUT
        seconds, and not a step that is stuck. Calls that it makes have as long. `restore`, `save` and `evaluating` are
        phases by themselves. Rank 0 is loading until it begins to train, another rank until the object of its
        role is made.
        """
        with self.watchdog.phase(name):
            yield

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The phase in which training pauses for an evaluation. Alerts take it into account."""
        self.metrics.evaluating.set(1)
        try:
            with self.watchdog.phase("evaluating"):
                yield
        finally:
            self.metrics.evaluating.set(0)

    # ---- files

    @property
    def files(self) -> Path:
        """The directory for the job's own files, under this rank's CHECKPOINT_DIR. Raises UsageError if it cannot be
        made."""
        directory = self.settings.checkpoint_dir.absolute() / rundir.FILES
        with UsageError.wrap(f"CHECKPOINT_DIR={self.settings.checkpoint_dir}: cannot be written", OSError):
            directory.mkdir(parents=True, exist_ok=True)
        return directory

    # ---- progress

    def require_finite(self, *values: float, hint: str) -> None:
        """Raises FloatingPointError, and counts it, if a loss or the norm of its gradient is not finite."""
        if not all(map(math.isfinite, values)):
            self.metrics.nonfinite_losses.inc()
            raise FloatingPointError(hint)

    @staticmethod
    def timer() -> telemetry.Timer:
        """`with context.timer() as timer: ...` leaves the seconds that passed in `timer.seconds`."""
        return telemetry.Timer()

    @staticmethod
    def span(name: str, /, **attributes: Any) -> Span | NoopSpan:
        """`with context.span("forward", rows=64) as span: ...` is a span called `name` in the trace of a run, with
        `attributes`, numbers and texts; `span.note(loss=0.5)` adds some. Calls made in the block are shown under it.
        While nothing is recorded (TRACE), it costs a fraction of a microsecond.
        """
        return recorder.span(name, **plain(attributes)) if recorder.on else NOOP

    # ---- the end

    def conclude(self, summary: dict[str, Any] | None) -> None:
        """Ends rank 0's process at once, from any thread, as if its function had returned `summary`, or, if that is
        None, as after a drain. For a function that cannot be made to return.
        """
        self.supervision.conclude("drained" if summary is None else "finished", self.step, summary or {})

    def fail(self, problem: str | BaseException) -> None:
        """Ends this rank's process at once, from any thread, as if its function had raised `problem`, or
        ProgramError(`problem`) for a text. For a function that cannot be made to return, and for a remote method whose
        error is this rank's failure, not its caller's.
        """
        self.supervision.fail(problem)

    def close(self) -> None:
        """Ends what it does, in a process that goes on without it."""
        if self.group.session:
            self.group.session.end()
        self.dispatcher.close()
        if self._saver:
            self._saver.close()

    # ---- computing

    @property
    def threads(self) -> int:
        """Threads for a large computation. Single operations have one: splitting them stalls on a busy machine."""
        return self.settings.cpu_threads

    @property
    def device(self) -> Any:
        """The torch.device that this rank computes on. Raises UsageError for DEVICE=cuda without a CUDA device."""
        return choose_device(self.settings.device, "DEVICE")

    def seed(self, *extra: int) -> int:
        """A seed that depends on SEED, this rank, the generation that the worker was started for, and `extra`. If that
        is none, since it joins one later, the seed depends on its role and ordinal instead. Python's, numpy's and
        torch's generators are seeded with `seed()` before the function is called."""
        # the number of `extra`: otherwise a 0 at their end would change nothing
        return mixed_seed(self.settings.seed, *self._seeds, *extra, *([len(extra)] if extra else []))

    def shared_seed(self, *numbers: int) -> int:
        """A seed that depends on SEED and `numbers` only: with those of a step and of a part of its work, whoever does
        that draws the same random numbers."""
        return mixed_seed(self.settings.seed, *numbers, len(numbers))


def seed_generators(seed: int, cpu_only: bool = False) -> None:
    """Seeds Python's, numpy's and torch's generators; with `cpu_only` none of a GPU, which takes a hundredth of the
    time."""
    import numpy as np  # not in a supervisor, as in `mixed_seed`
    import torch

    random.seed(seed)
    np.random.seed(seed)
    if cpu_only:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def mixed_seed(*numbers: int) -> int:
    """A seed of 32 bits that depends on each of `numbers`."""
    import numpy as np  # not in a supervisor, which imports this module's names

    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def choose_device(wanted: str, variable: str) -> Any:
    """The torch.device that `variable` names with auto, cpu or cuda. Raises UsageError for cuda without a CUDA
    device."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"{variable}=cuda: torch finds no CUDA device here; use {variable}=auto or cpu")
    return torch.device("cuda")
