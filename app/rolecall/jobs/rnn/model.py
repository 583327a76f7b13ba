"""The model's three parts, and the loss that never holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolecall.config import UsageError
from rolecall.jobs.rnn import RnnSettings

ROWS = 350  # tokens whose logits are held at once
COLUMNS = (
    512  # of the logits that one multiplication makes: larger results leave the cache, and take half as long again
)
Item = TypeVar("Item")
Found = TypeVar("Found")
State = tuple[Tensor, Tensor]  # the LSTM's hidden and cell state, each [layers, batch, hidden]


class Embedding(nn.Embedding):
    """Token numbers [length, batch] to vectors [length, batch, width]; its gradient is sparse."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        width = settings.embedding_size
        super().__init__(tokens, width, sparse=True, _weight=torch.empty(tokens, width))
        nn.init.uniform_(self.weight, -0.1, 0.1, _seeded(settings, 0))


class Lstm(nn.Module):
    """Vectors [length, batch, width] to hidden states [length, batch, hidden], and on to the state after them."""

    def __init__(self, settings: RnnSettings) -> None:
        super().__init__()
        self.settings = settings
        self.layers = nn.LSTM(settings.embedding_size, settings.hidden_size, settings.layers,
                              dropout=settings.dropout if settings.layers > 1 else 0.0)  # fmt: skip
        bound, generator = settings.hidden_size**-0.5, _seeded(settings, 1)
        for parameter in self.layers.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator)

    def forward(self, vectors: Tensor, state: State) -> tuple[Tensor, State]:
        dropped = functional.dropout(vectors, self.settings.dropout, self.training)
        output, after = self.layers(dropped, state)
        return functional.dropout(output, self.settings.dropout, self.training), after

    def start(self, batch: int) -> State:
        """The state before any text."""
        shape = (self.settings.layers, batch, self.settings.hidden_size)
        weight = self.layers.weight_hh_l0
        assert isinstance(weight, Tensor)
        return torch.zeros(shape, device=weight.device), torch.zeros(shape, device=weight.device)


class Decoder(nn.Linear):
    """Hidden states to logits over the vocabulary, which stay here."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__(settings.hidden_size, tokens)
        nn.init.uniform_(self.weight, -0.1, 0.1, _seeded(settings, 2))
        nn.init.zeros_(self.bias)

    def loss(self, hidden: Tensor, targets: Tensor, scale: float = 1.0, pool: Pool | None = None,
             sums: Sums | None = None) -> Tensor:  # fmt: skip
        """The negative log-likelihood of `targets` [length, batch] after `hidden` [length, batch, hidden], summed and
        times `scale`; computed by `pool`, or here.

        Losses with the same `sums` must go through one backward pass, as a plain sum: the first of them hands out what
        all add to the gradients of weight and bias.
        """
        rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        pool = pool if self.weight.is_cpu else None
        found: Tensor = _Loss.apply(rows, self.weight, self.bias, wanted, scale, torch.is_grad_enabled(), pool, sums)
        return found

    @torch.no_grad()
    def sample(self, hidden: Tensor, temperature: float, generator: torch.Generator) -> int:
        """The number of a token that may follow `hidden` [hidden], drawn by its probability; never the unknown one."""
        logits = self(hidden).float().cpu() / temperature
        if len(logits) > 1:
            logits[0] = -torch.inf
        return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


class _Loss(torch.autograd.Function):
    """Cross-entropy of a linear layer's output, and at once its gradients, which the backward pass only hands out. No
    more than ROWS x vocabulary of the logits are ever held. (The idea: fused linear cross-entropy, Hsu et al. 2024,
    Liger kernel; the split over the vocabulary: Shoeybi et al. 2019, Megatron-LM.)
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: float,
                differentiate: bool, pool: Pool | None, sums: Sums | None) -> Tensor:  # fmt: skip
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach()
        grads: tuple[Tensor, ...] = ()
        if differentiate:
            sums = Sums() if sums is None else sums
            ctx.own = not sums.grads
            sums.grads = sums.grads or (torch.zeros_like(weight), torch.zeros_like(bias))
            ctx.sums, ctx.grad = sums, torch.empty_like(hidden)
            grads = (ctx.grad, *sums.grads)
        total = hidden.new_zeros(())
        for begin in range(0, len(hidden), ROWS):
            part = slice(begin, begin + ROWS)
            own = (grads[0][part], *grads[1:]) if grads else ()
            total += _block(hidden[part], weight, bias, targets[part], scale, own, pool)
        return total.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grads = [ctx.grad]
        if ctx.own:
            grads += ctx.sums.grads
            ctx.sums.grads = ()  # what nobody else holds is taken as it is, not copied
        if float(outer[0]) != 1.0:
            grads = [grad * outer[0] for grad in grads]
        return (*grads, *[None] * (8 - len(grads)))


