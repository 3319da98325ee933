"""A small transformer that predicts the next character of a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import ConfigurationError
from gossamer.pipeline.chain import Part
from gossamer.specs import check_range
from gossamer.tasks.files import read_bytes
from gossamer.tasks.task import ACCURACY, Data, Task, cross_entropy

SHAKESPEARE_ORIGIN = (
    "input.txt of tinyshakespeare (github.com/karpathy/char-rnn, data/tinyshakespeare), "
    "or any text in UTF-8"
)
_TRAINING_FRACTION = 0.9


class CausalAttention(nn.Module):
    """Self-attention in which a position sees itself and what came before."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        """`heads` must divide `width`."""
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape [batch, position, width] to the same."""
        batch, length, width = inputs.shape
        split = self.projections(inputs).reshape(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        dropped = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        """The perceptron is four times as wide as the block."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            *_dropout(dropout),
        )
        self.mixed = nn.Sequential(*_dropout(dropout))

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape [batch, position, width] to the same."""
        hidden = inputs + self.mixed(self.attention(self.attention_norm(inputs)))
        return hidden + self.perceptron(hidden)


def _dropout(p: float) -> list[nn.Module]:
    return [nn.Dropout(p)] if p > 0.0 else []


class CharacterTransformer(nn.Module):
    """A decoder in the manner of GPT-2, small enough for a laptop."""

    def __init__(
        self, characters: int, layers: int, heads: int, width: int, context: int,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """`characters` is the size of the alphabet, `context` the longest input."""
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.first = nn.Sequential(*_dropout(dropout))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)
        nn.init.normal_(self.character.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Characters of shape [batch, position] to scores of the character that follows each."""
        return self._scores(self.blocks(self._embedded(text)))

    def _embedded(self, text: Tensor) -> Tensor:
        embedded = functional.embedding(text, self.character.weight)
        return self.first(embedded + self.position[: text.shape[1]])

    def _scores(self, hidden: Tensor) -> Tensor:
        return self.scores(self.norm(hidden))

    def chain(self) -> list[Part]:
        """The embedding, each block, and the scores."""
        blocks = [
            Part(f"blocks.{number}", block, (f"blocks.{number}",), reductions=2)
            for number, block in enumerate(self.blocks)
        ]
        return [
            Part("character", self._embedded, ("character", "position")),
            *blocks,
            Part("scores", self._scores, ("norm", "scores")),
        ]


def _windows(codes: Tensor, context: int) -> Data:
    """Windows that do not overlap; the target of each character is the one after it."""
    count = (len(codes) - 1) // context
    inputs = codes[: count * context].view(count, context)
    return Data(inputs, codes[1 : count * context + 1].view(count, context))


def read_text(data: Path, context: int) -> tuple[Data, Data, int]:
    """Training data (the first 90 %), test data (the rest), and the size of the alphabet."""
    path = data / "input.txt" if data.is_dir() else data
    content = read_bytes(path, SHAKESPEARE_ORIGIN)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"data file {path} is not UTF-8 text (byte {error.start} of {len(content)}); "
            f"get {SHAKESPEARE_ORIGIN}"
        ) from None
    boundary = int(len(text) * _TRAINING_FRACTION)
    if len(text) - boundary <= context:
        raise ConfigurationError(
            f"data file {path} is too short: its last tenth has {len(text) - boundary} characters, "
            f"expected more than context={context}; lower context or get {SHAKESPEARE_ORIGIN}"
        )
    alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    return (
        _windows(codes[:boundary], context),
        _windows(codes[boundary:], context),
        len(alphabet),
    )


def shakespeare_gpt(
    data: Path, *, layers: int = 2, heads: int = 2, width: int = 64, context: int = 64,
    dropout: float = 0.0,
) -> Task:  # fmt: skip
    """A character transformer on the works of Shakespeare, or on a text of your own."""
    check_range("shakespeare-gpt: dropout", dropout, 0.0, 1.0)
    for option, value in (("layers", layers), ("heads", heads), ("context", context)):
        check_range(f"shakespeare-gpt: {option}", value, 1)
    if width < 1 or width % heads:
        raise ConfigurationError(
            f"shakespeare-gpt: width must be a positive multiple of heads, got width={width}, "
            f"heads={heads}; try width={heads * max(1, width // heads)}"
        )
    train, test, characters = read_text(data, context)
    return Task(
        name="shakespeare-gpt",
        title=f"Character transformer ({layers} layers of width {width}) on Shakespeare",
        make_model=lambda: CharacterTransformer(characters, layers, heads, width, context, dropout),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=16,
        epochs=3.0,
        learning_rates=(0.01, 0.03, 0.1),
    )


def shakespeare_nanogpt(data: Path, *, dropout: float = 0.2) -> Task:
    """The character transformer at the size of nanoGPT's `train_shakespeare_char`: 6 layers, 6
    heads, width 384, 256 characters, dropout 0.2, 10.8 million parameters; AdamW at 1e-3 with
    weight decay 0.1, batches of 64. There the embedding and the scores share their weights, layers
    have no biases, and windows begin anywhere."""
    made = shakespeare_gpt(data, layers=6, heads=6, width=384, context=256, dropout=dropout)
    return replace(
        made,
        name="shakespeare-nanogpt",
        batch=64,
        # 5000 steps of 64 windows, as there: each sees 256 of a million characters.
        epochs=80.0,
        optimiser="adamw:weight_decay=0.1,beta2=0.99",
        learning_rates=(3e-4, 1e-3, 3e-3),
        test_batch=100,
    )
