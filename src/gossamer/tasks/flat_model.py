"""A task's model as pure functions of flat vectors, which is what an engine can batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import Optimiser, make_optimiser
from gossamer.own_code import blamed
from gossamer.precision import autocasting
from gossamer.replica import Layout, trainable
from gossamer.tasks.calibration import layers_with_statistics, predicting, recompute_
from gossamer.tasks.data import Data, Tensors, arguments, mapped
from gossamer.tasks.keyed import KeyedFunctions, fold, key_of, with_keyed_dropout
from gossamer.tasks.metric import scores_in
from gossamer.tasks.task import Task, imitation_loss
from gossamer.worker import Lesson

_SAMPLES = 128
"""In each batch on which statistics are recomputed, whatever a worker's batch is: what a model
makes of data at evaluation is nearer to what it makes of large batches."""


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

    def __init__(
        self, task: Task, device: torch.device, *, seed: int, precision: str = "fp32",
        microbatches: int = 1,
    ) -> None:  # fmt: skip
        """A gradient is the mean over so many equal parts of the batch, one after the other; so
        statistics are those of a part, and each part has randomness of its own."""
        self.microbatches = microbatches
        with drawing_from(seed, torch.device("cpu")), blamed_on(task):
            self.module: nn.Module = made_model(task)
        self.key_names = with_keyed_dropout(self.module)
        self._has_keyed_functions = True
        """Until the first pass shows that the model asks no function for dropout."""
        self.module.to(device)
        self.task = dataclasses.replace(
            task, train=task.train.to(device), test=task.test.to(device)
        )
        self.device = device
        self.precision = precision
        """The precision of gradients; models are evaluated with the bits of their parameters."""
        named = trainable(self.module)
        self.layout = Layout.of(named)
        self.initial = self.layout.pack([tensor for _, tensor in named]).to(device)
        floats = [
            (name, tensor)
            for name, tensor in self.module.named_buffers()
            if tensor.is_floating_point() and name not in self.key_names
        ]
        self.buffer_layout = Layout.of(floats)
        self.initial_buffers = self.buffer_layout.pack([tensor for _, tensor in floats]).to(device)
        self._counters = {
            name: tensor
            for name, tensor in self.module.named_buffers()
            if not tensor.is_floating_point() and name not in self.key_names
        }

    @property
    def has_buffers(self) -> bool:
        return self.buffer_layout.total > 0

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Tensor,
        inputs: Tensors,
        targets: Tensors,
        key: Tensor,
        lesson: Lesson | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The training loss of one batch, and the statistics after it."""
        losses: list[Tensor] = []
        for part, wanted, own_key in self._parts_of(inputs, targets, key):
            loss, buffers = self._part_loss(parameters, buffers, part, wanted, own_key, lesson)
            losses.append(loss)
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(), buffers

    def _parts_of(
        self, inputs: Tensors, targets: Tensors, key: Tensor
    ) -> Iterator[tuple[Tensors, Tensors, Tensor]]:
        """The micro-batches of a batch, and what each draws from."""
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, key)
        if self.microbatches == 1:
            yield inputs, targets, key
            return
        for number in range(self.microbatches):

            def part(whole: Tensor, number: int = number) -> Tensor:
                return whole.chunk(self.microbatches)[number]

            yield mapped(inputs, part), mapped(targets, part), fold(key, number)

    def _part_loss(
        self, parameters: Mapping[str, Tensor], buffers: Tensor, inputs: Tensors,
        targets: Tensors, key: Tensor, lesson: Lesson | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        statistics = {name: v.clone() for name, v in self.buffer_layout.unpack(buffers).items()}
        state = {**parameters, **statistics, **dict.fromkeys(self.key_names, key)}
        # Counters are advanced in place by BatchNorm: give it copies, nobody needs them.
        state.update({name: tensor.clone() for name, tensor in self._counters.items()})
        functions = KeyedFunctions(key)
        with (
            autocasting(self.precision, self.device),
            functions if self._has_keyed_functions else nullcontext(),
        ):
            output = self._call(state, inputs, targets)
            loss = checked_loss(self.task, output, targets)
            if lesson is not None:
                loss = loss + lesson.weight * self._imitation(
                    output, lesson, buffers, inputs, targets, key
                )
        self._has_keyed_functions = functions.calls > 0
        packed = self.buffer_layout.pack(statistics.values()) if statistics else buffers
        return loss.to(torch.promote_types(loss.dtype, torch.float32)), packed

    def _imitation(
        self, output: Any, lesson: Lesson, buffers: Tensor, inputs: Tensors, targets: Tensors,
        key: Tensor,
    ) -> Tensor:  # fmt: skip
        """How far the output is from what the teachers predict for the same inputs."""
        predictions: list[Tensor] = []
        with predicting(self.module):
            for teacher in lesson.teachers:
                state = {**self._values(teacher, buffers.clone()), **dict.fromkeys(
                    self.key_names, key)}  # fmt: skip
                state.update({name: tensor.clone() for name, tensor in self._counters.items()})
                predictions.append(scores_in(self._call(state, inputs, targets)))
        scores = scores_in(output)
        if not isinstance(scores, Tensor):
            raise ConfigurationError(
                f"the model of task {self.task.name} returns a {type(scores).__name__}, and workers"
                " learn from each other's predictions as tensors; return a tensor"
            )
        return imitation_loss(scores, predictions, are_classes=self.task.has_accuracy)

    def _call(self, state: Mapping[str, Tensor], inputs: Tensors, targets: Tensors) -> Any:
        given, named = arguments(inputs, targets, self.task.train.labels_as)
        return functional_call(self.module, dict(state), given, named)

    def flat_loss(
        self, flat: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors, key: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same for a flat vector, in the form that `torch.func.grad(has_aux=True)` takes."""
        own, lesson = Lesson.apart(flat, self.layout.total)
        loss, packed = self.loss(self.layout.unpack(own), buffers, inputs, targets, key, lesson)
        return loss, (loss.detach(), packed)

    def gradient(
        self, flat: Tensor, buffers: Tensor, batch: Tensor, key: int,
        lesson: Lesson | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Plain autograd for one worker: the flat gradient, the loss, the statistics after it. A
        lesson is given by itself, or beside the point."""
        flat, beside = Lesson.apart(flat, self.layout.total)
        lesson = lesson or beside
        # Each parameter gets memory of its own: alignment decides the last bits.
        parameters = {
            name: value.clone().requires_grad_() for name, value in self.layout.unpack(flat).items()
        }
        keyed = torch.tensor(key, device=flat.device)
        inputs, targets = self.task.train.at(batch, keyed)
        # A model with randomness of its own draws from the key too.
        with drawing_from(key, flat.device), blamed_on(self.task):
            total, losses = torch.zeros(0), list[Tensor]()
            for part, wanted, own_key in self._parts_of(inputs, targets, keyed):
                loss, buffers = self._part_loss(parameters, buffers, part, wanted, own_key, lesson)
                if not loss.requires_grad:
                    raise untrained(self.task)
                # A parameter that the loss does not depend on stays where it is.
                pieces = torch.autograd.grad(
                    loss, list(parameters.values()), allow_unused=True, materialize_grads=True
                )
                packed = self.layout.pack(pieces)
                total = total + packed if losses else packed
                losses.append(loss.detach())
        count = len(losses)
        if count == 1:
            return total, losses[0], buffers.detach()
        return total / count, torch.stack(losses).mean(), buffers.detach()

    def predict(self, flat: Tensor, buffers: Tensor, inputs: Tensors, targets: Tensors) -> Any:
        """Outputs in evaluation mode; the caller has put the module into it."""
        return self._call(self._values(flat, buffers), inputs, targets)

    @contextmanager
    def evaluated(self) -> Generator[Callable[[Tensor, Tensor, Data], Any]]:
        """Give a function that says what the module makes of data with these parameters and
        statistics, in evaluation mode.

        The module's own tensors become views of the values: `functional_call` would take longer
        than the forward pass of a small model. In the end they are what they were.
        """
        named = _named(self.module)
        own = [named[name] for name in (*self.layout.names, *self.buffer_layout.names)]
        before = [tensor.data for tensor in own]

        def hold(values: Iterable[Tensor]) -> None:
            for tensor, value in zip(own, values, strict=True):
                tensor.data = value

        def answer(flat: Tensor, buffers: Tensor, data: Data) -> Any:
            hold(self._values(flat, buffers).values())
            return data.call(self.module)

        self.module.eval()
        try:
            yield answer
        finally:
            hold(before)
            self.module.train()

    def state_dict(self, flat: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The model with these values, by the names of the task's own; parameters are views."""
        values, own = self._values(flat, buffers), _named(self.module)
        known = {id(own[name]): value for name, value in values.items()}
        kept = self.module.state_dict(keep_vars=True).items()  # a tied parameter has several names
        return {
            name: known[id(tensor)] if id(tensor) in known else tensor.detach().clone()
            for name, tensor in kept
        }

    def recomputed(self, flat: Tensor, buffers: Tensor, batches: int) -> Tensor:
        """BatchNorm's statistics for these parameters: the mean over so many batches of training
        data of each batch's own. Other buffers stay as they are."""
        module = copy.deepcopy(self.module)
        own = _named(module)
        for name, value in self._values(flat, buffers).items():
            own[name].detach().copy_(value)
        recompute_(layers_with_statistics(module), self._passes(module.train(), batches))
        return self.buffer_layout.pack([own[name] for name in self.buffer_layout.names])

    def _values(self, flat: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        return {**self.layout.unpack(flat), **self.buffer_layout.unpack(buffers)}

    def _passes(self, module: nn.Module, batches: int) -> Iterator[Callable[[], object]]:
        """Over the same training data every time, as a worker would see them."""
        train = self.task.train
        size = min(_SAMPLES, len(train))
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        for number, batch in enumerate(order.split(size)[: min(batches, len(train) // size)]):
            key = torch.tensor(key_of(0, 0, number), device=self.device)
            for name in self.key_names:
                module.get_buffer(name).copy_(key)
            inputs, targets = train.at(batch.to(self.device), key)
            if self.task.augment is not None:
                inputs = self.task.augment(inputs, key)
            yield partial(Data(inputs, targets, train.labels_as).call, module)


def blamed_on(task: Task) -> AbstractContextManager[None]:
    """Around what a user's task does: its errors name the line that they came from."""
    what = f"task {task.name} ({task.place})"
    return blamed(what) if task.place else nullcontext()


def made_model(task: Task) -> nn.Module:
    """A new model of a task."""
    model: Any = cast(Any, task.make_model)()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"task {task.name} ({task.place}) makes a {type(model).__name__}, expected a "
            "torch.nn.Module; return one from the function that makes the model"
        )
    if not trainable(model):
        raise ConfigurationError(
            f"the model of task {task.name} ({task.place}) has no parameter to train; give it one "
            "with requires_grad"
        )
    return model


def untrained(task: Task) -> ConfigurationError:
    """What is wrong with a loss that moves no parameter."""
    return ConfigurationError(
        f"the loss of task {task.name} ({task.place}) does not depend on the model: its gradient "
        "is 0 everywhere; compute the loss from the model's output, without detach"
    )


def checked_loss(task: Task, output: Any, targets: Tensors, *, judges: bool = False) -> Tensor:
    """The loss of training, or the one by which a model is judged. It must be one number: a sum or
    a mean is the user's to choose."""
    own = task.loss if judges or task.training_loss is None else task.training_loss
    loss: Any = cast(Any, own)(output, targets)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise ConfigurationError(
        f"the loss of task {task.name} ({task.place}) must be one number, got {got}; take its "
        "mean over the batch"
    )


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# ---------------------------------------------------------------------- sizes


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
