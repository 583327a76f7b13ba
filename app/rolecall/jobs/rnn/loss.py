"""Cross-entropy of a linear layer's output, computed in blocks, so that all logits are never held at once.

Fused linear cross-entropy (Hsu et al. 2024, Liger kernel), split over the vocabulary (Shoeybi et al. 2019,
Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch 2.13's linear_cross_entropy at its best chunk takes 1.06 (8,192 words) and 1.30 (33,278 words) times the CPU
# time of a step, and 2.4 and 1.9 times the memory
CHUNK_TOKENS = 350  # tokens whose logits are held at once
CHUNK_COLUMNS = 512  # columns of one multiplication: larger results do not fit the cache, and take 1.5 times as long


class LossThreads(ThreadPoolExecutor):
    """Threads that each use one core."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.threads = threads


class GradientSums:
    """The gradients of a linear layer's weight [classes, width] and bias [classes], summed over micro-batches."""

    def __init__(self) -> None:
        self.grads: tuple[Tensor, ...] = ()


class LossOptions(NamedTuple):
    """`pool`, or else the caller's thread, computes the loss times `scale`, and its gradients if it is to
    `differentiate`.

    Losses with the same `sums` must go through one backward pass, as a plain sum: the first of them returns the
    gradients of weight and bias of all.
    """

    scale: float
    differentiate: bool
    pool: LossThreads | None
    sums: GradientSums


class LinearCrossEntropy(torch.autograd.Function):
    """The negative log-likelihood of `targets` [rows] after `hidden` [rows, width], summed and times a scale. The
    forward pass computes the gradients too; the backward pass only returns them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, options: LossOptions
    ) -> Tensor:
        """The loss []."""
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach()
        scale, differentiate, pool, sums = options
        if differentiate:
            ctx.first = not sums.grads
            sums.grads = sums.grads or (torch.zeros_like(weight), torch.zeros_like(bias))
            ctx.sums, ctx.grad = sums, torch.empty_like(hidden)
        total = hidden.new_zeros(())
        for begin in range(0, len(hidden), CHUNK_TOKENS):
            part = slice(begin, begin + CHUNK_TOKENS)
            grads = (ctx.grad[part], *ctx.sums.grads) if differentiate else ()
            total += _block(hidden[part], weight, bias, targets[part], scale, grads=grads, pool=pool)
        return total.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `hidden`, and of the first loss of its sums those of `weight` and `bias`."""
        grads = [ctx.grad]
        if ctx.first:
            grads += ctx.sums.grads
            ctx.sums.grads = ()  # autograd does not copy a tensor that has no other reference
        if float(outer[0]) != 1.0:
            grads = [grad * outer[0] for grad in grads]
        return (*grads, *[None] * (5 - len(grads)))


@torch.no_grad()
def _block(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    scale: float,
    grads: Sequence[Tensor],
    pool: LossThreads | None,
) -> Tensor:
    """The summed loss of some rows. Sets the first of `grads`, of the rows, and adds to those of weight and bias."""
    run, size = (pool.map, -(-len(weight) // pool.threads)) if pool else (map, len(weight))
    parts = [slice(begin, min(begin + size, len(weight))) for begin in range(0, len(weight), size)]
    slices = [_VocabularySlice(hidden, weight, bias, part) for part in parts]
    tops, sums = zip(*run(_VocabularySlice.exponentials, slices), strict=True)
    top = torch.stack(tops).amax(0)
    total = torch.stack([part * (highest - top).exp() for highest, part in zip(tops, sums, strict=True)]).sum(0)
    normalizer = top + total.log()
    if grads:
        rows = list(run(lambda part: part.gradients(normalizer, scale, grads), slices))
        # the target's own part: its probability less one
        torch.sum(torch.stack(rows), 0, out=grads[0]).sub_(weight[targets]).mul_(scale)
        grads[1].index_add_(0, targets, hidden, alpha=-scale)
        grads[2].index_add_(0, targets, torch.ones_like(normalizer), alpha=-scale)
    return (normalizer - (hidden * weight[targets]).sum(1) - bias[targets]).sum()


class _VocabularySlice:
    """The logits of some rows over a part of the vocabulary, in blocks that fit the cache."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor, part: slice) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        width = CHUNK_COLUMNS if hidden.is_cpu else part.stop - part.start
        self.parts = [slice(begin, min(begin + width, part.stop)) for begin in range(part.start, part.stop, width)]

    def exponentials(self) -> tuple[Tensor, Tensor]:
        """The largest logit [rows], and the sum [rows] of the exponentials of the logits less the largest."""
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
        """This slice's part of the rows' gradient [rows, width]. Adds to those of weight and bias in `grads`."""
        rows = torch.zeros_like(self.hidden)
        # the factors make values probabilities; they are applied to the smaller matrices
        for part, values, factor in zip(self.parts, self.values, (self.tops - normalizer).exp(), strict=True):
            grads[1][part].addmm_(values.t(), self.hidden * factor[:, None], alpha=scale)
            grads[2][part].addmv_(values.t(), factor, alpha=scale)
            rows.addcmul_(torch.mm(values, self.weight[part]), factor[:, None])
        return rows
