"""The models of the table for GPUs: networks for images, a small transformer, and GPT-2 small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Data, Task
from gossamer.tasks.models import lenet5, resnet18, resnet20
from gossamer.tasks.task import ACCURACY, cross_entropy
from gossamer.tasks.text import CharacterTransformer


class Gpt2Block(nn.Module):
    """Attention and a perceptron, each after a normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.projections(self.first_norm(hidden))
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in split.split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        made = functional.gelu(self.wider(self.second_norm(hidden)), approximate="tanh")
        return hidden + self.narrower(made)


class Gpt2(nn.Module):
    """GPT-2 (Radford et al. 2019): 124 million parameters; words share their weights with scores."""

    def __init__(
        self, words: int = 50257, layers: int = 12, width: int = 768, heads: int = 12,
        context: int = 1024,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.words(text) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.words.weight)


def made_task(name: str, make_model: Callable[[], nn.Module], data: Data) -> Task:
    return Task(
        name=name, title=name, make_model=make_model, loss=cross_entropy, train=data, test=data,
        metric=ACCURACY, augment=None, batch=32, epochs=1.0, learning_rates=(0.01,),
    )  # fmt: skip


def images(*shape: int) -> Data:
    """Random images: the time does not depend on what is on them."""
    generator = torch.Generator().manual_seed(0)
    return Data(
        torch.randn(8192, *shape, generator=generator),
        torch.randint(10, (8192,), generator=generator),
    )


def text(words: int, context: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(words, (1024, context + 1), generator=generator)
    return Data(codes[:, :-1].contiguous(), codes[:, 1:].contiguous())


CASES: dict[str, tuple[Callable[[], Task], int, int]] = {
    "lenet": (lambda: made_task("LeNet-5", lenet5, images(1, 28, 28)), 128, 32),
    "resnet20": (lambda: made_task("ResNet-20", resnet20, images(3, 32, 32)), 16, 128),
    "resnet18": (lambda: made_task("ResNet-18", resnet18, images(3, 32, 32)), 32, 16),
    "transformer": (
        lambda: made_task(
            "transformer 6 x 384", lambda: CharacterTransformer(65, 6, 6, 384, 256), text(65, 256)
        ),
        8,
        16,
    ),
    "gpt2": (lambda: made_task("GPT-2 small", Gpt2, text(50257, 512)), 4, 4),
}
"""By name: the task, the number of workers and the batch of each."""
