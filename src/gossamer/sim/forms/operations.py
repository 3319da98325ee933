"""Embeddings, cross-entropy and normalisations of many workers at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.sim.forms.batching import FirstDerivative, stacked

_ATEN: Any = torch.ops.aten
_FEW_WORDS = 512
"""Up to so many rows of an embedding its gradient is a product of matrices."""


class FoldedEmbedding(torch.autograd.Function):
    """Rows of a table of weights. The gradient of all workers is that of one long table."""

    @staticmethod
    def forward(indices: Tensor, weights: Tensor) -> Tensor:
        return weights[indices]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rows = len(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, _EmbeddingGradient.apply(gradients[0], ctx.saved_tensors[0], ctx.rows)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        indices, weights = stacked(info.batch_size, in_dims, *args)
        workers = torch.arange(info.batch_size, device=indices.device)
        return weights[workers.view(-1, *(1 for _ in indices.shape[1:])), indices], 0


class _EmbeddingGradient(FirstDerivative):
    @staticmethod
    def forward(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
        return _gradient_of_rows(gradient[None], indices[None], rows)[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        gradient, indices = stacked(info.batch_size, in_dims[:2], *args[:2])
        return _gradient_of_rows(gradient, indices, args[2]), 0


def _gradient_of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """For every worker and row, the sum of the gradients of its uses, always in the same order."""
    workers = len(indices)
    flat = gradient.flatten(1, -2)
    if rows <= _FEW_WORDS and gradient.is_cuda:
        numbers = torch.arange(rows, device=indices.device).unsqueeze(1)
        used = (indices.flatten(1).unsqueeze(1) == numbers).to(flat.dtype)
        return torch.bmm(used, flat)
    first = rows * torch.arange(workers, device=indices.device).unsqueeze(1)
    places = (indices.flatten(1) + first).flatten()
    found: Tensor = torch.ops.gossamer.sum_of_uses(flat.flatten(0, 1), places, workers * rows)
    return found.unflatten(0, (workers, rows))


@torch.library.custom_op("gossamer::sum_of_uses", mutates_args=())
def _sum_of_uses(gradients: Tensor, places: Tensor, rows: int) -> Tensor:
    """The gradient of an embedding, which sorts its indices. The compiler must not see into it: it
    would add up in an order that changes from call to call."""
    return _ATEN.embedding_dense_backward(gradients, places, rows, -1, False)


@_sum_of_uses.register_fake
def _(gradients: Tensor, places: Tensor, rows: int) -> Tensor:
    return gradients.new_empty(rows, gradients.shape[1])


class FusedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of [samples, classes]. It keeps the scores as they came and one number
    for each sample, where torch keeps the logarithms of all probabilities in 32 bits beside them.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
        sums = scores.float().logsumexp(-1)
        counted = targets != ignored
        picked = scores.gather(-1, (targets * counted).unsqueeze(-1)).squeeze(-1).float()
        share = counted / counted.sum().float()
        return ((sums - picked) * share).sum(), sums, share

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], inputs[1], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scores, targets, sums, share = ctx.saved_tensors
        classes = torch.arange(scores.shape[-1], device=scores.device)
        likely = (scores.float() - sums.unsqueeze(-1)).exp()
        off = likely - (classes == targets.unsqueeze(-1)).float()
        return (off * (gradients[0] * share).unsqueeze(-1)).to(scores.dtype), None, None


class PlainBatchNorm(torch.autograd.Function):
    """BatchNorm in training, of [samples, channels, ...], in 32 bits and in any layout."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inputs: Tensor, weights: Tensor, biases: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(inputs.float(), _but_channels(inputs), correction=0)
        scale = (variance + epsilon).rsqrt()
        centred = inputs.float() - _as(mean, inputs)
        made = centred * _as(scale * weights, inputs) + _as(biases, inputs)
        return made.to(inputs.dtype), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:2], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.epsilon = inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs, weights, mean, variance = ctx.saved_tensors
        gradient = gradients[0].float()
        scale = (variance + ctx.epsilon).rsqrt()
        unit = (inputs.float() - _as(mean, inputs)) * _as(scale, inputs)
        others = _but_channels(inputs)
        to_weights, to_biases = (gradient * unit).sum(others), gradient.sum(others)
        count = inputs.numel() // inputs.shape[1]
        kept = gradient - unit * _as(to_weights / count, inputs) - _as(to_biases / count, inputs)
        to_inputs = kept * _as(scale * weights, inputs)
        return to_inputs.to(inputs.dtype), to_weights, to_biases, None


def _but_channels(inputs: Tensor) -> tuple[int, ...]:
    return (0, *range(2, inputs.dim()))


def _as(channels: Tensor, inputs: Tensor) -> Tensor:
    return channels.view(-1, *(1 for _ in range(inputs.dim() - 2)))


def plain_rms_norm(
    inputs: Tensor, dimensions: int, weights: Tensor | None, epsilon: float | None
) -> Tensor:
    """Root mean square normalisation in 32 bits, of operations that `vmap` has rules for."""
    over = tuple(range(-dimensions, 0))
    smallest = torch.finfo(inputs.dtype).eps if epsilon is None else epsilon
    exact = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
    made = exact * (exact.square().mean(over, keepdim=True) + smallest).rsqrt()
    return (made if weights is None else made * weights).to(inputs.dtype)
