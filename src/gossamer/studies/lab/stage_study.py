"""Whether a pipeline's stages fail where their ages say: predicted edges beside measured losses.

All runs are rows of one matrix and share their batches. A row is a pipeline that is never emptied,
with a learning rate; or one stage of it that trains alone, with the age that it has there, while
the other stages keep the values with which they began. The alone rows test the edge of each stage,
the others that of all together. All begin with a model that has been trained a little without
delay, because the curvature of an untrained one says little of what is to come.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.config.settings import stage_cut_of
from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import Sgd, make_optimiser
from gossamer.pipeline.shape import ASYNCHRONOUS, ReplicaShape
from gossamer.pipeline.stages import StageCut
from gossamer.sim.engine import VectorEngine
from gossamer.specs import check_range
from gossamer.studies.lab.stage_edges import StageCurvature, held_by, stage_curvature
from gossamer.tasks import Order, Task
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of

PIPELINES = ("gpipe", "2bw", "pipedream", "vertical_sync")
_BELOW, _ABOVE = 9, 6
"""Rates below and above each edge, three to a factor of two."""
_LAST = 10
"""The loss of a run is the mean over this part of its steps, the last."""
_RISEN = 1.5
_ROWS = 64


class StageRun(NamedTuple):
    """The training loss of one run; not finite where it diverged."""

    loss: float
    """At the end."""
    highest: float
    """Of any step."""


@dataclass(frozen=True)
class StageLine:
    """Losses over learning rates: of a pipeline, or of one stage of it that trains alone."""

    pipeline: str
    stage: int | None
    delays: tuple[int, ...]
    edge: float
    runs: dict[float, StageRun]
    """By learning rate."""

    @property
    def label(self) -> str:
        return self.pipeline if self.stage is None else f"stage {self.stage} alone"

    def trains_to(self, still: StageRun) -> float | None:
        """The largest rate up to which every run ends below a model that stands still."""
        return self._up_to(lambda run: run.loss < still.loss)

    def is_calm_to(self, still: StageRun) -> float | None:
        """The largest rate up to which no run rises half above what batches alone make of it."""
        return self._up_to(lambda run: run.highest < _RISEN * still.highest)

    def _up_to(self, is_good: Callable[[StageRun], bool]) -> float | None:
        good = itertools.takewhile(lambda item: is_good(item[1]), sorted(self.runs.items()))
        return max((rate for rate, _ in good), default=None)


@dataclass(frozen=True)
class StageStudy:
    """What is asked: a task, so many stages, and the pipelines that train it."""

    task: Task
    stages: int
    pipelines: tuple[str, ...] = PIPELINES
    optimiser: str = "sgd"
    batch: int = 256
    steps: int = 300
    seed: int = 0
    warmup: int = 300
    """Steps without delay before, at the middle one of the task's own rates."""

    def __post_init__(self) -> None:
        check_range("stages", self.stages, 2)
        check_range("batch", self.batch, 1)
        check_range("steps", self.steps, _LAST)
        check_range("warmup", self.warmup, 0)
        chosen = make_optimiser(self.optimiser)
        if not isinstance(chosen, Sgd) or chosen.nesterov or chosen.dampening:
            raise ConfigurationError(
                f"the edges are those of SGD with plain momentum, got {self.optimiser}; choose sgd "
                "or sgd:momentum=0.9"
            )
        for name in self.pipelines:
            if self.shape_of(name).has_split_points:
                raise ConfigurationError(
                    f"{name} has backward passes at other weights than its forward passes, and no "
                    f"edge is known for it; choose among {', '.join(PIPELINES)}"
                )
        if not self.pipelines:
            raise ConfigurationError(f"no pipeline is named; choose among {', '.join(PIPELINES)}")
        self.cut()

    def cut(self) -> StageCut:
        """Refuses a model that cannot be cut."""
        return stage_cut_of(self.task, self.stages)

    @property
    def momentum(self) -> float:
        chosen = make_optimiser(self.optimiser)
        assert isinstance(chosen, Sgd)
        return chosen.momentum

    @property
    def warmup_rate(self) -> float:
        rates = sorted(self.task.learning_rates)
        return rates[len(rates) // 2]

    def shape_of(self, pipeline: str) -> ReplicaShape:
        return ReplicaShape(stages=self.stages, pipeline=pipeline)

    @property
    def alone(self) -> str:
        """The pipeline whose stages train alone, too."""
        late = [name for name in self.pipelines if name in ASYNCHRONOUS]
        return "pipedream" if "pipedream" in late or not late else late[0]


@dataclass(frozen=True)
class StageFindings:
    """What came out."""

    study: StageStudy
    cut: StageCut
    curvature: StageCurvature
    still: StageRun
    """A run at rate 0, by the same batches."""
    lines: tuple[StageLine, ...]

    @property
    def whole(self) -> list[StageLine]:
        return [line for line in self.lines if line.stage is None]

    @property
    def single(self) -> list[StageLine]:
        return [line for line in self.lines if line.stage is not None]

    def as_dict(self) -> dict[str, Any]:
        study = self.study
        return {
            "task": study.task.name, "stages": study.stages, "optimiser": study.optimiser,
            "batch": study.batch, "steps": study.steps, "seed": study.seed,
            "still": self.still._asdict(),
            "cut": [[part.name for part in chunk] for chunk in self.cut.chunks],
            "curvature": self.curvature.largest,
            "curvature_by_stage": list(self.curvature.by_stage),
            "lines": [
                {
                    "pipeline": line.pipeline, "stage": line.stage, "delays": list(line.delays),
                    "predicted_edge": line.edge, "trains_to": line.trains_to(self.still),
                    "is_calm_to": line.is_calm_to(self.still),
                    "runs": [
                        {"learning_rate": rate, "loss": _finite(run.loss),
                         "highest": _finite(run.highest)}
                        for rate, run in sorted(line.runs.items())
                    ],
                }
                for line in self.lines
            ],
        }  # fmt: skip


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def run_stage_study(study: StageStudy, tell: Callable[[int, int], None]) -> StageFindings:
    """Train a little, measure the curvature, predict the edges, and train on; `tell` hears the
    steps made and all."""
    model = FlatModel(study.task, torch.device("cpu"), seed=study.seed)
    cut = study.cut()
    still = (0,) * study.stages
    trainer = StageTrainer(study, model, cut, lambda step: tell(step, study.warmup + study.steps))
    trainer.train([StageRow(still, study.warmup_rate, None)], study.warmup)
    curvature = stage_curvature(model, cut, trainer.start)
    if curvature is None or min(curvature.by_stage) <= 0.0:
        raise ConfigurationError(
            f"{study.task.name}: no edge is known, because a layer of its model cannot be "
            "differentiated twice or a stage has no curvature; choose another task"
        )
    planned = _planned(study, curvature)
    held = [held_by(model, cut, stage) for stage in range(study.stages)]
    rows = [
        StageRow(delays, rate, None if stage is None else held[stage])
        for _, stage, delays, edge in planned
        for rate in _around(edge)
    ]
    still_run, *others = trainer.train([StageRow(still, 0.0, None), *rows], study.steps)
    runs = iter(others)
    lines = tuple(
        StageLine(pipeline, stage, delays, edge, {rate: next(runs) for rate in _around(edge)})
        for pipeline, stage, delays, edge in planned
    )
    return StageFindings(study, cut, curvature, still_run, lines)


Planned = list[tuple[str, int | None, tuple[int, ...], float]]


def _planned(study: StageStudy, curvature: StageCurvature) -> Planned:
    momentum = study.momentum
    found: Planned = []
    for name in study.pipelines:
        delays = study.shape_of(name).lags()
        found.append((name, None, delays, curvature.together(delays, momentum)))
    delays = study.shape_of(study.alone).lags()
    for stage, delay in enumerate(delays):
        found.append((study.alone, stage, delays, curvature.alone(stage, delay, momentum)))
    return found


def _around(edge: float) -> list[float]:
    return [float(f"{edge * 2 ** (place / 3):.6g}") for place in range(-_BELOW, _ABOVE + 1)]


@dataclass(frozen=True)
class StageRow:
    """One run: the age of each stage, the rate, and which parameters it trains (None: all)."""

    delays: tuple[int, ...]
    rate: float
    held: Tensor | None


class StageTrainer:
    """Trains rows together, by the same batches; the next rows begin where one row has ended."""

    def __init__(
        self, study: StageStudy, model: FlatModel, cut: StageCut, tell: Callable[[int], None]
    ) -> None:
        self._study, self._cut, self._tell = study, cut, tell
        self._order = Order(len(model.task.train), study.seed, study.batch)
        self._engine = VectorEngine(model, most_rows=_ROWS, trace_after=0)
        self._steps = 0
        self.start, self._buffers = model.initial, model.initial_buffers

    def train(self, rows: Sequence[StageRow], steps: int) -> list[StageRun]:
        study = self._study
        parameters = self.start.repeat(len(rows), 1)
        buffers = self._buffers.repeat(len(rows), 1)
        ones = torch.ones_like(self.start)
        held = torch.stack([ones if row.held is None else row.held for row in rows])
        rates = torch.tensor([[row.rate] for row in rows]).to(parameters)
        velocity = torch.zeros_like(parameters)
        past: deque[Tensor] = deque(maxlen=1 + max(lag for row in rows for lag in row.delays))
        losses: list[Tensor] = []
        for _ in range(steps):
            past.append(parameters)
            batch = torch.from_numpy(self._order.next_batch()).repeat(len(rows), 1)
            keys = torch.tensor([key_of(study.seed, 0, self._steps)] * len(rows))
            point = _points(past, self._cut, rows)
            found = self._engine.evaluate(point, buffers, batch, keys)
            buffers = found.buffers
            losses.append(found.losses)
            velocity = study.momentum * velocity + found.gradients * held
            parameters = parameters - rates * velocity
            self._steps += 1
            self._tell(self._steps)
        if len(rows) == 1:
            self.start, self._buffers = parameters[0], buffers[0]
        if not losses:
            return []
        curves = torch.stack(losses).nan_to_num(math.inf)
        ends = curves[-max(1, steps // _LAST) :].mean(0)
        found = zip(ends.tolist(), curves.amax(0).tolist(), strict=True)
        return [StageRun(loss, highest) for loss, highest in found]


def _points(past: deque[Tensor], cut: StageCut, rows: Sequence[StageRow]) -> Tensor:
    """Where the gradients of a step are taken; before the first step nothing has changed."""
    point = past[-1].clone()
    for stage in range(len(cut.chunks)):
        for lag in {row.delays[stage] for row in rows} - {0}:
            mine = torch.tensor([row.delays[stage] == lag for row in rows])
            old = past[max(0, len(past) - 1 - lag)]
            for part in cut.slices(stage):
                point[mine, part] = old[mine, part]
    return point
