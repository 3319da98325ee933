"""The bytes of a model, of its gradient and of its optimiser's state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gossamer.optim.optimisers import Optimiser, make_optimiser
from gossamer.replica import trainable
from gossamer.tasks.flat_model import drawing_from, made_model
from gossamer.tasks.task import Task


@dataclass(frozen=True)
class ModelSize:
    """What a worker holds of one model, whatever its batch and its method are."""

    model_bytes: int
    """What is trained: one replica, and as much again for its gradient."""
    slots: int
    """The vectors of the optimiser's state, each as large as the model."""
    fixed_bytes: int = 0
    """Frozen parameters, and buffers such as BatchNorm's statistics."""

    @property
    def optimiser_bytes(self) -> int:
        return self.slots * self.model_bytes

    @property
    def state_bytes(self) -> int:
        """What lasts from step to step: parameters, optimiser, and what is never trained."""
        return self.model_bytes + self.optimiser_bytes + self.fixed_bytes

    @property
    def worker_bytes(self) -> int:
        """The same with a gradient; without activations and the method's own copies."""
        return self.state_bytes + self.model_bytes


def size_of(module: nn.Module, optimiser: str | Optimiser) -> ModelSize:
    """The size of a module that exists; tied parameters count once."""
    trained = sum(tensor.nbytes for _, tensor in trainable(module))
    everything = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return ModelSize(trained, len(make_optimiser(optimiser).slots), everything - trained)


def model_size(task: Task, optimiser: str | Optimiser | None = None) -> ModelSize:
    """The size of a task's model, with the optimiser of the task unless one is given."""
    with fake_model(task) as module:
        return size_of(module, optimiser or task.optimiser)


@contextmanager
def fake_model(task: Task) -> Generator[nn.Module]:
    """The model of a task, made without memory for its numbers where the model allows that.

    Inside, every tensor that is made is fake: it has a shape and a type and no numbers. A model
    that looks at its numbers while it is made, or reads them from a file, is made for real, and
    tensors inside are real then.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with drawing_from(0, torch.device("cpu")):
        try:
            with mode:
                module = made_model(task)
        except Exception:
            yield made_model(task)
            return
    with mode:
        yield module
