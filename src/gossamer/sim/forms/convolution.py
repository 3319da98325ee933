"""Convolutions of many workers, each with weights of its own, in several forms.

A form computes all workers at once from stacked tensors: inputs [workers, samples, channels,
height, width], weights [workers, outputs, channels, kernel height, kernel width]. Which one is used
follows from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.sim.forms.batching import FirstDerivative, stacked

Pair = tuple[int, int]
_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """What a two-dimensional convolution is given besides tensors."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def numbers(self) -> list[int]:
        """For torch's operators, which take numbers only."""
        return [*self.stride, *self.padding, *self.dilation, self.groups]

    @staticmethod
    def of(numbers: Sequence[int]) -> Geometry:
        first, second, third, fourth, fifth, sixth, groups = numbers
        return Geometry((first, second), (third, fourth), (fifth, sixth), groups)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Height and width of what it makes of images of this size."""
        high, wide = (
            (length + 2 * pad - spread * (taps - 1) - 1) // step + 1
            for length, pad, spread, taps, step in zip(
                size, self.padding, self.dilation, kernel, self.stride, strict=True
            )
        )
        return high, wide


@dataclass(frozen=True)
class ConvolutionForm:
    """One way to compute the convolutions of all workers, and their gradients."""

    forward: Callable[[Tensor, Tensor, Geometry], Tensor]
    """(inputs, weights, geometry) to outputs."""
    input_gradient: Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]
    """(gradient of the outputs, inputs, weights, geometry)"""
    weight_gradient: Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]
    """The same arguments; inputs and weights also tell the shapes."""
    takes: Callable[[Geometry], bool] = lambda geometry: True
    """Whether it can compute such a convolution."""


# The forms are operators of their own, so that a compiler does not look into them: it would take
# minutes to understand how pixels become rows.


def _forward(inputs: Tensor, weights: Tensor, form: str, geometry: Sequence[int]) -> Tensor:
    return FORMS[form].forward(inputs, weights, Geometry.of(geometry))


def _gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, form: str, geometry: Sequence[int],
    of_inputs: bool,
) -> Tensor:  # fmt: skip
    chosen = FORMS[form]
    function = chosen.input_gradient if of_inputs else chosen.weight_gradient
    return function(gradient, inputs, weights, Geometry.of(geometry))


_convolution = torch.library.custom_op("gossamer::convolution", _forward, mutates_args=())
_convolution_gradient = torch.library.custom_op(
    "gossamer::convolution_gradient", _gradient, mutates_args=()
)
# Without values they compute shapes and strides.
torch.library.register_fake("gossamer::convolution", _forward)
torch.library.register_fake("gossamer::convolution_gradient", _gradient)


class StackedConvolution(torch.autograd.Function):
    """A convolution without bias whose evaluation for many workers is the form's."""

    @staticmethod
    def forward(inputs: Tensor, weights: Tensor, form: str, geometry: list[int]) -> Tensor:
        return _convolution(inputs[None], weights[None], form, geometry)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.form, ctx.geometry = inputs[2], inputs[3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weights = ctx.saved_tensors
        # Under autocast a gradient may come in the 32 bits of whatever used the output.
        given = (gradients[0].to(inputs.dtype), inputs, weights, ctx.form, ctx.geometry)
        to_inputs = _Gradient.apply(*given, True) if ctx.needs_input_grad[0] else None
        to_weights = _Gradient.apply(*given, False) if ctx.needs_input_grad[1] else None
        return to_inputs, to_weights, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        return _convolution(*stacked(info.batch_size, in_dims[:2], *args[:2]), *args[2:]), 0


class _Gradient(FirstDerivative):
    """The gradient with respect to the inputs or to the weights."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _convolution_gradient(*(one[None] for one in args[:3]), *args[3:])[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        tensors = stacked(info.batch_size, in_dims[:3], *args[:3])
        return _convolution_gradient(*tensors, *args[3:]), 0


# Each worker by itself. -------------------------------------------------------------------------


def _each_forward(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    return torch.stack([
        functional.conv2d(
            one, weight, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
        )
        for one, weight in zip(inputs.unbind(), weights.unbind(), strict=True)
    ])  # fmt: skip


def _each_gradient(of_inputs: bool) -> Callable[[Tensor, Tensor, Tensor, Geometry], Tensor]:
    def gradient_of(
        gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
    ) -> Tensor:
        parts = zip(gradient.unbind(), inputs.unbind(), weights.unbind(), strict=True)
        return torch.stack([_both(*part, geometry, of_inputs) for part in parts])

    return gradient_of


def _both(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry, of_inputs: bool
) -> Tensor:
    found = _ATEN.convolution_backward(
        gradient, inputs, weights, None, geometry.stride, geometry.padding, geometry.dilation,
        False, (0, 0), geometry.groups, (of_inputs, not of_inputs, False),
    )  # fmt: skip
    return found[0] if of_inputs else found[1]


# One convolution with a group for each worker, as `vmap` itself does it. -------------------------


def _merged(stack: Tensor, order: torch.memory_format) -> Tensor:
    """[workers, samples, channels, ...] to [samples, workers x channels, ...]."""
    return stack.transpose(0, 1).flatten(1, 2).contiguous(memory_format=order)


def _apart(merged: Tensor, workers: int) -> Tensor:
    return merged.unflatten(1, (workers, -1)).transpose(0, 1)


def _grouped(channels_last: bool) -> ConvolutionForm:
    order = torch.channels_last if channels_last else torch.contiguous_format

    def wide(geometry: Geometry, workers: int) -> Geometry:
        return Geometry(
            geometry.stride, geometry.padding, geometry.dilation, workers * geometry.groups
        )

    def forward(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        made = wide(geometry, len(inputs))
        output = functional.conv2d(
            _merged(inputs, order), weights.flatten(0, 1).contiguous(memory_format=order), None,
            made.stride, made.padding, made.dilation, made.groups,
        )  # fmt: skip
        return _apart(output.contiguous(memory_format=order), len(inputs))

    def gradient_of(
        gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry, of_inputs: bool
    ) -> Tensor:
        found = _both(
            _merged(gradient, order), _merged(inputs, order),
            weights.flatten(0, 1).contiguous(memory_format=order), wide(geometry, len(inputs)),
            of_inputs,
        ).contiguous(memory_format=order)  # fmt: skip
        return _apart(found, len(inputs)) if of_inputs else found.unflatten(0, (len(inputs), -1))

    def input_gradient(
        gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
    ) -> Tensor:
        return gradient_of(gradient, inputs, weights, geometry, True)

    def weight_gradient(
        gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
    ) -> Tensor:
        return gradient_of(gradient, inputs, weights, geometry, False)

    return ConvolutionForm(forward, input_gradient, weight_gradient)


# Pixels as rows, so that every worker's convolution is one product of matrices. ------------------


def _rows(inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """What each output pixel sees: [workers, pixels, kernel x channels]."""
    last = inputs.permute(0, 1, 3, 4, 2)
    (down, right), (above, left) = geometry.stride, geometry.padding
    if kernel == (1, 1) and (above, left) == (0, 0):
        return last[:, :, ::down, ::right].flatten(1, 3).contiguous()
    workers, samples = inputs.shape[:2]
    high, wide = geometry.output_size(inputs.shape[-2:], kernel)
    padded = functional.pad(last, (0, 0, left, left, above, above)).contiguous()
    dtype, words = padded.dtype, padded
    if padded.shape[4] * padded.element_size() % 8 == 0:
        words = padded.view(torch.int64)  # copied in fewer and larger pieces
    channels = words.shape[4]
    line = channels * words.shape[3]
    # A view that overlaps itself, and one copy of it.
    seen = words.as_strided(
        (workers * samples, high, wide, *kernel, channels),
        (line * words.shape[2], line * down, channels * right, line * geometry.dilation[0],
         channels * geometry.dilation[1], 1),
    )  # fmt: skip
    return seen.contiguous().view(dtype).view(workers, samples * high * wide, -1)


def _pixels(outputs: Tensor) -> Tensor:
    return outputs.permute(0, 1, 3, 4, 2).flatten(1, 3).contiguous()


def _matrix(weights: Tensor) -> Tensor:
    """[workers, outputs, kernel x channels], in the order of `_rows`; the form is given weights
    whose channels are last, so this copies nothing."""
    return weights.permute(0, 1, 3, 4, 2).flatten(2)


def _kernel(weights: Tensor) -> Pair:
    return weights.shape[-2], weights.shape[-1]


def _unfolded_forward(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    kernel = _kernel(weights)
    found = torch.bmm(_rows(inputs, kernel, geometry), _matrix(weights).transpose(1, 2))
    sizes = (inputs.shape[1], *geometry.output_size(inputs.shape[-2:], kernel))
    return found.unflatten(1, sizes).permute(0, 1, 4, 2, 3)


def _unfolded_weight_gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    rows = _rows(inputs, _kernel(weights), geometry)
    found = torch.bmm(_pixels(gradient).transpose(1, 2), rows)
    return found.unflatten(2, (*_kernel(weights), -1)).permute(0, 1, 4, 2, 3)


def _unfolded_input_gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    """Each input pixel's sum over the output pixels that see it: `_rows` backwards."""
    kernel = _kernel(weights)
    seen = torch.bmm(_pixels(gradient), _matrix(weights))
    seen = seen.unflatten(1, (inputs.shape[1], *gradient.shape[3:]))
    workers, samples, channels, height, width = inputs.shape
    (down, right), (lower, further) = geometry.stride, geometry.dilation
    (above, left), (high, wide) = geometry.padding, seen.shape[2:4]
    exact = torch.promote_types(seen.dtype, torch.float32)
    total = torch.zeros(
        (workers, samples, height + 2 * above, width + 2 * left, channels), dtype=exact,
        device=seen.device,
    )  # fmt: skip
    for number, part in enumerate(seen.split(channels, dim=-1)):
        y, x = divmod(number, kernel[1])
        total[
            :, :, y * lower : y * lower + down * (high - 1) + 1 : down,
            x * further : x * further + right * (wide - 1) + 1 : right,
        ] += part  # fmt: skip
    inner = total[:, :, above : above + height, left : left + width]
    return inner.to(seen.dtype).contiguous().permute(0, 1, 4, 2, 3)


FORMS = {
    "grouped": _grouped(channels_last=False),
    "grouped, channels last": _grouped(channels_last=True),
    "unfolded": ConvolutionForm(
        _unfolded_forward,
        _unfolded_input_gradient,
        _unfolded_weight_gradient,
        takes=lambda geometry: geometry.groups == 1,
    ),
    "each": ConvolutionForm(_each_forward, _each_gradient(True), _each_gradient(False)),
}
"""The forms by the names that the table uses."""


def shape_of(inputs: Tensor, weights: Tensor, output_pixels: int, workers: int) -> dict[str, float]:
    """What a row of the table is keyed by, for one worker's tensors."""
    return {
        "workers": workers,
        "samples": inputs.shape[0],
        "inputs": weights.shape[1],
        "outputs": weights.shape[0],
        "pixels": output_pixels,
        "taps": weights.shape[2] * weights.shape[3],
    }
