"""The ps, rank 0: holds the embedding table and the decoder, which the trainer builds, calls and steps over RPC."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future as Promise
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from rolecall import telemetry
from rolecall.job.context import Context, Outcome
from rolecall.job.rpc import PeerLostError
from rolecall.jobs.rnn import RnnSettings, model, optimizer
from rolecall.jobs.rnn.model import Decoder, Embedding

LOOK_SECONDS = 0.2
START_SECONDS = 30.0
_server: Promise[Server] = Promise()
Half = dict[str, Any]  # the trainer's share of a checkpoint


@dataclass(frozen=True)
class Save:
    """The trainer's order for a checkpoint of `step`; the job's last one has a `summary`."""

    step: int
    half: Half
    optimizers: list[Any]
    summary: dict[str, Any] | None
    answer: torch.futures.Future[bool]


def run(context: Context) -> Outcome:
    """Serve the trainer until it has finished, or a drain."""
    server = Server(context)
    _server.set_result(server)
    return server.serve()


class Server:
    """The modules, and what the trainer's calls need of them."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.settings, RnnSettings)
        self.context, self.settings, self.metrics = context, context.settings, context.metrics
        self.inbox: queue.Queue[Save] = queue.Queue()
        self.modules: dict[str, nn.Module] = {}
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.heard = 0.0
        self.saved_at = time.monotonic()
        self.pool = model.Pool(context.threads)
        self._sums = -1, model.Sums()
        self.turn = threading.Lock()  # one micro-batch after the other: the trainer waits for the first
        assert context.checkpoints is not None
        found = context.checkpoints.newest()
        self.restored = found.state if found else None
        self.step = found.step if found else 0
        if found:
            telemetry.log().info("resumed", file=found.path.name, step=found.step)

    def serve(self) -> Outcome:
        """Write what the trainer wants written."""
        while True:
            try:
                save = self.inbox.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                silent = time.monotonic() - self.heard
                if self.heard and silent > 2 * self.settings.step_timeout + self.settings.rpc_timeout:
                    raise PeerLostError(f"the trainer has not called for {silent:.0f} s") from None
                continue
            self.reached(save.step)
            draining = self.context.draining
            written = self.context.save(save.step, self._state(save), drain=draining)
            self.saved_at = time.monotonic()
            over = save.summary is not None or (draining and written)
            save.answer.set_result(not over)
            if save.summary is not None:
                return Outcome("finished", save.step, {**save.summary, "saved": written})
            if over:
                return Outcome("drained", save.step)

    def reached(self, step: int) -> None:
        """The trainer has made step number `step`."""
        if step > self.step:  # and not what the checkpoint had made already
            self.step = step
            self.metrics.step.set(step)
            self.context.report(step)

    def _state(self, save: Save) -> dict[str, Any]:
        weights = {name: module.state_dict() for name, module in self.modules.items()}
        return {
            **save.half,
            "weights": {**save.half["weights"], **weights},
            "optimizers": {"trainer": save.half["optimizers"], "ps": optimizer.state(save.optimizers)},
        }

    def place(self, module: nn.Module, name: str, device: torch.device) -> nn.Module:
        """Put a module that was just built where it belongs, with the weights that it had before."""
        module.to(device)
        if self.restored is not None:
            module.load_state_dict(self.restored["weights"][name])
        self.modules[name] = module
        return module

    def sums_of(self, context_id: int) -> model.Sums:
        """Where the micro-batches of a step, which is a distributed autograd context_id, add their gradients."""
        if self._sums[0] != context_id:
            self._sums = context_id, model.Sums()
        return self._sums[1]

    def outgoing(self, tensor: Tensor) -> Tensor:
        """Where the trainer's calls expect it: on a GPU only where both ranks compute with one."""
        trainer = self.context.peers("trainer")[0].name
        return tensor.to(self.context.device if trainer in self.context.mapped else "cpu")


# ---- called over RPC by the trainer


def here() -> Server:
    """This process's server."""
    # RPC serves from before `run` is called: the trainer may be a moment early
    server = _server.result(START_SECONDS)
    server.heard = time.monotonic()
    return server


