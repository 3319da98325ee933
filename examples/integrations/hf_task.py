"""A model of Hugging Face's transformers as a task, with texts that were tokenised before.

    gossamer compare --task examples/integrations/hf_task.py:task --methods "all_reduce ad_psgd"
    gossamer train --task examples/integrations/hf_task.py:task --method ad_psgd --workers 2

Nothing is downloaded: the model is a small BERT from a configuration, a word is a token, and the
texts are praise or blame.
"""

import random

from transformers import BertConfig, BertForSequenceClassification

import gossamer

PRAISE, BLAME = (
    ["good", "great", "fine", "lovely", "brilliant"],
    ["bad", "poor", "dull", "awful", "boring"],
)
OTHERS = ["the", "a", "film", "book", "song", "was", "is", "and", "but", "very", "not", "it"]
WORDS = ["[PAD]", *OTHERS, *PRAISE, *BLAME]
LONGEST = 12


def texts(samples: int, seed: int) -> list[tuple[str, int]]:
    """Sentences with a word of praise or of blame; your own would come from a file."""
    draw, found = random.Random(seed), []
    for _ in range(samples):
        words = draw.choices(OTHERS, k=draw.randint(4, LONGEST - 1))
        label = draw.randrange(2)
        words.insert(draw.randrange(len(words)), draw.choice((BLAME, PRAISE)[label]))
        found.append((" ".join(words), label))
    return found


def tokenised(samples: list[tuple[str, int]]) -> list[dict[str, object]]:
    """What a tokenizer gives with padding="max_length", and the column `labels`."""
    rows = []
    for text, label in samples:
        ids = [WORDS.index(word) for word in text.split()]
        rest = LONGEST - len(ids)
        mask = [1] * len(ids) + [0] * rest
        rows.append({"input_ids": ids + [0] * rest, "attention_mask": mask, "labels": label})
    return rows


def task(width: int = 32) -> gossamer.Task:
    """The loss is None: the model computes it itself when it is given labels."""
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=LONGEST, num_labels=2,
    )  # fmt: skip
    train, test = tokenised(texts(1200, 0)), tokenised(texts(300, 1))
    return gossamer.Task.of(
        lambda: BertForSequenceClassification(config), None, train, test,
        name="praise", epochs=10, learning_rates=(3e-3, 1e-2),
    )  # fmt: skip


if __name__ == "__main__":
    methods = ["all_reduce", "ad_psgd"]
    print(gossamer.compare(task(), methods, "one-slow-of-8", seeds=2, target=0.9))
