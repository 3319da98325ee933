"""YellowFin (Zhang and Mitliagkas, 2019): momentum and learning rate tuned from gradients alone.

Each step measures three things with moving averages: the range of curvatures (the squared norms of
recent gradients stand for them), the variance of the gradient, and the distance to the optimum.
Among the momenta and rates with which every curvature of the range converges at the same speed, it
chooses those that reduce the expected squared distance to the optimum most in one step on a noisy
quadratic. In closed loop, for late gradients, the explicit momentum is adjusted until the measured
total momentum is the chosen one.

All state is kept per row: `Tuner` updates the scalars of many rows at once, and `descend_rows_`
updates the parameters. The torch optimiser `YellowFin` is one row with one chunk per parameter; the
simulator's workers are many rows of one chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.errors import ConfigurationError
from gossamer.specs import check_range

# The columns of a row's scalars; the window of recent squared norms follows, as logarithms.
# All but the first two are moving averages from 0, to be divided by the weight given so far.
_COUNT, _MOMENTUM = 0, 1
_MEASURED = slice(2, 6)  # the logarithms of least and most curvature, squared norm, norm
_LOG_MOST, _DISTANCE = 3, 6
_TUNED = slice(7, 9)  # momentum and rate
_WINDOW = 9

# A smaller squared gradient norm counts as this, which keeps logarithms and quotients finite.
_FLOOR = 1e-12
# A squared norm this many times above the range would distort the averages for a long time.
_OUTLIER = 100.0
# The change of the explicit momentum per unit by which the measured total misses the target.
_FEEDBACK = 0.01
_MOMENTUM_RANGE = (-0.9, 0.999)


def root_momentum(distance: Tensor, variance: Tensor, curvature: Tensor) -> Tensor:
    """The x = sqrt(mu) that minimises x^2 distance^2 + (1 - x)^4 variance / curvature^2.

    The derivative vanishes where p x = (1 - x)^3 with p = distance^2 curvature^2 / (2 variance);
    with y = x - 1 that is the cubic y^3 + p y + p = 0, whose one real root is a hyperbolic sine.
    In this form nothing cancels, whatever p is; its ends keep the momentum below 0.998 and finite.
    """
    ratio = (distance * curvature).square() / (2.0 * variance).clamp(min=1e-30)
    ratio = ratio.clamp(1e-9, 1e9)
    return 1.0 - 2.0 * (ratio / 3.0).sqrt() * torch.sinh(
        torch.asinh(1.5 * (3.0 / ratio).sqrt()) / 3
    )


class Tuned(NamedTuple):
    """What the tuner decided, one number per row."""

    momentum: Tensor
    target: Tensor
    """The total momentum that is wanted; in open loop it is the explicit momentum."""
    rate: Tensor
    clip: Tensor
    """The factor on the gradient, at most 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuner:
    """The options of YellowFin and the arithmetic on its scalars, a [rows, `columns`] matrix."""

    momentum: float = 0.0
    """The explicit momentum at the start of a closed loop; open loop tunes it from the first step.
    """
    beta: float = 0.999
    window: int = 20
    closed_loop: bool = False
    workers: int = 1
    """In closed loop: a gradient was read `workers` - 1 steps before it is applied."""

    def __post_init__(self) -> None:
        check_range("yellowfin: momentum", self.momentum, 0.0, 1.0)
        check_range("yellowfin: beta", self.beta, 0.0, 1.0)
        check_range("yellowfin: window", self.window, 1)
        check_range("yellowfin: workers", self.workers, 1)

    @property
    def columns(self) -> int:
        """How many numbers a row of the tuner's state holds, all of them 0 at first."""
        return _WINDOW + self.window

    @property
    def past_points(self) -> int:
        """How many earlier points of its parameters a row keeps for the closed loop."""
        return self.workers + 1 if self.closed_loop else 0

    def admitted(self, scalars: Tensor, squared: Tensor) -> Tensor:
        """The part of a gradient that enters the averages; a large squared norm is cut."""
        count = scalars[:, _COUNT]
        most = (scalars[:, _LOG_MOST] / self._weight(count)).exp()
        part = (_OUTLIER * most / squared.clamp(min=_FLOOR)).sqrt().clamp(max=1.0)
        return torch.where(count == 0, torch.ones_like(part), part)

    def tune_(self, scalars: Tensor, squared: Tensor, squared_mean: Tensor) -> Tuned:
        """Update by the squared norm of a gradient and of the moving average that includes it."""
        count = scalars[:, _COUNT].add_(1)
        least, most, mean_square, distance = self._measure_(scalars, squared)
        variance = (mean_square - squared_mean / self._weight(count).square()).clamp(min=0.0)
        condition = (most / least).sqrt()
        root = torch.maximum(
            root_momentum(distance, variance, least), (condition - 1) / (condition + 1)
        )
        slow_start = (count / (10 * self.window)).clamp(max=1.0)
        best = torch.stack([root.square(), (1 - root).square() / least * slow_start], dim=1)
        scalars[:, _TUNED].lerp_(best, 1 - self.beta)
        target, rate = self.tuned(scalars)
        if not self.closed_loop:
            scalars[:, _MOMENTUM] = target
        else:
            scalars[:, _MOMENTUM] += (count == 1) * self.momentum
        momentum = scalars[:, _MOMENTUM].clone()
        clip = (most / squared.clamp(min=_FLOOR)).sqrt().clamp(max=1.0)
        return Tuned(momentum, target, rate, clip)

    def tuned(self, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """The tuned momentum and rate, one number each per row."""
        momentum, rate = scalars[:, _TUNED].unbind(1)
        weight = self._weight(scalars[:, _COUNT])
        return momentum / weight, rate / weight

    def _weight(self, count: Tensor) -> Tensor:
        """The weight that a moving average from 0 has given to its first `count` values."""
        return -torch.expm1(count * math.log(self.beta)) if self.beta else count.clamp(max=1.0)

    def _measure_(self, scalars: Tensor, squared: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Least and most curvature, mean squared norm, distance to the optimum."""
        count, window = scalars[:, _COUNT], scalars[:, _WINDOW : self.columns]
        newest = squared.clamp(min=_FLOOR).log().unsqueeze(1)
        # The window is filled with a row's first value, so its used length need not be known.
        window.copy_(torch.where((count == 1).unsqueeze(1), newest, window))
        window.scatter_(1, (count.round().long() % self.window).unsqueeze(1), newest)
        observed = torch.stack([window.amin(1), window.amax(1), squared, squared.sqrt()], dim=1)
        weight = self._weight(count)
        averages = scalars[:, _MEASURED].lerp_(observed, 1 - self.beta) / weight.unsqueeze(1)
        log_least, log_most, mean_square, mean_norm = averages.unbind(1)
        nearness = mean_norm / mean_square.clamp(min=_FLOOR)
        scalars[:, _DISTANCE] = torch.lerp(scalars[:, _DISTANCE], nearness, 1 - self.beta)
        return log_least.exp(), log_most.exp(), mean_square, scalars[:, _DISTANCE] / weight

    def steer_(self, scalars: Tensor, tuned: Tuned, total: Tensor) -> None:
        """Adjust the explicit momentum so that the measured total (NaN: unknown) nears its
        target."""
        missing = torch.where(scalars[:, _COUNT] > self.workers, tuned.target - total, 0.0)
        moved = tuned.momentum + _FEEDBACK * missing.nan_to_num(nan=0.0).clamp(-1.0, 1.0)
        scalars[:, _MOMENTUM] = moved.clamp(*_MOMENTUM_RANGE)


class Chunk(NamedTuple):
    """Some of the parameters of all rows and their state, as tensors of [rows, ...]."""

    parameters: Tensor
    gradients: Tensor
    displacement: Tensor
    """The last step of the parameters."""
    mean_gradient: Tensor
    factor: float | Tensor
    """The factor on the tuned rate; one number, or one per row."""
    past: Sequence[Tensor] = ()
    """Earlier points, the oldest first."""


def descend_rows_(tuner: Tuner, chunks: Sequence[Chunk], scalars: Tensor) -> None:
    """One step of YellowFin on all rows, each tuned on its own over all of its chunks."""
    squared = _squared_norms(chunk.gradients for chunk in chunks)
    part = tuner.admitted(scalars, squared)
    for chunk in chunks:
        admitted = chunk.gradients * _spread(part, chunk.gradients)
        chunk.mean_gradient.lerp_(admitted, 1 - tuner.beta)
    squared_mean = _squared_norms(chunk.mean_gradient for chunk in chunks)
    tuned = tuner.tune_(scalars, squared * part.square(), squared_mean)
    totals: list[Tensor] = []
    for chunk in chunks:
        for older, newer in pairwise([*chunk.past, chunk.parameters]):
            older.copy_(newer)
        scale = _spread(tuned.rate * tuned.clip * part, chunk.gradients)
        pull = chunk.gradients * (scale * chunk.factor)
        chunk.displacement.mul_(_spread(tuned.momentum, pull)).sub_(pull)
        chunk.parameters.add_(chunk.displacement)
        if chunk.past:
            totals.append(_total_momenta(chunk, pull))
    if totals:
        rows = torch.cat(totals, dim=1)
        tuner.steer_(scalars, tuned, torch.stack([_median(row) for row in rows]))


def _total_momenta(chunk: Chunk, pull: Tensor) -> Tensor:
    """For each parameter the momentum that, with its pull, explains a step.

    The newest gradient was read at the second oldest point that is kept. Without delay, the step
    from there would have been mu times the step before, less the pull. This is solved for mu.
    """
    before, read, after = [*chunk.past, chunk.parameters][:3]
    previous = read - before
    total = (after - read + pull) / previous
    return torch.where(previous == 0, math.nan, total).flatten(1)


def _median(values: Tensor) -> Tensor:
    """The median of the numbers that are not NaN. torch takes the lower of two middle values, which
    would be a bias. It is computed for one row at a time, because a median along a dimension is not
    deterministic on a GPU."""
    return (torch.nanmedian(values) - torch.nanmedian(-values)) / 2


def _squared_norms(tensors: Iterable[Tensor]) -> Tensor:
    """The squared norm of each row over all chunks."""
    return torch.stack([tensor.flatten(1).square().sum(1) for tensor in tensors]).sum(0)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One number per row, shaped to multiply a chunk."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


class YellowFin(torch.optim.Optimizer):
    """YellowFin for any training loop: `lr` is a factor on the rate that it finds, 1 as a rule.

    All parameter groups are tuned together; `lr` and `weight_decay` may differ between them. With
    `closed_loop`, gradients are taken to be applied `workers` - 1 steps after they were read, and
    `momentum` is where the explicit momentum starts from.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.0,
        beta: float = 0.999,
        window: int = 20,
        closed_loop: bool = False,
        workers: int = 1,
        weight_decay: float = 0.0,
    ) -> None:
        tuner = Tuner(
            momentum=momentum, beta=beta, window=window, closed_loop=closed_loop, workers=workers
        )
        check_range("yellowfin: lr", lr, 0.0)
        check_range("yellowfin: weight_decay", weight_decay, 0.0)
        options = dataclasses.asdict(tuner) | {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in every torch optimiser; all groups are tuned together."""
        super().add_param_group(param_group)
        first, added = self.param_groups[0], self.param_groups[-1]
        for name in _TUNER_OPTIONS:
            if added[name] != first[name]:
                raise ConfigurationError(
                    f"yellowfin tunes all parameter groups together, got {name}={added[name]} for "
                    f"one and {first[name]} for another; give it once, beside the groups"
                )
        for parameter in cast(list[Tensor], added["params"]):
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ConfigurationError(
                    f"yellowfin needs parameters of float32 or float64, got {parameter.dtype}; "
                    "keep a float32 copy of them to optimise"
                )

    @property
    def tuned(self) -> tuple[float, float]:
        """The explicit momentum and the rate before the factor: NaN until the first step."""
        scalars = self._scalars()
        return float(scalars[0, _MOMENTUM]), float(self._tuner().tuned(scalars)[1])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step along the gradients that the parameters have now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tuner = self._tuner()
        chunks = [
            self._chunk(tuner, parameter, group)
            for group in self.param_groups
            for parameter in cast(list[Tensor], group["params"])
            if parameter.grad is not None
        ]
        if chunks:
            descend_rows_(tuner, chunks, self._scalars())
        return loss

    def _tuner(self) -> Tuner:
        # The options are read from the groups because `load_state_dict` replaces these.
        return Tuner(**{name: self.param_groups[0][name] for name in _TUNER_OPTIONS})

    def _scalars(self) -> Tensor:
        """The tuner's row, kept with the first parameter so that it is saved and moved with it."""
        first: Tensor = self.param_groups[0]["params"][0]
        state: dict[str, Tensor] = self.state[first]
        if "tuner" not in state:
            state["tuner"] = first.new_zeros(1, self._tuner().columns)
        return state["tuner"]

    def _chunk(self, tuner: Tuner, parameter: Tensor, group: dict[str, Any]) -> Chunk:
        state: dict[str, Tensor] = self.state[parameter]
        names = state_names(tuner)
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = parameter.grad
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        displacement, mean_gradient, *past = [state[name].unsqueeze(0) for name in names]
        return Chunk(
            parameter.unsqueeze(0), gradient.unsqueeze(0), displacement, mean_gradient,
            group["lr"], past,
        )  # fmt: skip


def state_names(tuner: Tuner) -> tuple[str, ...]:
    """The names of a parameter's state; all but the first two are points of the closed loop."""
    past = (f"past_{age}" for age in range(tuner.past_points, 0, -1))
    return ("displacement", "mean_gradient", *past)


_TUNER_OPTIONS = [field.name for field in dataclasses.fields(Tuner)]
