"""Statistics of BatchNorm that are a model's own: recomputed, all over the same batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]


def layers_with_statistics(model: nn.Module) -> list[BatchNorm]:
    """The layers that normalise by what they saw in training."""
    found = [module for module in model.modules() if isinstance(module, BatchNorm)]
    return [layer for layer in found if layer.running_mean is not None]


@contextmanager
def predicting(model: nn.Module) -> Generator[None]:
    """Inside, the model drops nothing out and normalises by the batch that it sees, so that its
    parameters alone say what it predicts. No gradient is taken."""
    modes = [(module, module.training) for module in model.modules()]
    normalising = {id(layer) for layer in layers_with_statistics(model)}
    try:
        for module, _ in modes:
            module.training = id(module) in normalising
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def recompute_(layers: Sequence[BatchNorm], passes: Iterable[Callable[[], object]]) -> int:
    """Each pass sends a batch through the model; how many there were.

    A layer then has the mean over the batches of each batch's own statistics, whatever its momentum
    is, as by `torch.optim.swa_utils.update_bn`, which knows no layer that is to stay as it is. If a
    pass fails, all is as before.
    """
    momenta = [layer.momentum for layer in layers]
    before = [[buffer.clone() for buffer in layer.buffers()] for layer in layers]
    count = 0
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean of all batches since the reset
        with torch.no_grad():
            for one in passes:
                one()
                count += 1
    except BaseException:
        count = 0
        raise
    finally:
        for layer, momentum, kept in zip(layers, momenta, before, strict=True):
            layer.momentum = momentum
            if count == 0:
                for buffer, value in zip(layer.buffers(), kept, strict=True):
                    buffer.copy_(value)
    return count
