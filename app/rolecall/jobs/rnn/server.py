"""The ps, rank 0: holds the embedding and the decoder, and requests the trainer's steps."""

from __future__ import annotations

import io
from typing import Any

import torch

from rolecall import Context
from rolecall.jobs.rnn import RnnSettings, optimizer, trainer
from rolecall.jobs.rnn.calls import SERVER, ModelServer
from rolecall.jobs.rnn.evaluate import perplexity


def run(context: Context[RnnSettings]) -> dict[str, Any]:
    """Trains for EPOCHS, and validates after each. RPC's threads serve the trainer's calls (`calls`) meanwhile."""
    settings = context.settings
    server = SERVER.set(ModelServer(context))
    (text,) = context.call_all("trainer", trainer.describe)
    dense, sparse = optimizer.LOCAL
    state = context.restore(
        {
            "text": text,
            **server.modules,
            "dense": dense,
            "sparse": sparse,
            "trainer": TrainerState(context),
            "tokens": 0,
            "loss": 0.0,
            "history": [],
        }
    )
    # longer than any call that the trainer makes meanwhile
    timeout = 2 * settings.step_timeout + settings.rpc_timeout
    steps = context.steps(
        settings.epochs * text.steps,
        work=settings.epochs * text.targets,
        corpus=settings.corpus,
        vocabulary=len(text.vocabulary),
        tokens=text.tokens,
        steps_an_epoch=text.steps,
    )
    for step in steps:
        epoch = -(-step // text.steps)
        ((loss, tokens),) = context.call_all("trainer", trainer.train, step, timeout=timeout)
        state["tokens"] += tokens
        state["loss"] += loss * tokens
        context.log(done=state["tokens"], loss=loss, epoch=epoch)
        if step == epoch * text.steps:  # the last of the epoch
            with context.evaluating():
                (validated,) = context.call_all("trainer", trainer.validate)
            trained, score = state["loss"] / text.targets, perplexity(validated)
            message = f"Epoch {epoch}\tvalidation loss {validated:.4f}\tperplexity {score:.2f}"
            context.logger.info(message, training_loss=round(trained, 4))
            context.log(score=score)
            state["history"].append([trained, validated])
            state["loss"] = 0.0
    epochs, score = len(state["history"]), perplexity(state["history"][-1][1])
    message = f"Finished: validation perplexity {score:.2f} after {epochs} epochs"
    return context.finish(message, perplexity=score, epochs=epochs, steps=context.step)


class TrainerState:
    """The trainer's part of the checkpoint."""

    def __init__(self, context: Context[RnnSettings]) -> None:
        self._context = context

    def state_dict(self) -> dict[str, Any]:
        """Fetches the state to the CPU."""
        (saved,) = self._context.call_all("trainer", trainer.save)
        return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sends the state to the trainer."""
        list(self._context.call_all("trainer", trainer.load, state))
