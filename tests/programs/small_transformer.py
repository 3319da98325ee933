"""A task for stages of real workers: the package's transformer on characters that count upwards."""

import torch
from torch import nn

from gossamer import Task
from gossamer.tasks.text import CharacterTransformer

LETTERS, LENGTH = 16, 8


def texts(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every text counts upwards by its own step; the target of a letter is the next one."""
    generator = torch.Generator().manual_seed(seed)
    begin, step = torch.randint(1, LETTERS, (2, samples, 1), generator=generator)
    letters = (begin + step * torch.arange(LENGTH + 1)) % LETTERS
    return letters[:, :-1], letters[:, 1:]


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


task = Task.of(
    lambda: CharacterTransformer(LETTERS, 4, 2, 16, LENGTH), loss, texts(256, 0), texts(64, 1),
    name="counting", batch=16, epochs=1, learning_rates=[0.05], optimiser="sgd:momentum=0.9",
)  # fmt: skip
