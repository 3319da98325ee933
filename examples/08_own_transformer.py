"""A transformer in the manner of Hugging Face: inputs by name, a mask, and a loss of its own.

gossamer compare --task examples/08_own_transformer.py:task --methods "all_reduce ad_psgd"
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer import Task, compare


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """Says whether a text holds the word 7; a mask tells where a text ends."""

    def __init__(self, words: int = 20, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(width, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        logits = self.scores((hidden * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss, logits)


def texts(samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (samples, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(4, 13, (samples, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids * mask == 7).any(1).long()}


# The loss is None: the model computes it from `labels`, as those do of docs/hugging-face.md.
task = Task.of(Classifier, None, texts(1500, 0), texts(300, 1), name="sevens")

if __name__ == "__main__":
    ranking = compare(
        task, ["all_reduce", "ad_psgd"], "one-slow-of-8",
        target=0.9, epochs=3, learning_rates=[1e-2], seeds=2, jobs=1,
    )  # fmt: skip
    for row in ranking.table():
        print(f"{row['method']:10} {row['seconds_to_target']:.2f} s, lr {row['learning_rate']:g}")

# Prints:
# ad_psgd    0.09 s, lr 0.01
# all_reduce 0.24 s, lr 0.01