def begin() -> Half | None:
    """What the trainer goes on from: its share of the newest checkpoint; None where there is none."""
    restored = here().restored
    if restored is None:
        return None
    weights = {name: found for name, found in restored["weights"].items() if name == "lstm"}
    return {**restored, "weights": weights, "optimizers": restored["optimizers"]["trainer"]}


def embedding(tokens: int) -> nn.Module:
    """Build the embedding table; `rpc.remote` makes an RRef of it."""
    server = here()
    settings = server.settings
    wanted = settings.embedding_device
    device = server.context.device if wanted == "auto" else model.device(wanted, "EMBEDDING_DEVICE")
    return server.place(Embedding(settings, tokens), "embedding", device)


def decoder(tokens: int) -> nn.Module:
    """Build the decoder."""
    server = here()
    return server.place(Decoder(server.settings, tokens), "decoder", server.context.device)


def parameters(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[Tensor]]:
    """References to the parameters of a module that is here."""
    return optimizer.references(module.local_value())


def embed(module: rpc.RRef[Embedding], tokens: Tensor) -> Tensor:
    """Look `tokens` [length, batch] up: [length, batch, width]."""
    server, table = here(), module.local_value()
    with server.metrics.rnn_embedding_seconds.time():
        found: Tensor = table(tokens.to(table.weight.device))
        return server.outgoing(found)


def decode(context_id: int, module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
    """The summed loss of `targets` [length, batch] after `hidden` [length, batch, hidden], times `scale`; one number.

    The logits stay here, and so do their gradients.
    """
    server, layer = here(), module.local_value()
    place = layer.weight.device
    with server.metrics.rnn_decoder_seconds.time():
        with server.turn:
            found = layer.loss(hidden.to(place), targets.to(place), scale, server.pool, server.sums_of(context_id))
        return server.outgoing(found)


def validate(module: rpc.RRef[Decoder], hidden: Tensor, targets: Tensor) -> float:
    """As `decode`, without gradients."""
    server, layer = here(), module.local_value()
    place = layer.weight.device
    with torch.no_grad(), server.turn:
        return float(layer.loss(hidden.to(place), targets.to(place), 1.0, server.pool))


def sample(module: rpc.RRef[Decoder], hidden: Tensor, temperature: float) -> int:
    """Draw the token after `hidden` [hidden]."""
    layer: Decoder = module.local_value()
    return layer.sample(hidden.to(layer.weight.device), temperature, here().generator)


def clip(context_id: int, squares: float, step: int) -> tuple[float, bool]:
    """Clip this rank's gradients by the norm of all, `squares` being what the trainer's add to its square.

    Returns the norm, and whether a checkpoint is due after this step, which is the one after number `step`.
    """
    server = here()
    server.reached(step)
    norm = float((squares + optimizer.square_norm(context_id)) ** 0.5)
    optimizer.scale(context_id, norm, server.settings.max_grad_norm)
    due = time.monotonic() - server.saved_at > server.settings.checkpoint_interval
    return norm, due or server.context.draining


def note(step: int, values: dict[str, float]) -> None:
    """Take what goes to the run's history, which rank 0 keeps: values by kind, as of `Context.note`."""
    context = here().context
    for kind, value in values.items():
        context.note(kind, step, value)


def load(optimizers: list[Any]) -> None:
    """Give the optimizers that are here the state that the newest checkpoint has of them."""
    server = here()
    assert server.restored is not None
    optimizer.load(optimizers, server.restored["optimizers"]["ps"])
    server.restored = None  # it has served


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def save(
    step: int, half: Half, optimizers: list[Any], summary: dict[str, Any] | None = None
) -> torch.futures.Future[bool]:
    """Write a checkpoint of both halves; with a `summary` the job is done. Answered with whether to go on."""
    answer: torch.futures.Future[bool] = torch.futures.Future()
    here().inbox.put(Save(step, half, optimizers, summary, answer))
    return answer
