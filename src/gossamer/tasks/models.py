"""The networks that the literature on distributed SGD trains on small images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.pipeline.chain import Part

CLASSES = 10


class Standardise(nn.Module):
    """Bytes to numbers of mean 0 and variance 1, channel by channel.

    The data stay bytes until they enter the model, a quarter of the memory. The constants are not
    buffers: methods average buffers between workers, and these are not statistics of a worker.
    """

    def __init__(self, means: tuple[float, ...], deviations: tuple[float, ...]) -> None:
        """Means and deviations of pixels between 0 and 1."""
        super().__init__()
        self.means = means
        self.deviations = deviations

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape [batch, channel, height, width]."""
        channels = [
            (images[:, channel].to(torch.float32) / 255.0 - mean) / deviation
            for channel, (mean, deviation) in enumerate(
                zip(self.means, self.deviations, strict=True)
            )
        ]
        return torch.stack(channels, dim=1)


def lenet5() -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) for 28x28 images, with today's ReLU and max pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class PaddedShortcut(nn.Module):
    """Option A of He et al. (2016): every second pixel, and zeros for the channels that are new."""

    def __init__(self, new_channels: int, stride: int) -> None:
        """No parameters: that is its point."""
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, inputs: Tensor) -> Tensor:
        """Images of shape [batch, channel, height, width]."""
        kept = inputs[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return functional.pad(kept, (0, 0, 0, 0, before, self.new_channels - before))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, projected: bool) -> None:
        """`projected`: a change of shape goes through a 1x1 convolution, else through padding."""
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = _convolution(outputs, outputs, 3, 1)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = (
                nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
                if projected
                else PaddedShortcut(outputs - inputs, stride)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Images of shape [batch, channel, height, width]."""
        hidden = functional.relu(self.first_norm(self.first(inputs)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(inputs))


class ResNet(nn.Module):
    """A residual network for 32x32 images: a 3x3 stem, then stages that halve the image."""

    def __init__(self, widths: tuple[int, ...], blocks: int, projected: bool) -> None:
        """`blocks` residual blocks in each stage; one width a stage, the stem has the first."""
        super().__init__()
        self.stem = _convolution(3, widths[0], 3, 1)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        stages = list[nn.Module]()
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(inputs, width, stride, projected))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape [batch, 3, 32, 32] to the scores of ten classes."""
        return self._scores(self.stages(self._stem(images)))

    def _stem(self, images: Tensor) -> Tensor:
        return functional.relu(self.stem_norm(self.stem(images)))

    def _scores(self, hidden: Tensor) -> Tensor:
        return self.classifier(hidden.mean((2, 3)))

    def chain(self) -> list[Part]:
        """The stem, each block, and the classifier."""
        blocks = [
            Part(f"stages.{number}", block, (f"stages.{number}",))
            for number, block in enumerate(self.stages)
        ]
        return [
            Part("stem", self._stem, ("stem", "stem_norm")),
            *blocks,
            Part("classifier", self._scores, ("classifier",)),
        ]


def resnet20() -> ResNet:
    """The 20 layers that He et al. (2016) train on CIFAR-10: 0.27 million parameters."""
    return ResNet((16, 32, 64), blocks=3, projected=False)


def resnet18(width: int = 64) -> ResNet:
    """ResNet-18 with a stem for CIFAR-10: 11.17 million parameters at width 64."""
    return ResNet((width, 2 * width, 4 * width, 8 * width), blocks=2, projected=True)


_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""The channels of each stage, and its convolutions; a stage ends with a pooling by two."""


class Vgg(nn.Module):
    """VGG (Simonyan and Zisserman 2015) for 32x32 images: its stages with BatchNorm, and one linear
    layer instead of three, as CIFAR-10 is usually trained (14.7 million parameters at width 64)."""

    def __init__(self, width: int = 64) -> None:
        """`width` is the number of channels of the first stage, 64 in the paper."""
        super().__init__()
        stages = list[nn.Module]()
        inputs = 3
        for channels, count in _VGG16:
            outputs = channels * width // 64
            layers = list[nn.Module]()
            for _ in range(count):
                layers += [_convolution(inputs, outputs, 3, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(inputs, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape [batch, 3, 32, 32] to the scores of ten classes."""
        return self._scores(self.stages(images))

    def _scores(self, hidden: Tensor) -> Tensor:
        return self.classifier(hidden.flatten(1))

    def chain(self) -> list[Part]:
        """Each stage, and the classifier."""
        stages = [
            Part(f"stages.{number}", stage, (f"stages.{number}",))
            for number, stage in enumerate(self.stages)
        ]
        return [*stages, Part("classifier", self._scores, ("classifier",))]
