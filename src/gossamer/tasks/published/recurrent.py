"""Recurrent networks: digits read row by row, and text read character by character."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.specs import check_range
from gossamer.tasks.digits import CLASSES, PIXELS, read_digits
from gossamer.tasks.task import ACCURACY, Data, Task, cross_entropy
from gossamer.tasks.text import read_text

_ROWS = 8


class Lstm(nn.Module):
    """A long short-term memory (Hochreiter and Schmidhuber 1997; forget gates, Gers et al. 2000).

    Written out, step by step, because torch's own cannot be evaluated for many workers at once. The
    forget gates start open, with a bias of 1.
    """

    def __init__(self, inputs: int, width: int) -> None:
        """Weights are drawn as torch's own draws them."""
        super().__init__()
        self.width = width
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width, bias=False)
        for weight in self.parameters():
            nn.init.uniform_(weight, -(width**-0.5), width**-0.5)
        with torch.no_grad():
            self.of_input.bias[width : 2 * width] = 1.0

    def forward(self, sequence: Tensor) -> Tensor:
        """[batch, time, inputs] to what the memory shows at each time, [batch, time, width]."""
        gates = self.of_input(sequence)
        shown = cell = gates[:, 0, : self.width] * 0.0
        outputs: list[Tensor] = []
        for now in gates.unbind(1):
            into, forget, new, out = (now + self.of_state(shown)).chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            shown = out.sigmoid() * cell.tanh()
            outputs.append(shown)
        return torch.stack(outputs, dim=1)


class LastState(nn.Module):
    """Classes by what a memory shows after the last element."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        """One layer."""
        super().__init__()
        self.memory = Lstm(inputs, width)
        self.scores = nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        """[batch, time, inputs] to the scores of the classes."""
        return self.scores(self.memory(sequence)[:, -1])


class CharacterLstm(nn.Module):
    """The character that follows each one, by layers of memories."""

    def __init__(self, characters: int, layers: int, width: int) -> None:
        """`characters` is the size of the alphabet."""
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.memories = nn.Sequential(*(Lstm(width, width) for _ in range(layers)))
        self.scores = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Characters of shape [batch, position] to scores of the character that follows each."""
        return self.scores(self.memories(functional.embedding(text, self.character.weight)))


def digits_lstm(*, width: int = 32) -> Task:
    """The 8x8 digits, which a recurrent network reads row by row from the top."""
    check_range("digits-lstm: width", width, 1)
    train, test = (
        Data(data.inputs.view(len(data), _ROWS, PIXELS // _ROWS), data.targets)
        for data in read_digits()
    )
    return Task(
        name="digits-lstm",
        title=f"LSTM of width {width} on 8x8 digits, row by row",
        make_model=lambda: LastState(PIXELS // _ROWS, width, CLASSES),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=16,
        epochs=20.0,
        learning_rates=(0.03, 0.1, 0.3),
    )


def shakespeare_lstm(
    data: Path, *, layers: int = 2, width: int = 128, context: int = 64
) -> Task:  # fmt: skip
    """Layers of memories that read Shakespeare, or a text of your own, character by character; each
    window begins with an empty memory."""
    for option, value in (("layers", layers), ("width", width), ("context", context)):
        check_range(f"shakespeare-lstm: {option}", value, 1)
    train, test, characters = read_text(data, context)
    return Task(
        name="shakespeare-lstm",
        title=f"Character LSTM ({layers} layers of width {width}) on Shakespeare",
        make_model=lambda: CharacterLstm(characters, layers, width),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=16,
        epochs=3.0,
        learning_rates=(0.001, 0.003, 0.01),
        optimiser="adam",
    )
