"""The layer tables of published networks, with the sizes that were published for them.

Image networks take 224 x 224 (AlexNet 227 x 227, LeNet 32 x 32). A multiplication with its addition
is one operation, as in most of these papers; norms and pooling are not counted as operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from gossamer.errors import unknown_name
from gossamer.plan.parallel.layer import Block, Layer, paired_reductions
from gossamer.plan.parallel.transformer import TransformerSizes, transformer_blocks


@dataclass(frozen=True)
class LayerTable:
    """A model as a chain of blocks."""

    name: str
    title: str
    blocks: tuple[Block, ...]
    sample: str = "image"
    published_parameters: float = 0.0
    published_macs: float = 0.0
    source: str = ""
    """Where the two published figures are from."""

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def macs(self) -> float:
        return sum(block.macs for block in self.blocks)

    @property
    def layers(self) -> list[Layer]:
        return [layer for block in self.blocks for layer in block.layers]


class ImageTable:
    """Writes the table of an image network; it knows the channels and the size of the image."""

    def __init__(self, channels: int, side: int) -> None:
        self.channels, self.side = channels, side
        self.blocks: list[Block] = []
        self._open: list[Layer] = []

    @property
    def numbers(self) -> float:
        return self.channels * self.side * self.side

    def block(self, name: str) -> None:
        """End a block: the model can be cut here."""
        if self._open:
            own = tuple(self._open)
            self.blocks.append(Block(name, own, self.numbers, paired_reductions(own)))
        self._open = []

    def convolution(
        self, name: str, channels: int, kernel: int, stride: int = 1, padding: int | None = None,
        *, groups: int = 1, has_norm: bool = False,
    ) -> None:  # fmt: skip
        """A convolution and its activation; with a norm between them it has no bias."""
        before, image = self.numbers, self.side
        padding = kernel // 2 if padding is None else padding
        inside = self.channels // groups * kernel * kernel
        self.side = (image + 2 * padding - kernel) // stride + 1
        places = self.side * self.side
        self._add(Layer(
            name, "convolution", float(inside * channels * places),
            (inside + (not has_norm)) * channels, before, channels * places, kept=before,
            rows=places, inside=inside, outside=channels, groups=groups, image=(image, image),
            kernel=kernel,
        ))  # fmt: skip
        self.channels = channels
        if has_norm:
            self.norm(f"{name}.norm")

    def norm(self, name: str) -> None:
        size = self.numbers
        self._add(Layer(
            name, "batch norm", 0.0, 2 * self.channels, size, size, kept=size,
            outside=self.channels,
        ))  # fmt: skip

    def pool(self, name: str, kernel: int, stride: int, padding: int = 0) -> None:
        """A maximum, which remembers places of 64 bits."""
        before = self.numbers
        self.side = -(-(self.side + 2 * padding - kernel) // stride) + 1
        kept = before + 2 * self.numbers
        self._add(Layer(name, "pooling", 0.0, 0, before, self.numbers, kept=kept))

    def mean(self, name: str, side: int = 1) -> None:
        before, self.side = self.numbers, side
        self._add(Layer(name, "pooling", 0.0, 0, before, self.numbers))

    def linear(self, name: str, outputs: int) -> None:
        inputs = round(self.numbers)
        self.channels, self.side = outputs, 1
        self._add(Layer(
            name, "linear", float(inputs * outputs), (inputs + 1) * outputs, inputs, outputs,
            kept=inputs, inside=inputs, outside=outputs,
        ))  # fmt: skip

    def branches(self, *branches: Callable[[], None]) -> None:
        """Branches that begin at the same place and end side by side, as one image."""
        channels, side, total = self.channels, self.side, 0
        for branch in branches:
            self.channels, self.side = channels, side
            branch()
            total += self.channels
        self.channels = total

    def _add(self, layer: Layer) -> None:
        self._open.append(layer)


# ---------------------------------------------------------------------- the tables


def _lenet() -> tuple[Block, ...]:
    """LeCun et al. 1998: averages with a weight and a bias for each map, a third layer that sees
    10 of 16 x 6 maps, and a last layer whose weights are fixed. Biases count as connections."""
    rows = (
        # Name, kind, connections, parameters, maps and side before and behind.
        ("C1", "convolution", 122_304, 156, (1, 32), (6, 28)),
        ("S2", "pooling", 5_880, 12, (6, 28), (6, 14)),
        ("C3", "convolution", 151_600, 1_516, (6, 14), (16, 10)),
        ("S4", "pooling", 2_000, 32, (16, 10), (16, 5)),
        ("C5", "convolution", 48_120, 48_120, (16, 5), (120, 1)),
        ("F6", "linear", 10_164, 10_164, (120, 1), (84, 1)),
        ("output", "linear", 840, 0, (84, 1), (10, 1)),
    )
    layers = [
        Layer(
            name,
            kind,
            float(connections),
            parameters,
            maps * side**2,
            channels * image**2,
            kept=maps * side**2,
            rows=image**2,
            inside=connections // (channels * image**2),
            outside=channels,
            image=(side, side),
            kernel=5 if kind == "convolution" else 1,
        )
        for name, kind, connections, parameters, (maps, side), (channels, image) in rows
    ]
    return tuple(Block(one.name, (one,), one.outputs, paired_reductions([one])) for one in layers)


def _alexnet(*, is_of_2014: bool = False) -> tuple[Block, ...]:
    """Krizhevsky et al. 2012, in two towers that see each other at the third convolution; that of
    2014 has one tower and fewer channels."""
    table = ImageTable(3, 224 if is_of_2014 else 227)
    wide = (64, 192, 384, 256, 256) if is_of_2014 else (96, 256, 384, 384, 256)
    towers = (1, 1, 1, 1, 1) if is_of_2014 else (1, 2, 1, 2, 2)
    shapes = ((11, 4, 2 if is_of_2014 else 0), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
    for number, (channels, groups, shape) in enumerate(zip(wide, towers, shapes, strict=True), 1):
        table.convolution(f"conv{number}", channels, *shape, groups=groups)
        if number in (1, 2, 5):
            table.pool(f"pool{number}", 3, 2)
        table.block(f"conv{number}")
    for number, outputs in enumerate((4096, 4096, 1000), 6):
        table.linear(f"fc{number}", outputs)
        table.block(f"fc{number}")
    return tuple(table.blocks)


def _vgg16() -> tuple[Block, ...]:
    """Simonyan & Zisserman 2015, configuration D."""
    table = ImageTable(3, 224)
    for stage, (many, channels) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for number in range(1, many + 1):
            table.convolution(f"conv{stage}_{number}", channels, 3)
            if number == many:
                table.pool(f"pool{stage}", 2, 2)
            table.block(f"conv{stage}_{number}")
    for number, outputs in enumerate((4096, 4096, 1000), 6):
        table.linear(f"fc{number}", outputs)
        table.block(f"fc{number}")
    return tuple(table.blocks)


def _googlenet() -> tuple[Block, ...]:
    """Szegedy et al. 2015, table 1, without the two helping classifiers: of each module the
    channels of 1x1, before 3x3, 3x3, before 5x5, 5x5 and behind the pooling."""
    table = ImageTable(3, 224)
    table.convolution("conv1", 64, 7, 2, 3)
    table.pool("pool1", 3, 2)
    table.block("conv1")
    table.convolution("conv2.reduce", 64, 1)
    table.convolution("conv2", 192, 3)
    table.pool("pool2", 3, 2)
    table.block("conv2")
    modules = {
        "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
        "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64),
        "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
        "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128),
        "5b": (384, 192, 384, 48, 128, 128),
    }  # fmt: skip
    for name, wide in modules.items():
        _inception(table, name, wide)
        if name in ("3b", "4e"):
            table.pool(f"pool{name[0]}", 3, 2)
        table.block(f"inception {name}")
    table.mean("mean")
    table.linear("linear", 1000)
    table.block("linear")
    return tuple(table.blocks)


def _inception(table: ImageTable, name: str, wide: tuple[int, ...]) -> None:
    one, before_3, three, before_5, five, behind = wide

    def chain(small: int, large: int, kernel: int) -> None:
        table.convolution(f"{name}.{kernel}x{kernel}.reduce", small, 1)
        table.convolution(f"{name}.{kernel}x{kernel}", large, kernel)

    def pooled() -> None:
        table.pool(f"{name}.pool", 3, 1, 1)
        table.convolution(f"{name}.pool.1x1", behind, 1)

    table.branches(
        lambda: table.convolution(f"{name}.1x1", one, 1),
        lambda: chain(before_3, three, 3),
        lambda: chain(before_5, five, 5),
        pooled,
    )


def _resnet50() -> tuple[Block, ...]:
    """He et al. 2016, with the stride at the 3x3 convolution, as most programs have it."""
    table = ImageTable(3, 224)
    table.convolution("conv1", 64, 7, 2, 3, has_norm=True)
    table.pool("pool1", 3, 2)
    table.block("conv1")
    for stage, (many, channels) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for number in range(1, many + 1):
            name = f"conv{stage}_{number}"
            stride = 2 if number == 1 and stage > 2 else 1
            before = table.channels, table.side
            if number == 1:
                table.convolution(f"{name}.skip", 4 * channels, 1, stride, 0, has_norm=True)
                table.channels, table.side = before
            table.convolution(f"{name}.a", channels, 1, has_norm=True)
            table.convolution(f"{name}.b", channels, 3, stride, has_norm=True)
            table.convolution(f"{name}.c", 4 * channels, 1, has_norm=True)
            table.block(name)
    table.mean("mean")
    table.linear("linear", 1000)
    table.block("linear")
    return tuple(table.blocks)


def _densenet121(growth: int = 32) -> tuple[Block, ...]:
    """Huang et al. 2017. Every layer sees all before it, so a cut inside sends all of them."""
    table = ImageTable(3, 224)
    table.convolution("conv1", 64, 7, 2, 3, has_norm=True)
    table.pool("pool1", 3, 2)
    table.block("conv1")
    for stage, many in enumerate((6, 12, 24, 16), 1):
        for number in range(1, many + 1):
            name, channels = f"dense{stage}_{number}", table.channels
            table.norm(f"{name}.norm")
            table.convolution(f"{name}.1x1", 4 * growth, 1, has_norm=True)
            table.convolution(f"{name}.3x3", growth, 3, has_norm=False)
            table.channels = channels + growth
            table.block(name)
        table.norm(f"transition{stage}.norm")
        if stage < 4:
            table.convolution(f"transition{stage}", table.channels // 2, 1)
            table.mean(f"pool{stage + 1}", table.side // 2)
            table.block(f"transition{stage}")
    table.mean("mean")
    table.linear("linear", 1000)
    table.block("linear")
    # Its convolutions have no biases: a norm follows each of them, if not at once.
    return tuple(
        replace(block, layers=tuple(_without_bias(layer) for layer in block.layers))
        for block in table.blocks
    )


def _without_bias(layer: Layer) -> Layer:
    own = layer.inside * layer.outside
    return replace(layer, parameters=own) if layer.kind == "convolution" else layer


_GPT2 = TransformerSizes(width=768, layers=12, heads=12, positions=1024, vocabulary=50257)
_TABLES: dict[str, tuple[str, Callable[[], tuple[Block, ...]], str, float, float, str]] = {
    "lenet": ("LeNet-5", _lenet, "image", 60_000, 340_908,
              "LeCun et al. 1998, from memory of the paper: trained parameters and connections"),
    "alexnet": ("AlexNet", _alexnet, "image", 61e6, 724e6,
                "parameters as in the survey of Ben-Nun & Hoefler 2019, from memory; operations as "
                "listed for CaffeNet by convnet-burden"),
    "alexnet-2014": ("AlexNet with one tower", lambda: _alexnet(is_of_2014=True), "image",
                     61_100_840, 714e6, "torchvision's page of the model, and listings of it"),
    "googlenet": ("GoogLeNet", _googlenet, "image", 7.00e6, 1.6e9,
                  "listings of the Caffe model; the paper's own table adds up to 6.8 million, in "
                  "thousands of 1024 and with a first row that does not fit its 7x7 kernel"),
    "resnet-50": ("ResNet-50", _resnet50, "image", 25_557_032, 4.09e9, "torchvision, from memory"),
    "densenet-121": ("DenseNet-121", _densenet121, "image", 7_978_856, 2.83e9,
                     "torchvision, from memory"),
    "vgg-16": ("VGG-16", _vgg16, "image", 138_357_544, 15.47e9, "torchvision's listings"),
    "gpt-2": ("GPT-2 small, 1024 positions", lambda: transformer_blocks(_GPT2), "text",
              124_439_808, 291_648_307_200 / 2,
              "parameters of the released weights, from memory; operations as listed by "
              "transformer sizing tables, which count two for a multiplication with its addition"),
}  # fmt: skip
NETWORKS = tuple(_TABLES)


@lru_cache(maxsize=16)
def make_network(name: str) -> LayerTable:
    """A published network by name."""
    if name not in _TABLES:
        raise unknown_name("network", name, NETWORKS)
    title, make, sample, parameters, macs, source = _TABLES[name]
    return LayerTable(name, title, make(), sample, parameters, macs, source)
