"""The layer table of a transformer that predicts the next token (Korthikanti et al. 2022).

For s positions, width h and a heads a layer keeps s h (34 + 5 a s / h) bytes of 16-bit numbers for
its backward pass: 10 s h on each of t machines that hold it together, 24 s h / t and 5 a s^2 / t.
With sequence parallelism the 10 are divided, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.plan.parallel.layer import Block, Layer


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes that say all."""

    width: int
    layers: int
    heads: int
    positions: int
    vocabulary: int


def transformer_blocks(sizes: TransformerSizes) -> tuple[Block, ...]:
    """Embeddings, equal layers, and a head that uses the embedding's weights again."""
    width, positions, words = sizes.width, sizes.positions, sizes.vocabulary
    numbers = float(positions * width)
    embedding = Layer(
        "embedding", "embedding", 0.0, (words + positions) * width, positions, numbers,
        kept=0.5 * numbers,
    )  # fmt: skip
    norm = Layer(
        "norm", "layer norm", 0.0, 2 * width, numbers, numbers, kept=numbers, outside=width
    )
    head = Layer(
        "head", "linear", numbers * words, 0, numbers, float(positions * words), kept=numbers,
        kept_split=2.0 * positions * words, rows=positions, inside=width, outside=words,
        tied=words * width,
    )  # fmt: skip
    return (
        Block("embedding", (embedding,), numbers, (numbers,)),
        *(
            Block(f"layer {number}", transformer_layer(sizes), numbers, (numbers, numbers))
            for number in range(sizes.layers)
        ),
        # Of the numbers for each word only their largest and their sum are shared.
        Block("head", (norm, head), float(positions), (2.0 * positions,)),
    )


def transformer_layer(sizes: TransformerSizes) -> tuple[Layer, ...]:
    """Attention and two products, with a norm before each; the first product of either pair is
    split by its outputs and the second by its inputs, so that there is one sum for each pair."""
    width, positions, heads = sizes.width, sizes.positions, sizes.heads
    numbers, pairs = float(positions * width), float(heads * positions * positions)

    def product(name: str, inside: int, outside: int, kept: float, split: float) -> Layer:
        return Layer(
            name, "linear", float(positions * inside * outside), (inside + 1) * outside,
            float(positions * inside), float(positions * outside), kept, split, positions, inside,
            outside,
        )  # fmt: skip

    norm = Layer(
        "norm", "layer norm", 0.0, 2 * width, numbers, numbers, kept=numbers, outside=width
    )
    attention = Layer(
        "attention", "attention", 2.0 * numbers * positions, 0, 3 * numbers, numbers,
        kept_split=2.5 * pairs, rows=positions, inside=width // heads, outside=positions,
        heads=heads,
    )  # fmt: skip
    return (
        norm,
        product("queries, keys, values", width, 3 * width, numbers, 3 * numbers),
        attention,
        product("projection", width, width, 0.5 * numbers, numbers),
        norm,
        product("up", width, 4 * width, numbers, 4 * numbers),
        product("down", 4 * width, width, 0.5 * numbers, 4 * numbers),
    )
