"""Gradients that arrive late, in any training loop: an optimiser around an optimiser.

An asynchronous server applies gradients that were computed some updates ago. `DelayedOptimizer`
does the same to a loop with one worker, without a cluster: step t applies the gradient of step
t - d, and the first d steps apply nothing (Jain, Srinivasan and Barekatain 2018). The delay is a
number, a distribution, or the staleness histogram of a recorded run.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.optim.wrapped_optimiser import WrappedOptimizer
from gossamer.specs import bind, check_range, parse_spec

Delay = int | str | Mapping[int, int] | Mapping[str, int]
"""Steps, a spec such as "normal:mean=7,deviation=1.4", or counts by staleness."""
Draw = Callable[[random.Random], int]


def uniform(*, low: int = 0, high: int = 8) -> Draw:
    """Every whole number from low to high, both included, equally often."""
    check_range("uniform: low", low, 0)
    if high < low:
        raise ConfigurationError(
            f"uniform: high must not be below low, got low={low}, high={high}; swap them"
        )
    return lambda rng: rng.randint(low, high)


def normal(*, mean: float = 7.0, deviation: float = 1.4) -> Draw:
    """Rounded to whole steps; a negative number counts as no delay."""
    check_range("normal: mean", mean, 0.0)
    check_range("normal: deviation", deviation, 0.0)
    return lambda rng: max(0, round(rng.gauss(mean, deviation)))


def geometric(*, mean: float = 7.0) -> Draw:
    """In every step a waiting gradient is due with the same probability: most are due early."""
    check_range("geometric: mean", mean, 0.0)
    if mean == 0.0:
        return lambda rng: 0
    decay = math.log(mean / (1.0 + mean))
    return lambda rng: int(math.log(1.0 - rng.random()) / decay)


DISTRIBUTIONS: dict[str, Callable[..., Draw]] = {
    "uniform": uniform,
    "normal": normal,
    "geometric": geometric,
}


def make_delay(delay: Delay) -> Draw:
    """A function that draws the delay of the next gradient."""
    if isinstance(delay, Mapping):
        return _from_histogram(cast(Mapping[object, object], delay))
    if isinstance(delay, str):
        name, given = parse_spec(delay, "delay")
        if name not in DISTRIBUTIONS:
            raise unknown_name("delay distribution", name, DISTRIBUTIONS)
        options: dict[str, Any] = bind("delay", name, DISTRIBUTIONS[name], given)
        return DISTRIBUTIONS[name](**options)
    if isinstance(delay, bool) or not isinstance(cast(object, delay), int) or delay < 0:
        _refuse(delay)
    return lambda rng: delay


def _from_histogram(histogram: Mapping[object, object]) -> Draw:
    counts: dict[int, float] = {}
    for key, count in histogram.items():
        # Many histograms come from a summary.json, and the keys of JSON are text.
        step = int(key) if isinstance(key, str) and key.isdecimal() else key
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            _refuse(dict(histogram))
        if isinstance(count, bool) or not isinstance(count, int | float) or count < 0:
            _refuse(dict(histogram))
        counts[step] = count
    if not 0 < sum(counts.values()) < math.inf:
        _refuse(dict(histogram))
    steps, bounds = list(counts), list(itertools.accumulate(counts.values()))
    return lambda rng: rng.choices(steps, cum_weights=bounds)[0]


def _refuse(delay: object) -> NoReturn:
    raise ConfigurationError(
        f"delay must be a whole number of steps of at least 0, a spec such as 'geometric:mean=7' "
        f"or a staleness histogram such as {{6: 120, 7: 310}}, got {delay!r}"
    )


class _Late(NamedTuple):
    """The gradients of one step, and the step that will apply them."""

    due: int
    gradients: Sequence[Tensor | None]


class DelayedOptimizer(WrappedOptimizer):
    """Wraps any optimiser of torch.optim and gives it each gradient `delay` steps late.

        optimizer = DelayedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), delay=8)

    `zero_grad`, `param_groups`, schedulers and `state_dict` work as before. The rate and the
    momentum are those of the step that applies a gradient, not of the step that computed it.
    Gradients that still wait when a loop ends are never applied. With `delay=0` every step is the
    wrapped optimiser's own, bit for bit.
    """

    def __init__(self, optimizer: Optimizer, delay: Delay, *, seed: int = 0) -> None:
        """`seed` decides the delays that are drawn; a fixed delay draws nothing."""
        if not isinstance(cast(object, optimizer), Optimizer):
            raise ConfigurationError(
                f"DelayedOptimizer wraps an optimiser of torch.optim, got "
                f"{type(optimizer).__name__}; make one from the model's parameters first"
            )
        if isinstance(optimizer, LBFGS):
            _refuse_closure("LBFGS evaluates the loss several times a step")
        super().__init__(optimizer)
        self._draw = make_delay(delay)
        self._rng = random.Random(seed)
        self._steps = 0
        self._late: list[_Late] = []

    @property
    def waiting(self) -> int:
        """How many gradients wait to be applied."""
        return len(self._late)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the present gradients and apply those that are due, in order of computation."""
        if closure is not None:
            _refuse_closure("a closure would compute its gradient when it is applied")
        now = self._steps
        self._steps += 1
        delay = self._draw(self._rng)
        parameters = list(self._parameters())
        if delay == 0 and not self._late:
            self.optimizer.step()
            return
        # They are copied because loops zero the same memory or accumulate into it.
        fresh = [parameter.grad for parameter in parameters]
        copies = [None if one is None else one.detach().clone() for one in fresh]
        self._late.append(_Late(now + delay, copies))
        due = [one for one in self._late if one.due <= now]
        self._late = [one for one in self._late if one.due > now]
        try:
            for one in due:
                # A parameter whose group was added later had no gradient then.
                for parameter, gradient in itertools.zip_longest(parameters, one.gradients):
                    parameter.grad = gradient
                self.optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, fresh, strict=True):
                parameter.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's, with the waiting gradients under "delayed"."""
        version, internal, gauss = self._rng.getstate()
        return {
            **self.optimizer.state_dict(),
            "delayed": {
                "steps": self._steps,
                "due": [one.due for one in self._late],
                "gradients": [list(one.gradients) for one in self._late],
                "generator": [version, list(internal), gauss],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, even in the middle of a run."""
        if "delayed" not in state_dict:
            raise ConfigurationError(
                "the state dict has no entry 'delayed', so it was not made by a DelayedOptimizer; "
                "load it into the wrapped optimiser before wrapping it"
            )
        rest = dict(state_dict)
        saved = rest.pop("delayed")
        self.optimizer.load_state_dict(rest)
        parameters = list(self._parameters())
        self._steps = int(saved["steps"])
        self._late = [
            _Late(
                due,
                [
                    None if one is None else one.to(parameter.device, parameter.dtype, copy=True)
                    for parameter, one in zip(parameters, gradients, strict=False)
                ],
            )
            for due, gradients in zip(saved["due"], saved["gradients"], strict=True)
        ]
        version, internal, gauss = saved["generator"]
        self._rng.setstate((version, tuple(internal), gauss))

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler replaces `step` by a wrapper, which must not be copied.
        kept = ("optimizer", "_rng", "_steps", "_late", "_draw")
        return {name: self.__dict__[name] for name in kept}

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]


def _refuse_closure(reason: str) -> NoReturn:
    raise ConfigurationError(
        f"DelayedOptimizer takes no closure, because {reason}; compute the loss, call backward() "
        "and then step()"
    )
