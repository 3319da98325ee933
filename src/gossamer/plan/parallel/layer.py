"""What a layer computes, holds and sends, for one sample; and the blocks between which one cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRODUCTS = ("linear", "convolution", "attention", "part")
"""Kinds that multiply by matrices, so that machines can hold a share of them each."""


@dataclass(frozen=True)
class Layer:
    """One layer. All counts but those of parameters are for one sample."""

    name: str
    kind: str
    """linear, convolution, attention (the products of positions), embedding, batch norm, layer
    norm, pooling, or part, of which only the counts are known."""
    macs: float
    """Multiplications with their additions in the forward pass."""
    parameters: int
    inputs: float
    """Numbers that it takes."""
    outputs: float
    kept: float = 0.0
    """Numbers that the backward pass needs again and that every machine holds that has a share of
    the layer; a mask counts half."""
    kept_split: float = 0.0
    """The same of numbers of which each of these machines has its share."""
    rows: float = 1.0
    """Of the product of matrices: rows, and columns before and after."""
    inside: int = 1
    outside: int = 1
    groups: int = 1
    image: tuple[int, int] = (1, 1)
    """Of the input of a convolution."""
    kernel: int = 1
    heads: int = 0
    tied: int = 0
    """Parameters of another layer that it uses: a machine that has not got that layer holds them
    again."""

    @property
    def is_product(self) -> bool:
        return self.kind in PRODUCTS

    @property
    def is_divisible(self) -> bool:
        """Whether machines that hold it together have a share of its parameters each."""
        return self.is_product or self.kind == "embedding"


@dataclass(frozen=True)
class Block:
    """Layers between two places where the model can be cut: one layer, or branches that are
    joined again."""

    name: str
    layers: tuple[Layer, ...]
    outputs: float
    """Numbers for each sample that cross the cut behind it, skipped connections among them."""
    reductions: tuple[float, ...] = ()
    """The numbers of each sum over machines that hold its layers together, in the forward pass;
    there are as many backward."""

    @property
    def macs(self) -> float:
        return sum(layer.macs for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def held(self, tensor: int = 1) -> float:
        """Parameters on each of so many machines that hold it together."""
        return sum(
            layer.parameters / (tensor if layer.is_divisible else 1) for layer in self.layers
        )

    def kept(self, tensor: int = 1, *, is_selective: bool = False) -> float:
        """Numbers of activations on each of them, for one sample. Selective recomputing keeps
        those between the positions of attention not at all."""
        return sum(
            layer.kept + layer.kept_split / tensor
            for layer in self.layers
            if not (is_selective and layer.kind == "attention")
        )


def paired_reductions(layers: Sequence[Layer]) -> tuple[float, ...]:
    """A layer split by its outputs and the next one by its inputs need one sum together, of what
    the second gives; so does a layer that is left over."""
    products = [layer for layer in layers if layer.is_product]
    return tuple(
        products[min(first + 1, len(products) - 1)].outputs for first in range(0, len(products), 2)
    )
