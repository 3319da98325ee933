"""How many images a second are decoded for the tasks on ImageNet, by number of loader processes.

    python benchmarks/images.py [--images 400] [--loaders 0,1,2]

It makes a tree of JPEGs of about ImageNet's size (500 x 375 pixels), and reads whole batches of 32
as a worker in training does: decode, scale, crop to 224, mirror.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from gossamer.tasks import make_task

_BATCH = 32


def make_tree(root: Path, images: int) -> None:
    """Noise of low frequency, which compresses about as photographs do."""
    generator = np.random.default_rng(0)
    for part, count in (("train", images), ("val", 1)):
        folder = root / part / "one"
        folder.mkdir(parents=True)
        for number in range(count):
            coarse = generator.integers(0, 256, (47, 63, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((500, 375), resample=Image.Resampling.BICUBIC)
            image.save(folder / f"{number}.jpg", quality=90)


def images_per_second(root: Path, images: int, loaders: int) -> float:
    """All images once, after one batch that starts the processes."""
    train = make_task(f"imagenet-resnet18:loaders={loaders}", data=root).train
    numbers = torch.randperm(images, generator=torch.Generator().manual_seed(0)).split(_BATCH)
    train.at(numbers[0])
    began = time.perf_counter()
    for step, batch in enumerate(numbers):
        train.at(batch, torch.tensor(step))
    return images / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--loaders", default="0,1,2")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_tree(root, chosen.images)
        for loaders in map(int, chosen.loaders.split(",")):
            rate = images_per_second(root, chosen.images, loaders)
            print(f"{loaders} loader processes: {rate:.0f} images/s")


if __name__ == "__main__":
    main()
