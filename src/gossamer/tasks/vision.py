"""The image tasks: LeNet-5 on MNIST, ResNets and VGG on CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import ConfigurationError
from gossamer.specs import check_range
from gossamer.tasks.images import read_cifar10, read_mnist
from gossamer.tasks.keyed import fold, uniform
from gossamer.tasks.models import Standardise, Vgg, lenet5, resnet18, resnet20
from gossamer.tasks.task import ACCURACY, Task, cross_entropy

# Dropout layers count from 0 upwards; a negative number can be none of them.
_AUGMENTATION_LAYER = -1
_PADDING = 4
_VGG_OPTIMISER = "sgd:momentum=0.9,weight_decay=5e-4"


def crop_and_flip(images: Tensor, key: Tensor) -> Tensor:
    """CIFAR-10's usual augmentation: pad by 4, crop at random, mirror every second image.

    The choices for the i-th image of the batch are a function of (key, i).
    """
    batch, channels, height, width = images.shape
    draws = uniform(fold(key, _AUGMENTATION_LAYER), (batch, 3))
    shifts = (draws[:, :2] * (2 * _PADDING + 1)).to(torch.int64)
    mirrored = draws[:, 2:] < 0.5
    rows = shifts[:, :1] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = shifts[:, 1:] + torch.where(mirrored, width - 1 - columns, columns)
    padded = functional.pad(images, (_PADDING,) * 4)
    rows = rows[:, None, :, None].expand(batch, channels, height, padded.shape[3])
    columns = columns[:, None, None, :].expand(batch, channels, height, width)
    return padded.gather(2, rows).gather(3, columns)


def mnist_lenet(data: Path) -> Task:
    """LeNet-5 on MNIST, the problem of the study of delayed gradients (Jain et al. 2018)."""
    train, test = read_mnist(data)
    return Task(
        name="mnist-lenet",
        title="LeNet-5 on MNIST",
        make_model=lambda: nn.Sequential(Standardise((0.1307,), (0.3081,)), lenet5()),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=64,
        epochs=5.0,
        learning_rates=(0.003, 0.01, 0.03),
    )


def _cifar10(data: Path, name: str, title: str, make_network: Callable[[], nn.Module]) -> Task:
    train, test = read_cifar10(data)
    means, deviations = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return Task(
        name=name,
        title=title,
        make_model=lambda: nn.Sequential(Standardise(means, deviations), make_network()),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        augment=crop_and_flip,
        batch=128,
        epochs=30.0,
        learning_rates=(0.03, 0.1, 0.3),
        optimiser="sgd:momentum=0.9,weight_decay=1e-4",
    )


def cifar10_resnet20(data: Path) -> Task:
    """ResNet-20 on CIFAR-10, the problem of the AD-PSGD paper (Lian et al. 2018)."""
    return _cifar10(data, "cifar10-resnet20", "ResNet-20 on CIFAR-10", resnet20)


def cifar10_resnet18(data: Path, *, width: int = 64) -> Task:
    """ResNet-18 on CIFAR-10; a smaller width makes it quicker."""
    check_range("cifar10-resnet18: width", width, 1)
    return _cifar10(
        data, "cifar10-resnet18", f"ResNet-18 of width {width} on CIFAR-10", lambda: resnet18(width)
    )


def cifar10_vgg(data: Path, *, width: int = 64) -> Task:
    """VGG-16 on CIFAR-10, the second network of the AD-PSGD paper (Lian et al. 2018); with a
    smaller width, which must be a multiple of 8, it is quicker."""
    check_range("cifar10-vgg: width", width, 8)
    if width % 8:
        raise ConfigurationError(f"cifar10-vgg: width must be a multiple of 8, got {width}")
    made = _cifar10(data, "cifar10-vgg", f"VGG-16 of width {width} on CIFAR-10", lambda: Vgg(width))
    return replace(made, learning_rates=(0.01, 0.03, 0.1), optimiser=_VGG_OPTIMISER)