class Sums:
    """The gradients of a decoder's weight and bias, summed over micro-batches."""

    def __init__(self) -> None:
        self.grads: tuple[Tensor, ...] = ()


@torch.no_grad()
def _block(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: float, grads: Sequence[Tensor],
           pool: Pool | None) -> Tensor:  # fmt: skip
    """The summed loss of some rows. Sets the first of `grads`, of the rows, and adds to those of weight and bias."""
    slices = [_Slice(hidden, weight, bias, part) for part in _slices(len(weight), pool.threads if pool else 1)]
    run = pool.map if pool else _here
    tops, sums = zip(*run(_Slice.exponentials, slices), strict=True)
    top = torch.stack(tops).amax(0)
    total = sum((one * (own - top).exp() for own, one in zip(tops, sums, strict=True)), torch.zeros_like(top))
    normalizer = top + total.log()
    if grads:
        rows = run(lambda one: one.gradients(normalizer, scale, grads), slices)
        # each target's own share: its probability less one
        torch.sum(torch.stack(rows), 0, out=grads[0]).sub_(weight[targets]).mul_(scale)
        grads[1].index_add_(0, targets, hidden, alpha=-scale)
        grads[2].index_add_(0, targets, torch.ones_like(normalizer), alpha=-scale)
    return (normalizer - (hidden * weight[targets]).sum(1) - bias[targets]).sum()


class _Slice:
    """The logits of some rows over a part of the vocabulary, in blocks that stay in the cache while they are made."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor, part: slice) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        width = COLUMNS if hidden.is_cpu else part.stop - part.start
        self.parts = [slice(begin, min(begin + width, part.stop)) for begin in range(part.start, part.stop, width)]

    def exponentials(self) -> tuple[Tensor, Tensor]:
        """Each row's largest logit here, and its sum of exponentials of the logits less that."""
        self.values, tops, sums = [], [], []
        for part in self.parts:
            logits = torch.addmm(self.bias[part], self.hidden, self.weight[part].t())
            tops.append(logits.amax(1))
            self.values.append(logits.sub_(tops[-1][:, None]).exp_())
            sums.append(logits.sum(1))
        self.tops = torch.stack(tops)
        top = self.tops.amax(0)
        return top, (torch.stack(sums) * (self.tops - top).exp()).sum(0)

    def gradients(self, normalizer: Tensor, scale: float, grads: Sequence[Tensor]) -> Tensor:
        """What this part adds to the rows' gradient; its part of the weight's and the bias's is added to `grads`."""
        rows = torch.zeros_like(self.hidden)
        # values times these are probabilities: the small matrices take them
        for part, values, factor in zip(self.parts, self.values, (self.tops - normalizer).exp(), strict=True):
            grads[1][part].addmm_(values.t(), self.hidden * factor[:, None], alpha=scale)
            grads[2][part].addmv_(values.t(), factor, alpha=scale)
            rows.addcmul_(torch.mm(values, self.weight[part]), factor[:, None])
        return rows


def _slices(tokens: int, parts: int) -> list[slice]:
    size = -(-tokens // parts)
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def _here(function: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    return [function(item) for item in items]


class Pool:
    """Threads that each compute on one core."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def map(self, function: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """`function` of each item, at the same time."""
        return list(self._executor.map(function, items))


class LanguageModel(nn.Module):
    """All of it in one process, with the weights that the split model begins with."""

    def __init__(self, settings: RnnSettings, tokens: int) -> None:
        super().__init__()
        self.embedding, self.lstm, self.decoder = Embedding(settings, tokens), Lstm(settings), Decoder(settings, tokens)

    def loss(self, inputs: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """The summed loss of `targets` and the state after them."""
        hidden, after = self.lstm(self.embedding(inputs), state)
        return self.decoder.loss(hidden, targets), after


def device(wanted: str, variable: str) -> torch.device:
    """The device that `variable` names. Raises UsageError for cuda where there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{variable}=cuda: torch finds no CUDA device here; use auto or cpu")
    return torch.device("cpu" if wanted == "auto" else wanted)


def _seeded(settings: RnnSettings, part: int) -> torch.Generator:
    """A generator for the first weights of a part. Two parts are built at once on the ps, in threads that share torch's
    own generator.
    """
    return torch.Generator().manual_seed(4 * settings.seed + part)
