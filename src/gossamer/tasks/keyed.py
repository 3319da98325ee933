"""Randomness that depends on a key, not on who computes it or beside whom.

Dropout and augmentation draw from a key made of (seed, worker, step, layer). A worker therefore
sees the same draws whether its gradient is evaluated alone, in a batch with 127 others, compiled or
on another device. There is no state: the i-th draw is a hash of (key, i), by the finaliser of
SplitMix64 (Steele, Lea and Flood 2014). Everything is wrap-around int64 arithmetic, which `vmap`,
tracing and compilation understand, whereas they refuse or reorder the draws of torch's generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gossamer.errors import ConfigurationError

_ONES: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
# float32 holds 24 bits exactly, so 24-bit draws are equally spaced and never round up to 1.
_DRAW_BITS: Final = 24
_FIRST_CALL: Final = 1 << 20
"""Draws of functions are numbered from here on, beyond those of all layers."""


def _signed(number: int) -> int:
    """The int64 with the same 64 bits: torch has no full support for unsigned integers."""
    number &= _ONES
    return number - (1 << 64) if number >> 63 else number


def _mix_number(number: int) -> int:
    """SplitMix64's finaliser on a Python integer, as an unsigned 64-bit value."""
    number &= _ONES
    number = (number ^ (number >> 30)) * _FIRST & _ONES
    number = (number ^ (number >> 27)) * _SECOND & _ONES
    return number ^ (number >> 31)


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's `>>` copies the sign bit of an int64, the mask removes it."""
    return (number >> bits) & (_ONES >> bits)


def _mix(number: Tensor) -> Tensor:
    """SplitMix64's finaliser on an int64 tensor, bit for bit what `_mix_number` gives."""
    number = (number ^ _shifted(number, 30)) * _signed(_FIRST)
    number = (number ^ _shifted(number, 27)) * _signed(_SECOND)
    return number ^ _shifted(number, 31)


def _fold_number(key: int, number: int) -> int:
    return _mix_number(key ^ _mix_number(number + _GOLDEN))


def fold(key: Tensor, number: int) -> Tensor:
    """A new key from a key and a number; different numbers always give different keys."""
    return _mix(key ^ _signed(_mix_number(number + _GOLDEN)))


def key_of(seed: int, worker: int, step: int) -> int:
    """The key of one worker's one step, as an int64 value for `torch.tensor`."""
    return _signed(_fold_number(_key_of_worker(seed, worker), step))


@lru_cache(maxsize=1 << 14)
def _key_of_worker(seed: int, worker: int) -> int:
    return _fold_number(_fold_number(0, seed), worker)


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Independent draws from [0, 1), float32, on the key's device."""
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device)
    # Not SplitMix64's `counter * golden`: the compiler reads a scaled arange as an index expression
    # of unbounded integers and overflows. An exclusive or is opaque to it.
    bits = _shifted(_mix(counter ^ _mix(key + _signed(_GOLDEN))), 64 - _DRAW_BITS)
    return (bits.to(torch.float32) * 2.0**-_DRAW_BITS).reshape(tuple(shape))


def dropped(inputs: Tensor, p: float, key: Tensor, shared_dimensions: int = 0) -> Tensor:
    """Inputs of which a fraction `p` is zero and the rest scaled by 1 / (1 - p)."""
    if p == 1.0:
        return inputs * 0.0
    own = inputs.dim() - shared_dimensions
    shape = (*inputs.shape[:own], *(1 for _ in range(shared_dimensions)))
    kept = uniform(key, shape) >= p
    return inputs * (kept.to(inputs.dtype) * (1.0 / (1.0 - p)))


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of (`key`, `layer`, shape) alone.

    The buffer `key` is replaced before each step; called again with the same key and shape, the
    module draws the same mask, so a model should own one instance for each place of use.
    """

    key: Tensor

    def __init__(self, p: float = 0.5, layer: int = 0, shared_dimensions: int = 0) -> None:
        """So many trailing dimensions share a draw: with 2, whole channels of images drop out."""
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigurationError(
                f"KeyedDropout: p must lie between 0 and 1, got {p}; give the fraction to drop"
            )
        self.p = p
        self.layer = layer
        self.shared_dimensions = shared_dimensions
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero a fraction `p` and scale the rest by 1 / (1 - p); nothing in evaluation mode."""
        if not self.training or self.p == 0.0:
            return inputs
        return dropped(inputs, self.p, fold(self.key, self.layer), self.shared_dimensions)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"p={self.p}, layer={self.layer}, shared_dimensions={self.shared_dimensions}"


_Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


def _shared_dimensions(module: _Dropout) -> int:
    match module:
        case nn.Dropout():
            return 0
        case nn.Dropout1d():
            return 1
        case nn.Dropout2d():
            return 2
        case nn.Dropout3d():
            return 3


def _named_modules(model: nn.Module, remove_duplicate: bool) -> list[tuple[str, nn.Module]]:
    return list(
        cast(
            Iterator[tuple[str, nn.Module]], model.named_modules(remove_duplicate=remove_duplicate)
        )
    )


def with_keyed_dropout(model: nn.Module) -> list[str]:
    """Replace the dropout modules inside a model in place; return the names of their key buffers.

    All of them may be given the same key: each has a layer number of its own.
    """
    modules = _named_modules(model, remove_duplicate=False)
    layer = sum(isinstance(module, KeyedDropout) for _, module in modules)
    for name, module in modules:
        if isinstance(module, _Dropout):
            keyed = KeyedDropout(module.p, layer, _shared_dimensions(module))
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, keyed.train(module.training))
            layer += 1
    modules = _named_modules(model, remove_duplicate=True)
    return [f"{name}.key" for name, module in modules if isinstance(module, KeyedDropout)]


class KeyedFunctions(TorchFunctionMode):
    """While it is active, dropout that a model asks of a function, in attention too, draws from a
    key and the number of the call, as the layers of `with_keyed_dropout` do."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key = key
        self.calls = 0
        """How often a function was asked for dropout."""
        self._own: dict[object, Callable[..., Tensor]] = {
            functional.dropout: self._dropout,
            functional.scaled_dot_product_attention: self._attention,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch calls this instead of each of its functions."""
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            # It calls the functions by name, and no mode is active inside of a call.
            with (
                patch.object(functional, "dropout", self._dropout),
                patch.object(functional, "scaled_dot_product_attention", self._attention),
            ):
                return func(*args, **kwargs)
        own = self._own.get(func)
        return func(*args, **kwargs) if own is None else own(*args, **kwargs)

    def _next(self) -> Tensor | None:
        """The key of this call; None where torch's own generator must draw."""
        self.calls += 1
        return None if _is_repeated() else fold(self._key, _FIRST_CALL + self.calls)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        own = self._next() if training and 0.0 < p <= 1.0 else None
        if own is None:
            return _torch_dropout(input, p, training, inplace)
        made = dropped(input, p, own)
        return input.copy_(made) if inplace else made

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention with dropout of its weights, which no kernel of torch draws from a key."""
        own = self._next() if dropout_p > 0.0 else None
        if own is None:
            return _torch_attention(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            # Not minus infinity: a row that sees nothing would have a gradient that is no number.
            least = torch.finfo(scores.dtype).min
            if attn_mask.dtype == torch.bool:
                scores = torch.where(attn_mask, scores, least)
            else:
                scores = scores + attn_mask.clamp_min(least)
        weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))
        return dropped(weights.to(value.dtype), dropout_p, own) @ value


_torch_dropout = functional.dropout
_torch_attention = functional.scaled_dot_product_attention


def _is_repeated() -> bool:
    """Whether a part of a model that is computed a second time, in the backward pass, is being
    computed (`torch.utils.checkpoint`): both times draw alike from torch's own generator."""
    autograd: Any = getattr(getattr(torch, "_C"), "_autograd")  # noqa: B009  (no stub)
    return autograd._top_saved_tensors_default_hooks(False) is not None
