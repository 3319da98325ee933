"""The steps of a task, timed as `gossamer train` does them, but without a word to anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from gossamer.optim.optimisers import make_optimiser
from gossamer.plan.probe.findings import Inquiry, Steps
from gossamer.real.faults.slow_worker import Slowness
from gossamer.real.replicas import WindowReplica
from gossamer.tasks import make_sampler, make_task
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.keyed import key_of

_WARM_UP = 0.2
"""This part of the time, and at least so many steps, are not counted."""
_WARM_STEPS = 2
_MOST_SAMPLES = 4000
_TELL_S = 0.2


class Stepper:
    """A model, its optimiser and an order of batches: all that a step needs."""

    def __init__(self, inquiry: Inquiry, rank: int, size: int, slowness: Slowness) -> None:
        torch.set_num_threads(inquiry.threads)
        data = None if inquiry.data is None else Path(inquiry.data)
        task = make_task(inquiry.task, data=data)
        self._model = FlatModel(task, torch.device("cpu"), seed=0)
        self._buffers = self._model.initial_buffers.clone()
        optimiser, rate = make_optimiser(inquiry.optimiser), inquiry.learning_rate
        self._replica = WindowReplica(self._model.initial.clone(), optimiser, lambda: rate)
        self._sampler = make_sampler(
            task.train.labels, size, inquiry.batch, "shuffled", 0, synchronous=True
        )
        self._rank = rank
        self._slowness = slowness
        self._done = 0

    def step(self) -> tuple[float, float]:
        """Seconds of the gradient, and seconds of what belongs to a step besides."""
        began = time.perf_counter()
        point = self._replica.snapshot()
        batch = torch.from_numpy(self._sampler.next(self._rank))
        start = time.perf_counter()
        key = key_of(0, self._rank, self._done)
        gradient, _, self._buffers = self._model.gradient(point, self._buffers, batch, key)
        self._slowness.lengthen(time.perf_counter() - start)
        computed = time.perf_counter()
        self._replica.descend_(gradient)
        self._done += 1
        ended = time.perf_counter()
        return computed - start, (start - began) + (ended - computed)


def measure_steps(
    step: Callable[[], tuple[float, float]], seconds: float, on_time: Callable[[float], None]
) -> Steps:
    """For that long, and at least one counted step; `on_time` hears now and then how much passed.

    A step that has begun is not broken off: a model whose steps are longer than the time given
    takes a few of them.
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
    """Evenly chosen, with as many digits as a clock can mean."""
    every = -(-len(samples) // _MOST_SAMPLES)
    return [round(value, 9) for value in samples[::every]]
