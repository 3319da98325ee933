"""Runs that no simulation made: each method's curve is given by how fast it learns and computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gossamer.config.settings import Settings
from gossamer.errors import Error, Stalled
from gossamer.plan.advise.search_run import Run, SearchFailure, SearchRun
from gossamer.runs.result import Result, Row

POINTS = 50
Stop = Callable[[Row], bool]


def one_by_one(run: Callable[[Settings, Stop, str | None], Result]) -> Run:
    """Make the runs of a search one after the other."""

    def runs(asked: Iterable[SearchRun]) -> Iterator[Result | SearchFailure]:
        for one in asked:
            try:
                answer = run(one.settings, one.rule.stop(), one.name)
            except Error as error:
                yield SearchFailure(error, [])
            else:
                yield answer

    return runs


def several_at_a_time(run: Callable[[Settings, Stop, str | None], Result]) -> Run:
    """Begin all runs of a stage before the first of them has told anything."""

    def runs(asked: Iterable[SearchRun]) -> Iterator[Result | SearchFailure]:
        return one_by_one(run)(list(asked))

    return runs


class MadeUp:
    """`learning`: accuracy is 1 - 1 / (1 + learning x epochs); `pace`: epochs a second."""

    def __init__(
        self, methods: Mapping[str, tuple[float, float]], fails: str = "", best: float = 0.1
    ) -> None:  # fmt: skip
        self.methods = methods
        self.best = best
        self.fails = fails
        self.runs: list[tuple[str, float, int, int, str | None]] = []
        """Method, rate, seed, workers and name of each run."""
        self.evaluations = 0

    def __call__(self, settings: Settings, stop: Stop, name: str | None) -> Result:
        label, rate = str(settings.method), settings.learning_rate or 0.0
        self.runs.append((label, rate, settings.seed, settings.cluster.workers, name))
        if label == self.fails:
            raise Stalled("nobody can go on")
        learning, pace = self.methods[label]
        # A rate other than the best is a worse one, and every seed a little different.
        learning *= (1.0 if rate == self.best else 0.5) * (1 + 0.02 * (settings.seed % 5))
        history: list[dict[str, Any]] = []
        for at in range(POINTS + 1):
            epochs = (settings.epochs or 1.0) * at / POINTS
            history.append(self._row(epochs, learning, pace, settings))
            self.evaluations += 1
            if stop(history[-1]):
                break
        summary = {**history[-1], "bytes_per_step": 1e4, "waiting_by_cause": {"gradient": 1.0}}
        return Result(settings, summary, history, torch.zeros(1))

    def _row(self, epochs: float, learning: float, pace: float, settings: Settings) -> Any:
        workers, seconds = settings.cluster.workers, epochs / pace
        return {
            "virtual_seconds": seconds,
            "epochs": epochs,
            "samples": round(epochs * len(settings.task.train)),
            "accuracy": 1 - 1 / (1 + learning * epochs),
            "loss": 1 / (1 + learning * epochs),
            "mean_staleness": 0.0,
            "consensus_distance": 0.0,
            "computing_seconds": [0.9 * seconds] * workers,
            "waiting_seconds": [0.1 * seconds] * workers,
        }
