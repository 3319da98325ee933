"""The loss along the straight line between two models (Goodfellow et al. 2015).

Where it stays as low as at the ends, the models are linearly connected (Frankle et al. 2020), and
averaging their weights gives a model that is as good as they are; a barrier between them says that
it ruins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.settings import loaded_task, make_settings
from gossamer.consolidate.models import Source, TrainedModel, TrainedModels
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.sim.simulation import Simulation, simulate
from gossamer.specs import check_range
from gossamer.tasks import Task

POINTS = 11
_ALLOWED = 0.02
"""A barrier below this share of the loss at the ends is not distinguished from none."""


@dataclass(frozen=True)
class ModelPath:
    """What the models on one line are worth, from one end to the other."""

    ends: tuple[str, str]
    losses: tuple[float, ...]
    scores: tuple[float, ...]
    """The task's metric; of a task without one, the losses again."""
    distance: float
    """Between the ends, over the length of their mean."""

    @property
    def barrier(self) -> float:
        """How far the loss rises above the line between the losses of the ends; 0 if nowhere."""
        last = len(self.losses) - 1
        first, end = self.losses[0], self.losses[-1]
        return max(
            loss - ((last - place) * first + place * end) / last
            for place, loss in enumerate(self.losses)
        )

    @property
    def may_be_averaged(self) -> bool:
        """Whether the middle of the line is no worse than its ends are on average."""
        ends = (self.losses[0] + self.losses[-1]) / 2
        return self.losses[len(self.losses) // 2] <= (1 + _ALLOWED) * ends

    def as_dict(self) -> dict[str, Any]:
        return {
            "ends": list(self.ends), "losses": list(self.losses), "scores": list(self.scores),
            "distance": self.distance, "barrier": self.barrier,
            "may_be_averaged": self.may_be_averaged,
        }  # fmt: skip


def paths_between(models: TrainedModels, points: int = POINTS) -> list[ModelPath]:
    """The lines from each model to the next one, at so many equidistant points, on the test set.

    BatchNorm statistics are recomputed at every point between the ends.
    """
    check_range("points", points, 3)
    if points % 2 == 0:
        raise ConfigurationError(
            f"points must be odd, got {points}: the mean of two models is the middle of their line"
        )
    if len(models) < 2:
        raise ConfigurationError(
            f"a line needs two models, got {len(models)}; name more runs, or one of `ensemble`, "
            "whose folder has every member"
        )
    return [_path(models, *pair, points) for pair in pairwise(models.members)]


def paths_of_runs(
    sources: Source | Sequence[Source], *, points: int = POINTS, task: str | Task | None = None,
    data: Path | str | None = None,
) -> list[ModelPath]:  # fmt: skip
    """The lines between the models of runs, or between the members of an ensemble."""
    return paths_between(TrainedModels.of(sources, task=task, data=data), points)


def paths_between_workers(
    task: str | Task, method: str | MethodSpec, cluster: str | Cluster = "equal-8", *,
    points: int = POINTS, workers: int | None = None, **choices: Any,
) -> list[ModelPath]:  # fmt: skip
    """The lines between the workers' own models at the end of a simulated run; `choices` are those
    of `simulate`."""
    place = load_cluster(cluster).changed(workers=workers)
    choices.setdefault("evaluations", 1)
    settings = make_settings(task, method, place, **choices)
    simulation = Simulation(settings)
    simulation.run()
    held, model = simulation.held(), simulation.model
    states = {
        f"worker {rank}": model.state_dict(value / weight, buffers)
        for rank, (value, weight, buffers) in enumerate(
            zip(held.workers, held.weights, held.buffers, strict=True)
        )
    }
    return paths_between(TrainedModels(settings.task, states), points)


def paths_between_strangers(
    task: str | Task, cluster: str | Cluster = "equal-8", *, workers: int = 4, seed: int = 0,
    points: int = POINTS, epochs: float | None = None, **choices: Any,
) -> list[ModelPath]:  # fmt: skip
    """The lines between models that each began at initial weights of its own, with as many samples
    as each worker of an ensemble of so many sees."""
    made = loaded_task(task)
    each = (made.epochs if epochs is None else epochs) / workers
    one = load_cluster(cluster).changed(workers=1)
    runs = [
        simulate(made, "ensemble", one, seed=seed + n, epochs=each, evaluations=1, **choices)
        for n in range(workers)
    ]
    return paths_of_runs(runs, points=points)


def _path(models: TrainedModels, first: TrainedModel, last: TrainedModel, points: int) -> ModelPath:
    data, losses, scores = models.task.test, list[float](), list[float]()
    for place in torch.linspace(0.0, 1.0, points).tolist():
        end = first if place == 0.0 else last if place == 1.0 else None
        value = torch.lerp(first.value, last.value, place) if end is None else end.value
        buffers = models.statistics(value) if end is None else end.buffers
        loss, score = models.score(value, buffers, data)
        losses.append(loss)
        scores.append(loss if score is None else score)
    middle = (first.value + last.value) / 2
    apart = float((first.value - last.value).norm() / middle.norm().clamp_min(1e-30))
    return ModelPath((first.name, last.name), tuple(losses), tuple(scores), apart)
