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

from gossamer.sim.forms.batching import stacked

Pair = tuple[int, int]
_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """What a two-dimensional convolution is given besides tensors."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

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


class StackedConvolution(torch.autograd.Function):
    """A convolution without bias whose evaluation for many workers is the form's."""

    @staticmethod
    def forward(inputs: Tensor, weights: Tensor, form: str, geometry: Geometry) -> Tensor:
        return _alone(FORMS[form].forward, inputs, weights, geometry=geometry)

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
    def vmap(
        info: Any, in_dims: Any, inputs: Tensor, weights: Tensor, form: str, geometry: Geometry
    ) -> tuple[Tensor, int]:
        inputs, weights = stacked(info.batch_size, in_dims, inputs, weights)
        return FORMS[form].forward(inputs, weights, geometry), 0


class _Gradient(torch.autograd.Function):
    """The gradient with respect to the inputs or to the weights."""

    @staticmethod
    def forward(
        gradient: Tensor, inputs: Tensor, weights: Tensor, form: str, geometry: Geometry,
        of_inputs: bool,
    ) -> Tensor:  # fmt: skip
        chosen = FORMS[form]
        function = chosen.input_gradient if of_inputs else chosen.weight_gradient
        return _alone(function, gradient, inputs, weights, geometry=geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError("second derivatives are not computed")

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, gradient: Tensor, inputs: Tensor, weights: Tensor, form: str,
        geometry: Geometry, of_inputs: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        tensors = stacked(info.batch_size, in_dims, gradient, inputs, weights)
        chosen = FORMS[form]
        function = chosen.input_gradient if of_inputs else chosen.weight_gradient
        return function(*tensors, geometry), 0


def _alone(function: Callable[..., Tensor], *tensors: Tensor, geometry: Geometry) -> Tensor:
    return function(*(tensor.unsqueeze(0) for tensor in tensors), geometry).squeeze(0)


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


def _merged(stack: Tensor, channels_last: bool) -> Tensor:
    """[workers, samples, channels, ...] to [samples, workers x channels, ...]."""
    merged = stack.transpose(0, 1).flatten(1, 2)
    return merged.contiguous(memory_format=torch.channels_last) if channels_last else merged


def _apart(merged: Tensor, workers: int) -> Tensor:
    return merged.unflatten(1, (workers, -1)).transpose(0, 1)


def _grouped(channels_last: bool) -> ConvolutionForm:
    def wide(geometry: Geometry, workers: int) -> Geometry:
        return Geometry(
            geometry.stride, geometry.padding, geometry.dilation, workers * geometry.groups
        )

    def filters(weights: Tensor) -> Tensor:
        flat = weights.flatten(0, 1)
        return flat.contiguous(memory_format=torch.channels_last) if channels_last else flat

    def forward(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
        made = wide(geometry, len(inputs))
        output = functional.conv2d(
            _merged(inputs, channels_last), filters(weights), None, made.stride, made.padding,
            made.dilation, made.groups,
        )  # fmt: skip
        return _apart(output, len(inputs))

    def gradient_of(
        gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry, of_inputs: bool
    ) -> Tensor:
        found = _both(
            _merged(gradient, channels_last), _merged(inputs, channels_last), filters(weights),
            wide(geometry, len(inputs)), of_inputs,
        )  # fmt: skip
        return _apart(found, len(inputs)) if of_inputs else found.unflatten(0, (len(inputs), -1))

    return ConvolutionForm(
        forward,
        lambda *given: gradient_of(*given, True),
        lambda *given: gradient_of(*given, False),
    )


# Pixels as rows, so that every worker's convolution is one product of matrices. ------------------
# The columns are in the order of the weights, so that neither these nor their gradients are moved.


def _rows(inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """What each output pixel sees: [workers, pixels, channels x kernel]."""
    last = inputs.permute(0, 1, 3, 4, 2)
    (down, right), (above, left) = geometry.stride, geometry.padding
    if kernel == (1, 1) and (above, left) == (0, 0):
        return last[:, :, ::down, ::right].flatten(1, 3)
    workers, samples, channels = inputs.shape[:3]
    high, wide = geometry.output_size(inputs.shape[-2:], kernel)
    padded = functional.pad(last, (0, 0, left, left, above, above)).contiguous()
    pixel, line = channels, channels * padded.shape[3]
    # One view that overlaps itself, and one copy of it: a compiler sees two simple operations.
    seen = padded.as_strided(
        (workers * samples, high, wide, channels, *kernel),
        (line * padded.shape[2], line * down, pixel * right, 1, line * geometry.dilation[0],
         pixel * geometry.dilation[1]),
    )  # fmt: skip
    return seen.contiguous().view(workers, samples * high * wide, -1)


def _pixels(outputs: Tensor) -> Tensor:
    return outputs.permute(0, 1, 3, 4, 2).flatten(1, 3)


def _unfolded_forward(inputs: Tensor, weights: Tensor, geometry: Geometry) -> Tensor:
    kernel = _kernel(weights)
    found = torch.bmm(_rows(inputs, kernel, geometry), weights.flatten(2).transpose(1, 2))
    sizes = (inputs.shape[1], *geometry.output_size(inputs.shape[-2:], kernel))
    return found.unflatten(1, sizes).permute(0, 1, 4, 2, 3)


def _kernel(weights: Tensor) -> Pair:
    return weights.shape[-2], weights.shape[-1]


def _unfolded_weight_gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    rows = _rows(inputs, _kernel(weights), geometry)
    return torch.bmm(_pixels(gradient).transpose(1, 2), rows).view(weights.shape)


def _unfolded_input_gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    """Each input pixel's sum over the output pixels that see it: `_rows` backwards."""
    kernel = _kernel(weights)
    found = torch.bmm(_pixels(gradient), weights.flatten(2))
    seen = found.unflatten(2, (-1, *kernel)).unflatten(1, (inputs.shape[1], *gradient.shape[3:]))
    (down, right), (lower, further) = geometry.stride, geometry.dilation
    (above, left), (height, width) = geometry.padding, inputs.shape[-2:]
    total: Tensor | None = None
    for y in range(kernel[0]):
        for x in range(kernel[1]):
            part = _spread(_spread(seen[..., y, x], 2, down), 3, right)
            top, start = y * lower - above, x * further - left
            moved = functional.pad(
                part,
                (0, 0, start, width - start - part.shape[3], top, height - top - part.shape[2]),
            )
            total = moved if total is None else total + moved
    assert total is not None
    return total.permute(0, 1, 4, 2, 3)


def _spread(part: Tensor, dimension: int, step: int) -> Tensor:
    """With zeros between: what a stride leaves out."""
    if step == 1:
        return part
    spread = torch.stack([part, *(torch.zeros_like(part) for _ in range(step - 1))], dimension + 1)
    return spread.flatten(dimension, dimension + 1)


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
"""By the names that the table uses."""


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
