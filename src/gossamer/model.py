"""A task's model as pure functions of flat vectors, which is what an engine can batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from gossamer.keyed import with_keyed_dropout
from gossamer.replica import Layout, trainable
from gossamer.tasks import Task


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Generator[None]:
    """What draws from torch's own generator draws from this seed, and the generator is left as it
    was: a library must not reseed its host."""
    generators = torch.cuda.default_generators
    is_cuda = device.type == "cuda"
    generator = generators[device.index or 0] if is_cuda else torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class FlatModel:
    """Parameters, statistics (BatchNorm) and random keys enter; loss and new statistics leave."""

    def __init__(self, task: Task, device: torch.device, *, seed: int) -> None:
        with drawing_from(seed, torch.device("cpu")):
            self.module: nn.Module = task.make_model()
        self._key_names = with_keyed_dropout(self.module)
        self.module.to(device)
        self.task = dataclasses.replace(
            task, train=task.train.to(device), test=task.test.to(device)
        )
        self.device = device
        named = trainable(self.module)
        self.layout = Layout.of(named)
        self.initial = self.layout.pack([tensor for _, tensor in named]).to(device)
        floats = [
            (name, tensor)
            for name, tensor in self.module.named_buffers()
            if tensor.is_floating_point() and name not in self._key_names
        ]
        self.buffer_layout = Layout.of(floats)
        self.initial_buffers = self.buffer_layout.pack([tensor for _, tensor in floats]).to(device)
        self._counters = {
            name: tensor
            for name, tensor in self.module.named_buffers()
            if not tensor.is_floating_point() and name not in self._key_names
        }

    @property
    def has_buffers(self) -> bool:
        return self.buffer_layout.total > 0

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Tensor,
        inputs: Tensor,
        targets: Tensor,
        key: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The training loss of one batch, and the statistics after it."""
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, key)
        statistics = {name: v.clone() for name, v in self.buffer_layout.unpack(buffers).items()}
        state = {**parameters, **statistics, **dict.fromkeys(self._key_names, key)}
        # Counters are advanced in place by BatchNorm: give it copies, nobody needs them.
        state.update({name: tensor.clone() for name, tensor in self._counters.items()})
        output = functional_call(self.module, state, (inputs,))
        packed = self.buffer_layout.pack(statistics.values()) if statistics else buffers
        return self.task.loss(output, targets), packed

    def flat_loss(
        self, flat: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor, key: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same for a flat vector, in the form that `torch.func.grad(has_aux=True)` takes."""
        loss, packed = self.loss(self.layout.unpack(flat), buffers, inputs, targets, key)
        return loss, (loss.detach(), packed)

    def gradient(
        self, flat: Tensor, buffers: Tensor, batch: Tensor, key: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Plain autograd for one worker: the flat gradient, the loss, the statistics after it."""
        # Each parameter gets memory of its own: alignment decides the last bits.
        parameters = {
            name: value.clone().requires_grad_() for name, value in self.layout.unpack(flat).items()
        }
        inputs, targets = self.task.train.inputs[batch], self.task.train.targets[batch]
        # A model with randomness of its own draws from the key too.
        with drawing_from(key, flat.device):
            keyed = torch.tensor(key, device=flat.device)
            loss, packed = self.loss(parameters, buffers, inputs, targets, keyed)
        pieces = torch.autograd.grad(loss, list(parameters.values()))
        return self.layout.pack(pieces), loss.detach(), packed.detach()

    def predict(self, flat: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in evaluation mode; the caller has put the module into it."""
        state = {**self.layout.unpack(flat), **self.buffer_layout.unpack(buffers)}
        return functional_call(self.module, state, (inputs,))
