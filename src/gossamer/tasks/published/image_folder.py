"""A tree of images, a folder for each class, decoded by loader processes when a batch needs them.

Training images are scaled at random (shortest side 256 to 480), cropped at random to 224 and
mirrored at random, as He et al. (2016) and Jin et al. (2016) do. The choices for an image are a
function of the key of its worker's step and of its place in the batch, so they are the same in
every world and with any number of loader processes. Test images are scaled to 256 and cropped in
the middle.
"""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.tasks.data import Data, Tensors
from gossamer.tasks.files import read_bytes
from gossamer.tasks.keyed import fold, uniform

IMAGES_ORIGIN = (
    "a folder with train and val inside, each with a folder of images for every class, as ImageNet "
    "is usually unpacked"
)
_SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".webp"})
_SHORTEST = (256, 480)
_TEST_SHORTEST = 256
# Dropout layers count from 0 upwards; other augmentation has -1.
_LAYER = -2
_PER_REQUEST = 8


@dataclass(frozen=True)
class View:
    """Which part of an image is wanted."""

    path: Path
    shortest: int
    """Its shortest side after scaling."""
    across: float = 0.5
    """Where the crop lies, from 0, left, to 1, right."""
    down: float = 0.5
    is_mirrored: bool = False

    def read(self, size: int) -> NDArray[np.uint8]:
        """The square of this size, as bytes of shape [3, size, size]."""
        library, content = _pillow(), read_bytes(self.path, IMAGES_ORIGIN)
        try:
            image: Any = library.open(io.BytesIO(content))
            # A decoder of JPEG can scale by powers of two while it decodes.
            image.draft("RGB", (self.shortest, self.shortest))
            image = image.convert("RGB")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"image {self.path} cannot be decoded ({type(error).__name__}); replace it or take "
                "it out"
            ) from None
        width, height = image.size
        scale = min(width, height) / self.shortest  # of pixels that are there to those wanted
        left = self.across * (width - scale * size)
        top = self.down * (height - scale * size)
        box = (left, top, left + scale * size, top + scale * size)
        image = image.resize((size, size), resample=2, box=box)  # bilinear
        pixels = np.asarray(image, dtype=np.uint8)
        pixels = pixels[:, ::-1] if self.is_mirrored else pixels
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigurationError(
            "images are decoded by Pillow, which is not installed; run `pip install pillow`"
        ) from None
    return Image


def _read_all(views: Sequence[View], size: int) -> NDArray[np.uint8]:
    return np.stack([view.read(size) for view in views])


class Loaders:
    """Processes that decode, started when the first image is wanted; with 0 nobody is started."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def read(self, views: Sequence[View], size: int) -> Tensor:
        """The images in order, [image, 3, size, size]."""
        if self.count == 0:
            return torch.from_numpy(_read_all(views, size))
        if self._pool is None:
            # Children use no torch, so a fork is safe beside its threads.
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self.count, context)
        portions = [views[at : at + _PER_REQUEST] for at in range(0, len(views), _PER_REQUEST)]
        found = self._pool.map(_read_all, portions, [size] * len(portions))
        return torch.from_numpy(np.concatenate(list(found)))


@dataclass(frozen=True, eq=False)
class FolderData(Data):
    """Images that are read when they are asked for; the inputs are their numbers until then."""

    files: Sequence[Path] = ()
    loaders: Loaders = field(default_factory=lambda: Loaders(0))
    size: int = 224
    is_training: bool = False

    def to(self, device: torch.device | str) -> Data:
        """Images come to the device of their targets."""
        return replace(self, targets=self.targets.to(device))

    def at(self, index: Tensor, keys: Tensor | None = None) -> tuple[Tensors, Tensors]:
        """Images and targets, [batch] or [worker, batch], with a key or one for each worker."""
        targets: Tensor = self.targets[index.to(self.targets.device)]
        rows = index.reshape(-1, index.shape[-1])
        key = torch.zeros((), dtype=torch.int64) if keys is None else keys.cpu()
        keys = key.reshape(-1).expand(len(rows))
        views = [
            view
            for row, own in zip(rows.tolist(), keys, strict=True)
            for view in self._views(row, own)
        ]
        images = self.loaders.read(views, self.size).to(targets.device)
        return images.view(*index.shape, *images.shape[1:]), targets

    def _views(self, numbers: Sequence[int], key: Tensor) -> Iterator[View]:
        if not self.is_training:
            yield from (
                View(self.files[number], self._scaled(_TEST_SHORTEST)) for number in numbers
            )
            return
        draws = uniform(fold(key, _LAYER), (len(numbers), 4)).tolist()
        for number, (scale, across, down, mirror) in zip(numbers, draws, strict=True):
            shortest = _SHORTEST[0] + int(scale * (_SHORTEST[1] - _SHORTEST[0] + 1))
            yield View(self.files[number], self._scaled(shortest), across, down, mirror < 0.5)

    def _scaled(self, shortest: int) -> int:
        """For crops of another size than 224 the sides are in proportion."""
        return round(shortest * self.size / 224)

    def first(self, count: int) -> Data:
        """Read, so that a model can be tried."""
        return self._read(0, min(count, len(self)))

    def parts(self, size: int) -> Iterator[Data]:
        """All images in their order, read portion by portion."""
        for start in range(0, len(self), size):
            yield self._read(start, min(start + size, len(self)))

    def _read(self, start: int, end: int) -> Data:
        images, targets = self.at(torch.arange(start, end))
        return Data(images, targets)


def read_image_folder(data: Path, size: int, loaders: Loaders) -> tuple[Data, Data, int]:
    """Training data, test data, and how many classes there are."""
    folders = {part: data / part for part in ("train", "val")}
    for folder in folders.values():
        if not folder.is_dir():
            raise ConfigurationError(f"data folder {folder} does not exist; get {IMAGES_ORIGIN}")
    classes = sorted(one.name for one in folders["train"].iterdir() if one.is_dir())
    found = {
        part: _listed(folder, classes, size, loaders, is_training=part == "train")
        for part, folder in folders.items()
    }
    return found["train"], found["val"], len(classes)


def _listed(
    folder: Path, classes: Sequence[str], size: int, loaders: Loaders, *, is_training: bool
) -> Data:
    strangers = sorted({one.name for one in folder.iterdir() if one.is_dir()} - set(classes))
    if strangers:
        raise ConfigurationError(
            f"data folder {folder} has the class {strangers[0]}, which train has not; get "
            f"{IMAGES_ORIGIN}"
        )
    files: list[Path] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        inside = (folder / name).glob("**/*")
        own = sorted(one for one in inside if one.suffix.lower() in _SUFFIXES)
        files += own
        targets += [number] * len(own)
    if not files:
        raise ConfigurationError(f"data folder {folder} holds no images; get {IMAGES_ORIGIN}")
    return FolderData(
        torch.arange(len(files)), torch.tensor(targets), files=files, loaders=loaders, size=size,
        is_training=is_training,
    )  # fmt: skip
