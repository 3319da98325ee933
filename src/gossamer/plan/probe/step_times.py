"""The times of a task's steps, computed as `gossamer train` does, without communication."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from gossamer.optim.optimisers import make_optimiser
from gossamer.plan.batch_line import other_sizes
from gossamer.plan.probe.findings import Inquiry, Steps
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.replicas import Place, WindowReplica
from gossamer.tasks import make_sampler, make_task
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of

_WARM_UP = 0.2
"""This share of the time, and at least `_WARM_STEPS` steps, are not counted."""
_WARM_STEPS = 2
_MOST_SAMPLES = 4000
_TELL_S = 0.2
_OTHER_SIZES = 0.2
"""The share of the time for each of the other sizes of the batch."""


class Stepper:
    """A model, its optimiser and its batches: everything that a step needs."""

    def __init__(self, inquiry: Inquiry, rank: int, size: int, slowness: Slowness) -> None:
        torch.set_num_threads(inquiry.threads)
        data = None if inquiry.data is None else Path(inquiry.data)
        task = make_task(inquiry.task, data=data)
        self._model = FlatModel(task, torch.device("cpu"), seed=0)
        self._buffers = self._model.initial_buffers.clone()
        optimiser, rate = make_optimiser(inquiry.optimiser), inquiry.learning_rate
        optimiser = optimiser.suited(self._model.layout.shapes)
        place = Place(self._model.initial.clone())
        self._replica = WindowReplica(place, optimiser, lambda pace: rate)
        self.batch = inquiry.batch
        self.other_sizes = other_sizes(self.batch, len(task.train) // size)
        self._samplers = {
            batch: make_sampler(task.train.labels, size, batch, "shuffled", 0, synchronous=True)
            for batch in (self.batch, *self.other_sizes)
        }
        self._rank = rank
        self._slowness = slowness
        self._done = 0

    def step(self, size: int = 0) -> tuple[float, float]:
        """The seconds of the gradient, and the seconds of the rest of the step."""
        began = time.perf_counter()
        point = self._replica.snapshot()
        batch = torch.from_numpy(self._samplers[size or self.batch].next(self._rank))
        start = time.perf_counter()
        key = key_of(0, self._rank, self._done)
        gradient, _, self._buffers = self._model.gradient(point, self._buffers, batch, key)
        self._slowness.lengthen(time.perf_counter() - start)
        computed = time.perf_counter()
        self._replica.descend_(gradient)
        self._done += 1
        ended = time.perf_counter()
        return computed - start, (start - began) + (ended - computed)


def measure_sizes(stepper: Stepper, seconds: float, on_time: Callable[[float], None]) -> Steps:
    """Measure steps of the batch that was asked for, and shorter of the other sizes."""
    shares = [_OTHER_SIZES * seconds] * len(stepper.other_sizes)
    begins = list(accumulate(shares, initial=0.0))
    found = [
        measure_steps(
            partial(stepper.step, size), share, lambda passed, at=at: on_time(at + passed)
        )
        for size, share, at in zip(stepper.other_sizes, shares, begins, strict=False)
    ]
    at = begins[-1]
    own = measure_steps(stepper.step, seconds - at, lambda passed: on_time(at + passed))
    medians = [statistics.median(one.compute) for one in found]
    by_batch = list(zip(stepper.other_sizes, medians, strict=True))
    return dataclasses.replace(own, by_batch=by_batch)


def measure_steps(
    step: Callable[[], tuple[float, float]], seconds: float, on_time: Callable[[float], None]
) -> Steps:
    """Measure steps for this time, at least one; `on_time` is called with the seconds passed.

    A step that has begun is completed, so a model with very long steps takes longer than asked.
    """
    began = told = time.monotonic()
    warm_until, until = began + _WARM_UP * seconds, began + seconds
    for number in range(1 << 30):
        if time.monotonic() >= warm_until and number >= _WARM_STEPS:
            break
        step()
    compute: list[float] = []
    other: list[float] = []
    while not compute or time.monotonic() < until:
        gradient, rest = step()
        compute.append(gradient)
        other.append(rest)
        if (now := time.monotonic()) - told > _TELL_S:
            told = now
            on_time(now - began)
    return Steps(len(compute), _thinned(compute), _thinned(other))


def _thinned(samples: list[float]) -> list[float]:
    """A few thousand samples at most, evenly chosen and rounded to nanoseconds."""
    every = -(-len(samples) // _MOST_SAMPLES)
    return [round(value, 9) for value in samples[::every]]
