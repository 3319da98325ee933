"""Tasks to train: small problems with known answers, and the networks of the papers.

`make_task("digits-mlp")` needs nothing but this package; the tasks with `needs_data` read files
that the user has fetched. A task's options follow its name: "quadratic:dimension=20,noise=0". A
task of the user's own is named by its file, "my.py:make_task:width=64", or by its module; one of an
installed package is an entry point of the group `gossamer.tasks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.own_code import (
    entry_points,
    is_own,
    load_entry_point,
    load_object,
    parse_reference,
)
from gossamer.specs import bind
from gossamer.tasks.digits import digits_logistic, digits_mlp
from gossamer.tasks.images import CIFAR10_ORIGIN, MNIST_ORIGIN
from gossamer.tasks.own_task import own_task
from gossamer.tasks.published.image_folder import IMAGES_ORIGIN
from gossamer.tasks.published.imagenet import imagenet_resnet18, imagenet_resnet50
from gossamer.tasks.published.recurrent import digits_lstm, shakespeare_lstm
from gossamer.tasks.published.sparse_logistic import sparse_logistic
from gossamer.tasks.published.variants import Variant
from gossamer.tasks.quadratic import quadratic
from gossamer.tasks.split import SPLITS, Order, Sampler, make_sampler, shares
from gossamer.tasks.task import Data, Metric, Task
from gossamer.tasks.text import SHAKESPEARE_ORIGIN, shakespeare_gpt, shakespeare_nanogpt
from gossamer.tasks.vision import cifar10_resnet18, cifar10_resnet20, cifar10_vgg, mnist_lenet

__all__ = [
    "SPLITS",
    "TASKS",
    "Data",
    "Metric",
    "Order",
    "Sampler",
    "Task",
    "TaskEntry",
    "make_sampler",
    "make_task",
    "shares",
]


@dataclass(frozen=True)
class TaskEntry:
    """A row of the table of tasks.

    `make` takes the task's options as keyword-only parameters, and first the path of the data if
    the task needs any; `origin` says where those come from.
    """

    description: str
    make: Callable[..., Task]
    origin: str | None = None

    @property
    def needs_data(self) -> bool:
        """Whether the user must bring files."""
        return self.origin is not None


TASKS: dict[str, TaskEntry] = {
    "quadratic": TaskEntry("a quadratic with a known optimum; workers may differ", quadratic),
    "digits-logistic": TaskEntry("logistic regression on 1797 digits; convex", digits_logistic),
    "digits-mlp": TaskEntry("a small perceptron on 1797 digits; trains in seconds", digits_mlp),
    "digits-lstm": TaskEntry("a recurrent network that reads digits row by row", digits_lstm),
    "sparse-logistic": TaskEntry(
        "logistic regression with few of many features a sample", sparse_logistic
    ),
    "mnist-lenet": TaskEntry("LeNet-5 on MNIST", mnist_lenet, MNIST_ORIGIN),
    "cifar10-resnet20": TaskEntry("ResNet-20 on CIFAR-10", cifar10_resnet20, CIFAR10_ORIGIN),
    "cifar10-resnet18": TaskEntry("ResNet-18 on CIFAR-10", cifar10_resnet18, CIFAR10_ORIGIN),
    "cifar10-vgg": TaskEntry("VGG-16 with BatchNorm on CIFAR-10", cifar10_vgg, CIFAR10_ORIGIN),
    "imagenet-resnet18": TaskEntry(
        "ResNet-18 on ImageNet, or another tree of images", imagenet_resnet18, IMAGES_ORIGIN
    ),
    "imagenet-resnet50": TaskEntry(
        "ResNet-50 on ImageNet, or another tree of images", imagenet_resnet50, IMAGES_ORIGIN
    ),
    "shakespeare-gpt": TaskEntry(
        "a character transformer on a text", shakespeare_gpt, SHAKESPEARE_ORIGIN
    ),
    "shakespeare-nanogpt": TaskEntry(
        "the same at nanoGPT's size, 10.8 million parameters",
        shakespeare_nanogpt,
        SHAKESPEARE_ORIGIN,
    ),
    "shakespeare-lstm": TaskEntry(
        "a recurrent network on a text", shakespeare_lstm, SHAKESPEARE_ORIGIN
    ),
}

GROUP = "gossamer.tasks"
_EXPECTED = "a Task or a function that returns one"


def make_task(spec: str, *, data: Path | None = None) -> Task:
    """The task that a spec such as "quadratic:dimension=20" describes.

    `data` is the directory (or file) with the data of a task that needs some.
    """
    name, given = parse_reference(spec, "task")
    if is_own(name):
        return own_task(load_object(name, "task", _EXPECTED), name, given, data, spec)
    if name not in TASKS:
        brought = entry_points(GROUP)
        if name not in brought:
            raise unknown_name("task", name, [*TASKS, *brought])
        return own_task(load_entry_point(brought[name], "task"), name, given, data, spec)
    entry = TASKS[name]
    variant = Variant.taken_from(name, given)
    options = bind("task", name, entry.make, given)
    if entry.origin is None:
        if data is not None:
            raise ConfigurationError(f"task {name} brings its own data, got {data}; leave data out")
        return variant.of(entry.make(**options)).named(spec)
    if data is None:
        raise ConfigurationError(
            f"task {name} needs data; get {entry.origin}, and say where it is with --data PATH "
            "(in Python: data=)"
        )
    return variant.of(entry.make(data, **options)).named(spec, data.resolve())
