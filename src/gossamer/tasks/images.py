"""Readers of the MNIST and CIFAR-10 files as their authors distribute them.

Nothing is downloaded and nothing is unpickled. A file that is missing or damaged ends in one
sentence: which file, what was found in it, and where a good one comes from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.tasks.files import damaged, read_bytes
from gossamer.tasks.task import Data

MNIST_ORIGIN = "the four MNIST IDX files from ossci-datasets.s3.amazonaws.com/mnist or any mirror"
CIFAR10_ORIGIN = "cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html, unpacked"

_CLASSES = 10
_IMAGES_MAGIC = bytes((0, 0, 8, 3))
_LABELS_MAGIC = bytes((0, 0, 8, 1))
_MNIST_SIZE = (28, 28)
_CIFAR10_SIZE = (3, 32, 32)
_CIFAR10_RECORD = 1 + 3 * 32 * 32
_CIFAR10_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))


def _read_idx(directory: Path, name: str, magic: bytes) -> tuple[Path, Tensor]:
    """One IDX file, plain or compressed: a magic number, big-endian sizes, then bytes."""
    path = directory / name
    if not path.exists():
        path = directory / f"{name}.gz"
    content = read_bytes(path, MNIST_ORIGIN)
    dimensions = magic[3]
    header = 4 + 4 * dimensions
    if content[:4] != magic:
        found = f"it starts with the bytes {content[:4].hex(' ')!r}, expected {magic.hex(' ')!r}"
        raise damaged(path, found, MNIST_ORIGIN)
    if len(content) < header:
        raise damaged(path, f"its header ends after {len(content)} bytes", MNIST_ORIGIN)
    shape = tuple(np.frombuffer(content, ">u4", dimensions, 4).tolist())
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        found = f"it has {len(content)} bytes, its header promises {expected}"
        raise damaged(path, found, MNIST_ORIGIN)
    body = np.frombuffer(content, np.uint8, offset=header).reshape(shape)
    return path, torch.tensor(body)


def _check_labels(path: Path, labels: Tensor, origin: str) -> Tensor:
    if len(labels) == 0:
        raise damaged(path, "it holds no labels", origin)
    largest = int(labels.max())
    if largest >= _CLASSES:
        found = f"it holds the label {largest}, expected 0 to {_CLASSES - 1}"
        raise damaged(path, found, origin)
    return labels.to(torch.int64)


def _read_mnist_part(directory: Path, part: str) -> Data:
    labels_path, labels = _read_idx(directory, f"{part}-labels-idx1-ubyte", _LABELS_MAGIC)
    targets = _check_labels(labels_path, labels, MNIST_ORIGIN)
    images_path, images = _read_idx(directory, f"{part}-images-idx3-ubyte", _IMAGES_MAGIC)
    if images.shape != (len(targets), *_MNIST_SIZE):
        found = f"its shape is {tuple(images.shape)}, expected {(len(targets), *_MNIST_SIZE)}"
        raise damaged(images_path, found, MNIST_ORIGIN)
    return Data(images.unsqueeze(1), targets)


def read_mnist(directory: Path) -> tuple[Data, Data]:
    """Training and test data: bytes of shape [sample, 1, 28, 28], and classes."""
    return _read_mnist_part(directory, "train"), _read_mnist_part(directory, "t10k")


def _cifar10_directory(directory: Path) -> Path:
    """Where the binary files lie; the pickled distribution is recognised, and refused."""
    for candidate in (directory, directory / "cifar-10-batches-bin"):
        if (candidate / _CIFAR10_FILES[0]).exists():
            return candidate
    for candidate in (directory, directory / "cifar-10-batches-py"):
        if (candidate / "data_batch_1").exists():
            raise ConfigurationError(
                f"{candidate} holds the pickled distribution of CIFAR-10, which is never "
                f"unpickled, because a pickle can run any code; get {CIFAR10_ORIGIN}"
            )
    return directory


def _read_cifar10_file(path: Path, records: int) -> Data:
    content = read_bytes(path, CIFAR10_ORIGIN)
    expected = records * _CIFAR10_RECORD
    if len(content) != expected:
        found = f"it has {len(content)} bytes, expected {expected}"
        raise damaged(path, found, CIFAR10_ORIGIN)
    table = torch.tensor(np.frombuffer(content, np.uint8)).view(records, -1)
    targets = _check_labels(path, table[:, 0], CIFAR10_ORIGIN)
    return Data(table[:, 1:].reshape(records, *_CIFAR10_SIZE), targets)


def read_cifar10(directory: Path, records: int = 10_000) -> tuple[Data, Data]:
    """Training and test data: bytes of shape [sample, 3, 32, 32], and classes.

    The files have no header, so the number of records in each is part of the format.
    """
    directory = _cifar10_directory(directory)
    parts = [_read_cifar10_file(directory / name, records) for name in _CIFAR10_FILES]
    train = Data(
        torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    )
    return train, _read_cifar10_file(directory / "test_batch.bin", records)
