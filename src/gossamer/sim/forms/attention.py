"""Scaled dot-product attention of many workers, by the kernels that torch has for one.

These kernels know samples and heads, and the workers are folded into the samples. `vmap` by itself
has no rule for their backward passes and computes one worker after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.sim.forms.batching import FirstDerivative, apart, folded, stacked

_ATEN: Any = torch.ops.aten
torch_attention = functional.scaled_dot_product_attention
"""Torch's own; the name in `functional` may stand for a form while a model is evaluated."""
_MOST_FLASH = 256
"""The largest size of a head that the flash kernel takes."""


class FoldedAttention(torch.autograd.Function):
    """Attention without mask and dropout, of [samples, heads, length, size].

    Besides the result it returns what its backward pass needs.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
    ) -> tuple[Tensor, ...]:
        return _forward(query, key, value, is_causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.is_causal, ctx.scale = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found = _Backward.apply(gradients[0], *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        return (*found, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        query, key, value = (folded(one) for one in stacked(info.batch_size, in_dims, *args[:3]))
        output, sums, *kept = _forward(query, key, value, args[3], args[4])
        size = info.batch_size
        return (apart(output, size), apart(sums, size), *kept), (0, 0, *(None for _ in kept))


class _Backward(FirstDerivative):
    """The gradients with respect to query, key and value."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _backward(*arguments)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        rows: list[Any] = [folded(one) for one in stacked(size, in_dims[:6], *args[:6])]
        found = _backward(*rows, *args[6:])
        return tuple(apart(one, size) for one in found), (0, 0, 0)


def can_fold(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether the kernels take attention of these shapes."""
    size = query.shape[-1]
    is_plain = (
        query.dim() == 4
        and key.shape == value.shape
        and query.shape[:2] == key.shape[:2]
        and size == key.shape[-1]
        and (query.shape[-2] == key.shape[-2] or not is_causal)
    )
    if not query.is_cuda:
        return is_plain and query.dtype in (torch.float32, torch.bfloat16)
    return is_plain and size % 8 == 0 and (size <= _MOST_FLASH or query.dtype == torch.float32)


def _is_flash(query: Tensor) -> bool:
    return query.dtype in (torch.bfloat16, torch.float16)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """The result, the logarithms of the sums of the softmax, and two numbers of dropout's
    generator, which nothing draws from."""
    if not query.is_cuda:
        output, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return output, sums, sums.new_empty(0), sums.new_empty(0)
    if _is_flash(query):
        found = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1], found[6], found[7]
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, is_causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not query.is_cuda:
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, sums, 0.0, is_causal, scale=scale
        )
    return _backward_in_order(
        gradient, query, key, value, output, sums, seed, offset, is_causal, scale
    )


def _backward_on_gpu(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, is_causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (gradient, query, key, value)
    if _is_flash(query):
        return _ATEN._scaled_dot_product_flash_attention_backward(
            *given, output, sums, None, None, query.shape[-2], key.shape[-2], 0.0, is_causal,
            seed, offset, scale=scale,
        )  # fmt: skip
    return _ATEN._scaled_dot_product_efficient_attention_backward(
        *given, None, output, sums, seed, offset, 0.0, (True, True, True, False), is_causal,
        scale=scale,
    )[:3]  # fmt: skip


@torch.library.custom_op("gossamer::attention_gradient", mutates_args=())
def _backward_in_order(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The kernels add up in an order that changes from call to call unless torch is told not to."""
    was, was_warning = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        to_query, to_key, to_value = _backward_on_gpu(
            gradient, query, key, value, output, sums, seed, offset, is_causal, scale
        )
        return to_query, to_key, to_value
    finally:
        torch.use_deterministic_algorithms(was, warn_only=was_warning)
        memory.fill_uninitialized_memory = fills


@_backward_in_order.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    to_query, to_key, to_value = _backward_on_gpu(
        gradient, query, key, value, output, sums, seed, offset, is_causal, scale
    )
    return to_query, to_key, to_value


class RepeatedAttention(torch.autograd.Function):
    """Attention with a mask or grouped heads. Its backward pass computes the forward pass again,
    so that torch may choose the kernel for both."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        return torch_attention(query, key, value, mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found = _RepeatedBackward.apply(gradients[0], *ctx.saved_tensors, ctx.options)
        return (*found, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        rows, mask = _folded_with_mask(info.batch_size, in_dims[:4], args[:4])
        output = _attention(rows, mask, args[4])
        return apart(output, info.batch_size), 0


class _RepeatedBackward(FirstDerivative):
    @staticmethod
    def forward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return _repeated(gradient, (query, key, value), mask, options)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        rows, mask = _folded_with_mask(size, in_dims[1:5], args[1:5])
        own = folded(stacked(size, in_dims[:1], args[0])[0])
        found = _repeated(own, rows, mask, args[5])
        return tuple(apart(one, size) for one in found), (0, 0, 0)


def _attention(rows: Sequence[Tensor], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    query, key, value = rows
    return torch_attention(query, key, value, mask, **options)


def _repeated(
    gradient: Tensor, rows: tuple[Tensor, ...], mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [row.detach().requires_grad_() for row in rows]
        output = _attention(leaves, mask, options)
        return torch.autograd.grad(output, leaves, gradient)


def _folded_with_mask(
    workers: int, in_dims: Any, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    rows = stacked(workers, in_dims[:3], *arguments[:3])
    mask: Tensor | None = arguments[3]
    if mask is not None and (in_dims[3] is not None or _varies(mask, rows[0])):
        (mask,) = stacked(workers, in_dims[3:], mask)
        missing = rows[0].dim() - mask.dim()
        mask = mask[(slice(None), *(None for _ in range(missing)))]
        mask = folded(mask.expand(workers, rows[0].shape[1], *mask.shape[2:]))
    return tuple(folded(row) for row in rows), mask


def _varies(mask: Tensor, row: Tensor) -> bool:
    """Whether a mask that the workers share is not the same for all samples."""
    return mask.dim() == row.dim() - 1 and mask.shape[0] > 1
