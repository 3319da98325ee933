"""A task that a user brings: a `Task`, or a function that makes one; tried before it is used."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gossamer.errors import ConfigurationError
from gossamer.own_code import blamed, place_of
from gossamer.specs import bind_own
from gossamer.tasks.data import Data
from gossamer.tasks.evaluator import judged
from gossamer.tasks.flat_model import FlatModel, blamed_on, untrained
from gossamer.tasks.task import NAMELESS, Task

_TRIED = 2
"""Samples of the trial: enough for a BatchNorm."""


def own_task(
    found: object, name: str, given: Mapping[str, str], data: Path | None, spec: str
) -> Task:
    """The task that a user's object is or makes, with these options."""
    task = _made(found, name, given, data)
    place = place_of(found) or task.place or name
    own = name.rpartition(":")[2]
    known = {key: own for key in ("name", "title") if getattr(task, key) == NAMELESS}
    task = dataclasses.replace(task, place=place, **known).named(spec, data and data.resolve())
    try_out(task)
    return task


def _made(found: object, name: str, given: Mapping[str, str], data: Path | None) -> Task:
    if isinstance(found, Task):
        if given or data is not None:
            got = next(iter(given), "--data")
            raise ConfigurationError(
                f"task {name} is a Task and takes no options, got {got!r}; make it a function that "
                "returns one"
            )
        return found
    if not callable(found):
        raise ConfigurationError(
            f"{name} is {_kind(found)}, expected a Task or a function that returns one; make one "
            "by gossamer.Task.of(model, loss, train, test)"
        )
    make: Callable[..., object] = found
    options = bind_own("task", name, make, _with_data(make, name, given, data))
    where = place_of(make)
    with blamed(f"task {name}"):
        made = make(**options)
    if not isinstance(made, Task):
        raise ConfigurationError(
            f"{name} ({where}) returns {_kind(made)}, expected a Task; return "
            "gossamer.Task.of(model, loss, train, test)"
        )
    return made


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


def _with_data(
    make: Callable[..., object], name: str, given: Mapping[str, str], data: Path | None
) -> dict[str, Any]:
    """--data is the parameter of that name."""
    if data is None:
        return dict(given)
    if "data" not in inspect.signature(make).parameters:
        raise ConfigurationError(
            f"task {name} brings its own data, got --data {data}; leave it out, or give the "
            "function a parameter data"
        )
    return {**given, "data": str(data)}


def try_out(task: Task) -> None:
    """Send two samples through the model, the loss and the metric: what does not fit is said
    before a run begins."""
    model = FlatModel(task, torch.device("cpu"), seed=0)
    with blamed_on(task):
        _check_arguments(task, model.module)
        numbers = torch.arange(min(_TRIED, len(task.train)))
        gradient, loss, _ = model.gradient(model.initial, model.initial_buffers, numbers, 0)
    if not gradient.any() and not loss.isnan():
        raise untrained(task)
    few = task.test.first(_TRIED)
    with torch.no_grad(), blamed_on(task):
        model.module.eval()
        output = model.predict(model.initial, model.initial_buffers, few.inputs, few.targets)
        judged(model, [(output, few)])


def _check_arguments(task: Task, module: nn.Module) -> None:
    """Inputs by name must be parameters of the model."""
    data = task.train
    names = [*(cast(Mapping[str, Any], data.inputs) if isinstance(data.inputs, Mapping) else ())]
    names += [data.labels_as] if data.labels_as else []
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"the model of task {task.name} ({place_of(type(module)) or task.place}) takes "
                f"{', '.join(known)}, and the task gives it {name!r}; " + _advice(name, data)
            )


def _advice(name: str, data: Data) -> str:
    if name == data.labels_as:
        return "give Task.of a loss, or the model a parameter labels from which it computes one"
    return f"give the model a parameter {name}, or name the inputs that it takes by inputs=(...)"
