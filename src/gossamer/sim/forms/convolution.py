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
        given = (gradients[0], *ctx.saved_tensors, ctx.form, ctx.geometry)
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


def _rows(inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """What each output pixel sees: [workers, pixels, kernel x channels], channels last."""
    if kernel == (1, 1) and geometry.stride == (1, 1) and geometry.padding == (0, 0):
        return inputs.permute(0, 1, 3, 4, 2).flatten(1, 3)
    last = inputs.permute(0, 1, 3, 4, 2)
    high, wide = geometry.output_size(inputs.shape[-2:], kernel)
    padded = functional.pad(
        last, (0, 0, geometry.padding[1], geometry.padding[1], geometry.padding[0],
               geometry.padding[0]),
    )  # fmt: skip
    (down, right), (lower, further) = geometry.stride, geometry.dilation
    seen = [
        padded[
            :, :, y * lower : y * lower + down * (high - 1) + 1 : down,
            x * further : x * further + right * (wide - 1) + 1 : right,
        ]
        for y in range(kernel[0])
        for x in range(kernel[1])
    ]  # fmt: skip
    return torch.cat(seen, dim=-1).flatten(1, 3)


def _matrix(weights: Tensor) -> Tensor:
    """[workers, outputs, kernel x channels], in the order of `_rows`."""
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
    pixels = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
    found = torch.bmm(pixels.transpose(1, 2), _rows(inputs, _kernel(weights), geometry))
    return found.unflatten(2, (*_kernel(weights), weights.shape[2])).permute(0, 1, 4, 2, 3)


def _unfolded_input_gradient(
    gradient: Tensor, inputs: Tensor, weights: Tensor, geometry: Geometry
) -> Tensor:
    kernel = _kernel(weights)
    if geometry.stride == (1, 1) and all(
        2 * pad == taps - 1 for pad, taps in zip(geometry.padding, kernel, strict=True)
    ) and geometry.dilation == (1, 1):  # fmt: skip
        # It is the same convolution backwards: with kernels turned around, outputs for inputs.
        return _unfolded_forward(gradient, weights.flip((3, 4)).transpose(1, 2), geometry)
    pixels = gradient.permute(0, 1, 3, 4, 2).flatten(1, 3)
    seen = torch.bmm(pixels, _matrix(weights))
    return _added_up(seen.unflatten(1, (inputs.shape[1], *gradient.shape[3:])), inputs, kernel,
                     geometry)  # fmt: skip


def _added_up(seen: Tensor, inputs: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """Each input pixel's sum over the output pixels that see it: `_rows` backwards."""
    workers, samples, channels, height, width = inputs.shape
    above, left = geometry.padding
    high, wide = seen.shape[2:4]
    total = seen.new_zeros(workers, samples, height + 2 * above, width + 2 * left, channels)
    (down, right), (lower, further) = geometry.stride, geometry.dilation
    for number, part in enumerate(seen.split(channels, dim=-1)):
        y, x = divmod(number, kernel[1])
        total[
            :, :, y * lower : y * lower + down * (high - 1) + 1 : down,
            x * further : x * further + right * (wide - 1) + 1 : right,
        ] += part  # fmt: skip
    return total[:, :, above : above + height, left : left + width].permute(0, 1, 4, 2, 3)


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
