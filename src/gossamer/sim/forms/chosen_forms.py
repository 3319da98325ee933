"""Replaces operations of a model by faster forms of them while many workers are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import EllipsisType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gossamer.sim.forms.attention import (
    FoldedAttention,
    RepeatedAttention,
    can_fold,
    torch_attention,
)
from gossamer.sim.forms.batching import autocast
from gossamer.sim.forms.convolution import (
    FORMS,
    Geometry,
    StackedConvolution,
    shape_of,
)  # fmt: skip
from gossamer.sim.forms.operations import (
    FoldedEmbedding,
    FusedCrossEntropy,
    PlainBatchNorm,
    plain_rms_norm,
)  # fmt: skip
from gossamer.sim.forms.table import FormTable, shipped_table

_MANY_SCORES = 1 << 20
"""The form of cross-entropy saves memory that matters where all workers together have so many
scores."""

_ALIGNED = 8
_MANY_OUTPUTS = 512

Answer = Tensor | EllipsisType
"""`...` where a form does not apply."""


class ChosenForms(TorchFunctionMode):
    """While it is active, a model's calls of torch's functions use the forms of the table.

    It stands above `vmap` and `grad`, so it sees the tensors of one worker.
    """

    def __init__(
        self, workers: int, precision: str, *, table: FormTable | None = None,
        only: Collection[str] | None = None, is_compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._workers = workers
        self._precision = precision
        self._table = shipped_table() if table is None else table
        self._is_compiled = is_compiled
        self._is_laid_out = False
        """Whether a convolution has left its channels last."""
        own: dict[str, tuple[Any, Callable[..., Answer]]] = {
            "attention": (torch_attention, self._attention),
            "convolution": (functional.conv2d, self._convolution),
            "embedding": (functional.embedding, self._embedding),
            "cross_entropy": (functional.cross_entropy, self._cross_entropy),
            "batch_norm": (functional.batch_norm, self._batch_norm),
            "rms_norm": (functional.rms_norm, self._rms_norm),
            "linear": (functional.linear, self._linear),
        }
        self._forms = {
            function: form for name, (function, form) in own.items() if only is None or name in only
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this instead of each of its functions."""
        kwargs = kwargs or {}
        form = self._forms.get(func)
        if form is not None:
            answer = form(*args, **kwargs)
            if answer is not ...:
                return answer
        elif func is functional.multi_head_attention_forward:
            # It calls attention by name, and no mode is active inside of a call.
            other = functional.scaled_dot_product_attention

            def attention(*args: Any, **kwargs: Any) -> Any:
                answer = self._attention(*args, **kwargs)
                return other(*args, **kwargs) if answer is ... else answer

            with patch.object(functional, "scaled_dot_product_attention", attention):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Answer:  # fmt: skip
        if dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad):
            return ...
        query, key, value = autocast(query, key, value)
        if attn_mask is None and can_fold(query, key, value, is_causal):
            found: Any = FoldedAttention.apply(query, key, value, is_causal, scale)
            return found[0]
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        made: Any = RepeatedAttention.apply(query, key, value, attn_mask, options)
        return made

    def _convolution(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Answer:  # fmt: skip
        if input.dim() != 4 or isinstance(padding, str):
            return ...
        geometry = Geometry(_pair(stride), _pair(padding), _pair(dilation), groups)
        high, wide = geometry.output_size(input.shape[-2:], weight.shape[-2:])
        shape = shape_of(input, weight, high * wide, self._workers)
        form = self._table.form("convolution", input.device, self._precision, shape)
        if form is None or form == "grouped" or not FORMS[form].takes(geometry):
            return ...
        input, weight = autocast(input, weight)
        self._is_laid_out = True
        if form != "each":
            # Together with the change of type this is one pass over the weights.
            weight = weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        made: Any = StackedConvolution.apply(input, weight, form, geometry.numbers)
        return made if bias is None else made + bias.to(made.dtype).view(-1, 1, 1)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Answer:
        """Many outputs of an odd number, such as words: the kernels for tensor cores want them to
        be a multiple of 8."""
        missing = -len(weight) % _ALIGNED
        if not missing or len(weight) < _MANY_OUTPUTS or not input.is_cuda:
            return ...
        wider = functional.pad(weight, (0, 0, 0, missing))
        longer = None if bias is None else functional.pad(bias, (0, missing))
        return functional.linear(input, wider, longer)[..., : len(weight)]

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Answer:  # fmt: skip
        is_plain = max_norm is None and padding_idx is None and not (scale_grad_by_freq or sparse)
        if not (is_plain and weight.is_cuda):
            return ...
        made: Any = FoldedEmbedding.apply(input, weight)
        return made

    def _cross_entropy(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None,
        size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None,
        reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Answer:  # fmt: skip
        is_plain = (
            input.dim() == 2 and target.dim() == 1 and weight is None and size_average is None
            and reduce is None and reduction == "mean" and label_smoothing == 0.0
        )  # fmt: skip
        if not is_plain or self._workers * input.numel() < _MANY_SCORES:
            return ...
        found: Any = FusedCrossEntropy.apply(input, target, ignore_index)
        return found[0]

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Answer:  # fmt: skip
        # Torch's own knows neither channels last nor two types of numbers under `vmap`.
        is_needed = self._is_compiled or self._is_laid_out or input.dtype != torch.float32
        if not (training and is_needed):
            return ...
        ones, zeros = input.new_ones(input.shape[1]), input.new_zeros(input.shape[1])
        scale, shift = ones if weight is None else weight, zeros if bias is None else bias
        found: Any = PlainBatchNorm.apply(input, scale.float(), shift.float(), eps)
        made, mean, variance = found
        if running_mean is not None and running_var is not None:
            count = input.numel() // input.shape[1]
            # Not `lerp_`, which `vmap` would do one worker after the other.
            unbiased = variance.detach() * (count / max(1, count - 1))
            running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
            running_var.mul_(1 - momentum).add_(unbiased * momentum)
        return made

    def _rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Answer:  # fmt: skip
        if not input.is_cuda:
            return ...
        return plain_rms_norm(input, len(normalized_shape), weight, eps)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
