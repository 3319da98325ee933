"""ResNets on ImageNet, or on any other tree of images."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.specs import check_range
from gossamer.tasks.keyed import fold, uniform
from gossamer.tasks.metric import Metric
from gossamer.tasks.models import ResidualBlock, Standardise
from gossamer.tasks.published.image_folder import Loaders, read_image_folder
from gossamer.tasks.task import ACCURACY, Task, cross_entropy

# The principal components of ImageNet's colours, for pixels between 0 and 1.
_STRENGTHS = (0.2175, 0.0188, 0.0045)
_COLOURS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)
_DEVIATION = 0.1
_LAYER = -3
_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def colour_noise(images: Tensor, key: Tensor) -> Tensor:
    """Add to all pixels of an image the same random colour along the principal components of the
    data (Krizhevsky et al. 2012). The draws for the i-th image are a function of (key, i)."""
    draws = uniform(fold(key, _LAYER), (len(images), 3)).clamp(1e-6, 1 - 1e-6)
    normal = math.sqrt(2.0) * torch.erfinv(2.0 * draws - 1.0)
    strengths = torch.tensor(_STRENGTHS, device=images.device)
    colours = torch.tensor(_COLOURS, device=images.device)
    shift = 255.0 * (_DEVIATION * normal * strengths) @ colours.T
    return images.to(torch.float32) + shift[:, :, None, None]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut around them; the middle one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Four times `width` channels come out."""
        super().__init__()
        outputs = 4 * width
        self.inside = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Images of shape [batch, channel, height, width]."""
        return functional.relu(self.inside(inputs) + self.shortcut(inputs))


def imagenet_resnet(layers: int, classes: int) -> nn.Sequential:
    """The ResNet of 18 or 50 layers for large images (He et al. 2016)."""
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(_STAGES[layers]):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            if layers == 50:
                blocks.append(Bottleneck(inputs, width, stride))
                inputs = 4 * width
            else:
                blocks.append(ResidualBlock(inputs, width, stride, projected=True))
                inputs = width
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(inputs, classes),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def among_five(output: Tensor, targets: Tensor) -> Tensor:
    """For each sample whether its class is among the five that the output ranks first."""
    ranked = output.topk(min(5, output.shape[-1]), dim=-1).indices
    return (ranked == targets.unsqueeze(-1)).any(-1).float()


def _imagenet(data: Path, layers: int, size: int, loaders: int) -> Task:
    name = f"imagenet-resnet{layers}"
    check_range(f"{name}: size", size, 32)
    check_range(f"{name}: loaders", loaders, 0)
    train, test, classes = read_image_folder(data, size, Loaders(loaders))
    means, deviations = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Task(
        name=name,
        title=f"ResNet-{layers} on images of {classes} classes",
        make_model=lambda: nn.Sequential(
            Standardise(means, deviations), imagenet_resnet(layers, classes)
        ),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        beside=(Metric("top5", among_five),),
        augment=colour_noise,
        batch=min(32, len(train)),
        epochs=90.0,
        learning_rates=(0.03, 0.1, 0.3),
        optimiser="sgd:momentum=0.9,weight_decay=1e-4",
        test_batch=100,
    )


def imagenet_resnet18(data: Path, *, size: int = 224, loaders: int = 4) -> Task:
    """The network of the gossip paper (Jin et al. 2016); `loaders` processes decode images."""
    return _imagenet(data, 18, size, loaders)


def imagenet_resnet50(data: Path, *, size: int = 224, loaders: int = 4) -> Task:
    """The network of most studies of large batches; `loaders` processes decode images."""
    return _imagenet(data, 50, size, loaders)
