"""What else moves a coupled model: steps of optimisers beside `worker.step()`, and DDP."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.errors import ConfigurationError

T = TypeVar("T")


class StepGuard:
    """From the beginning of a coupled loop to its end no optimiser moves the model but inside
    `worker.step()`, which enters this: the others would not hear of it, or the model would move
    twice."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self._is_open = False
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named}
        self._hook: Any = None

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._is_open = False

    def begin(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._look)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_open:
            return
        if optimizer is self._optimizer:
            raise ConfigurationError(
                "optimizer.step() was called inside `with gossamer.join(...)`: beside worker.step()"
                " the model would move twice, and instead of it no other worker would hear of the"
                " step; leave it out and call worker.step() (worker.step(scaler) for"
                " scaler.step(optimizer))"
            )
        for parameter in _held(optimizer):
            if id(parameter) in self._names:
                raise _second(optimizer, self._names[id(parameter)])


def check_one_optimiser(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """What the optimiser does not hold another one may, whose step was left out like its own:
    nobody would train it."""
    held = {id(parameter) for parameter in _held(optimizer)}
    names = {id(parameter): name for name, parameter in named if id(parameter) not in held}
    if names:
        gc.collect()  # one that nobody can use any more is none
    for other in _instances(torch.optim.Optimizer) if names else ():
        for parameter in _held(other):
            if id(parameter) in names:
                raise _second(other, names[id(parameter)])


def _second(other: torch.optim.Optimizer, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"a second optimiser ({type(other).__name__}) holds the model's parameter {name}, and"
        " worker.step() makes the steps of the joined one only; give all parameters to one"
        " optimiser, in groups, or delete the second if it is not used any more"
    )


def check_not_wrapped(parameters: Sequence[nn.Parameter]) -> None:
    """DistributedDataParallel around the model would couple it a second time. It needs a process
    group, so that without one nobody has to look for it."""
    if not _is_in_a_process_group():
        return
    own = {id(parameter) for parameter in parameters}
    for wrapper in _instances(nn.parallel.DistributedDataParallel):
        if any(id(parameter) in own for parameter in wrapper.parameters()):
            raise ConfigurationError(
                "DistributedDataParallel is wrapped around the joined model and would couple it a"
                " second time; leave it out, and call the model itself"
            )


def check_alone() -> None:
    """A process of a group that no launcher's variables speak of would train alone."""
    if not _is_in_a_process_group():
        return
    size = torch.distributed.get_world_size()
    raise ConfigurationError(
        f"this is one of {size} processes of a torch.distributed group, but no launcher's variables"
        f" say so, and each would train alone; start the script with `gossamer run -n {size}` or"
        " torchrun, and leave mp.spawn and init_process_group out"
    )


def _is_in_a_process_group() -> bool:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def _held(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _instances(kind: type[T]) -> Iterator[T]:
    """Of all objects; their own word for what they are is not asked, which may be code."""
    for found in gc.get_objects():
        if issubclass(type(found), kind):
            yield found
