"""`rolecall export rnn`: the language model as one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall import Exported
from rolecall.jobs.rnn import RnnSettings, corpus
from rolecall.jobs.rnn.evaluate import restore, text_of
from rolecall.jobs.rnn.model import LanguageModel

LICENCE = "PSF-2.0 (the source of the Python standard library)"
EXAMPLE_SHAPE = (3, 2)  # tokens of a stream, streams


class ExportedModel(nn.Module):
    """Maps tokens and a state to the logits of each next token, and the next state."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = model.embedding, model.lstm.layers, model.decoder

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [length, batch] int64 and states [layers, batch, hidden], initially zeros, to logits [length, batch,
        vocabulary] and states.
        """
        vectors = self.embedding(tokens)
        if torch.compiler.is_exporting():  # the export unrolls nn.LSTM, for one length only
            output, hidden, cell = self._scanned(vectors, hidden, cell)
        else:
            output, (hidden, cell) = self.lstm(vectors, (hidden, cell))
        return self.decoder(output), hidden, cell

    def _scanned(self, vectors: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes nn.LSTM as one loop over the length for each layer."""
        from torch._higher_order_ops.scan import scan  # torch has no public name for it yet

        states = []
        for layer in range(self.lstm.num_layers):
            of_input, of_hidden, *biases = (
                getattr(self.lstm, f"{what}_l{layer}") for what in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )

            def step(state: tuple[Tensor, Tensor], given: Tensor, weight: Tensor = of_hidden) -> Any:
                gates = given + functional.linear(state[0], weight)
                input_gate, forget_gate, candidate, output_gate = gates.chunk(4, -1)
                cell = forget_gate.sigmoid() * state[1] + input_gate.sigmoid() * candidate.tanh()
                hidden = output_gate.sigmoid() * cell.tanh()
                return (hidden, cell), hidden.clone()

            state, vectors = scan(step, (hidden[layer], cell[layer]), functional.linear(vectors, of_input, sum(biases)))
            states.append(state)
        after, cells = (torch.stack(column) for column in zip(*states, strict=True))
        return vectors, after, cells


def export(settings: RnnSettings, state: dict[str, Any]) -> Exported:
    """See `ExportedModel`. Raises UsageError as `evaluate` does."""
    model, vocabulary = restore(settings, state)
    text = text_of(settings, state)
    streams = corpus.streams(text.validation, settings.batch_size)

    @torch.no_grad()
    def reference(tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, after = model.lstm(model.embedding(tokens), (hidden, cell))
        return model.decoder(output), *after

    def batches() -> Iterator[dict[str, Tensor]]:
        yield _inputs(streams[:1, :1], *model.lstm.start(1))
        hidden, cell = model.lstm.start(settings.batch_size)
        for number in range(corpus.steps(streams, settings.sequence)):
            tokens, _ = corpus.window(streams, number, settings.sequence)
            yield _inputs(tokens, hidden, cell)
            _, (hidden, cell) = model.lstm(model.embedding(tokens), (hidden, cell))

    return Exported(
        ExportedModel(model),
        _inputs(torch.zeros(EXAMPLE_SHAPE, dtype=torch.int64), *model.lstm.start(EXAMPLE_SHAPE[1])),
        ["logits", "next_hidden", "next_cell"],
        {"tokens": {0: "length", 1: "batch"}, "hidden": {1: "batch"}, "cell": {1: "batch"}},
        batches,
        reference=reference,
        licence=LICENCE if settings.corpus == "stdlib" else "",
        extra={"vocabulary": list(vocabulary.words)},
    )


def _inputs(tokens: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens, "hidden": hidden, "cell": cell}
