"""The models of finished runs, as points of one space that can be mixed and measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.config.settings import loaded_task
from gossamer.errors import ConfigurationError
from gossamer.runs.result import MODEL, Result, read_model
from gossamer.tasks import Task
from gossamer.tasks.data import Data
from gossamer.tasks.evaluator import InParts, judged
from gossamer.tasks.flat_model import FlatModel, blamed_on, drawing_from

Source = Path | str | Result
"""Where models come from: a run folder, a file of weights, or a result."""
_BATCHES = 8
_SEED = 0


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """One trained model."""

    name: str
    value: Tensor
    """Its trained parameters as a flat vector."""
    buffers: Tensor
    """Its BatchNorm statistics."""


class TrainedModels:
    """Trained models of one task."""

    def __init__(self, task: Task, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """`states` hold the models by name, as the task's own model or a `ModuleList` of such
        models would load them."""
        self.task = task
        self.model = FlatModel(task, torch.device("cpu"), seed=_SEED)
        names = {*self.model.layout.names, *self.model.buffer_layout.names}
        split = [_members(name, state, names) for name, state in states.items()]
        own = {name: state for one in split for name, state in one.items()}
        if len(states) == 1 and len(own) > 1:
            own = {f"member {number}": state for number, state in enumerate(own.values())}
        self.members = [self._member(name, state) for name, state in own.items()]
        # What is not trained is of no method's making, so that of one stands for all.
        self.model.module.load_state_dict(dict(next(iter(own.values()))), strict=False)

    @staticmethod
    def of(
        sources: Source | Sequence[Source], *, task: str | Task | None = None,
        data: Path | str | None = None,
    ) -> TrainedModels:  # fmt: skip
        """The models of runs: of an ensemble every member, of any other method its output.

        A folder of several runs stands for all of them. `task` is needed for a file of weights,
        which does not say what it was trained on.
        """
        given = [sources] if isinstance(sources, Path | str | Result) else list(sources)
        states: dict[str, Mapping[str, Tensor]] = {}
        found = None if task is None else loaded_task(task, data)
        for source in given:
            own, state = _read(source, found, data)
            if found is not None and (own.spec or own.name) != (found.spec or found.name):
                raise ConfigurationError(
                    f"models of one task can be put together, got {found.spec or found.name} and, "
                    f"in {_name_of(source)}, {own.spec or own.name}; choose runs of one task"
                )
            found = found or own
            for name, one in state.items():
                states[_free(name, states)] = one
        if found is None or not states:
            raise ConfigurationError("no model was given; name one run folder or more")
        return TrainedModels(found, states)

    def _member(self, name: str, state: Mapping[str, Tensor]) -> TrainedModel:
        model = self.model
        missing = [key for key in (*model.layout.names, *model.buffer_layout.names)
                   if key not in state]  # fmt: skip
        shapes = dict(zip(model.layout.names, model.layout.shapes, strict=True))
        wrong = [key for key, shape in shapes.items()
                 if key in state and state[key].shape != shape]  # fmt: skip
        if missing or wrong:
            raise ConfigurationError(
                f"{name} is no model of {self.task.name}: {(missing or wrong)[0]} is "
                f"{'missing' if missing else 'of another shape'}; choose runs of one task"
            )
        return TrainedModel(
            name,
            model.layout.pack([state[key] for key in model.layout.names]),
            model.buffer_layout.pack([state[key] for key in model.buffer_layout.names]),
        )

    def __len__(self) -> int:
        return len(self.members)

    def statistics(self, value: Tensor) -> Tensor:
        """BatchNorm statistics for a point that nobody has trained."""
        buffers = self.members[0].buffers
        return self.model.recomputed(value, buffers, _BATCHES) if buffers.numel() else buffers

    def score(self, value: Tensor, buffers: Tensor, data: Data) -> tuple[float, float | None]:
        """Loss and metric of one point on this data."""
        with self._evaluating() as answer:
            answers = InParts(data, self.task.test_batch).answers(value, buffers, answer)
            return judged(self.model, answers)

    def ensemble_score(self, data: Data) -> tuple[float, float | None]:
        """Of the mean of all members' predictions; of classes their probabilities are averaged."""
        outputs = torch.stack([self.predictions(one, data) for one in self.members])
        mixed = outputs.softmax(-1).mean(0).log() if self.task.has_accuracy else outputs.mean(0)
        return judged(self.model, [(mixed, data)])

    def predictions(self, member: TrainedModel, data: Data) -> Tensor:
        """What one member makes of the data, in evaluation mode."""
        with self._evaluating() as answer:
            parts = InParts(data, self.task.test_batch)
            output = parts.answers(member.value, member.buffers, answer)[0][0]
        if not isinstance(output, Tensor) or output.shape[:1] != (len(data),):
            raise ConfigurationError(
                f"the models of {self.task.name} return a {type(output).__name__}, and predictions "
                "are put together as tensors with one row for each sample; return such a tensor"
            )
        return output

    def state_dict(self, value: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        return self.model.state_dict(value, buffers)

    def _evaluating(self) -> Any:
        return _Evaluating(self.model, self.task)


class _Evaluating:
    """Around an evaluation: no gradients, no draws from the host's generator."""

    def __init__(self, model: FlatModel, task: Task) -> None:
        self._around = (
            torch.no_grad(), drawing_from(_SEED, model.device), blamed_on(task), model.evaluated()
        )  # fmt: skip

    def __enter__(self) -> Any:
        entered = [one.__enter__() for one in self._around]
        return entered[-1]

    def __exit__(self, *error: Any) -> None:
        for one in reversed(self._around):
            one.__exit__(*error)


def _read(
    source: Source, task: Task | None, data: Path | str | None
) -> tuple[Task, Mapping[str, Mapping[str, Tensor]]]:
    """The task of a source, and what its files hold."""
    if isinstance(source, Result):
        return source.settings.task, {_name_of(source): source.state_dict()}
    path = Path(source)
    if path.is_file():
        if task is None:
            raise ConfigurationError(
                f"{path} does not say what it was trained on; name its task, or a run folder"
            )
        return task, {path.stem: _weights(path)}
    folders = [path] if (path / MODEL).exists() else sorted(one.parent for one in
                                                            path.glob(f"*/{MODEL}"))  # fmt: skip
    if not folders:
        raise ConfigurationError(
            f"{path} has no {MODEL}; give the folder of a run with gradients that has ended"
        )
    states = {folder.name: _weights(folder / MODEL) for folder in folders}
    return task or _task_of(folders[0], data), states


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        return read_model(path)
    except Exception as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); it is no safetensors file"
                                 ) from None  # fmt: skip


def _task_of(folder: Path, data: Path | str | None) -> Task:
    place = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        name = str(config["task"])
    except (OSError, ValueError, KeyError):
        raise ConfigurationError(
            f"{place} does not name the task of the run; name it by --task"
        ) from None
    return loaded_task(name, data or config.get("data"))


def _members(
    name: str, state: Mapping[str, Tensor], names: set[str]
) -> dict[str, Mapping[str, Tensor]]:
    """An ensemble's file holds its members as a `ModuleList` would name them."""
    if not state:
        raise ConfigurationError(f"{name} holds no model, because nobody was alive at its end")
    numbers = {key.partition(".")[0] for key in state}
    if names <= state.keys() or not all(number.isdecimal() for number in numbers):
        return {name: state}
    return {
        f"{name}/{number}": {
            key.partition(".")[2]: tensor for key, tensor in state.items()
            if key.partition(".")[0] == number
        }
        for number in sorted(numbers, key=int)
    }  # fmt: skip


def _name_of(source: Source) -> str:
    if isinstance(source, Result):
        return f"{source.summary.get('method')} seed {source.summary.get('seed')}"
    return str(source)


def _free(name: str, taken: Mapping[str, object]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free
