"""What a method is: its roles, its paper and its promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

Role = Callable[..., Coroutine[Any, Any, None]]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Promises:
    """What a method promises, in the form in which a test can check it."""

    keeps_mean: bool
    """Averaging changes no sum: the mean of workers (with the centre, where there is one) moves by
    gradients only."""
    waits_for: str
    """everyone, neighbours, partner, server, nobody, ...: whose slowness can hold a worker up."""
    staleness: str
    """The bound on a gradient's staleness, in updates."""
    survives_death: bool
    traffic: str
    """Models that a worker puts on the network per step, as a formula."""
    models_per_step: Callable[[int, Options], float]
    """The same for p workers, as a number."""
    is_traffic_a_bound: bool = False
    """The number is the most that travels, not what always does."""
    is_plain_alone: bool = True
    """With one worker, bit for bit plain PyTorch training."""


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    family: str
    paper: str
    output: str
    """Which model the user gets: mean, centre, server or ensemble."""
    worker: Role
    promises: Promises
    server: Role | None = None
    has_server: bool = False
    shares_replica: bool = False
    """Whether others change a worker's parameters, so that its gradients need their own copy."""
    leaves_out_momentum: bool = False
    """Whether SGD descends without its momentum unless the user puts it back, because nobody waits
    for anybody and momentum and delay multiply. All else of an optimiser is as it was asked for."""
    own_momentum: str = ""
    """The option that is the method's momentum, where it descends by SGD itself."""
    is_synchronous: Callable[[Options], bool] = lambda options: True
    trains_output: Callable[[Options], bool] = lambda options: False
    """Whether every worker takes every gradient at the output model itself: the statistics that
    BatchNorm gathers are then that model's own, and those of a centre or of a mean are not."""
    suits: Callable[[int, int], dict[str, Any]] = lambda workers, steps: {}
    """Defaults that suit the run at hand, from the number of workers and of steps."""
    follows: Callable[[int, Options, Options], dict[str, Any]] = lambda workers, values, given: {}
    """Defaults that follow from the number of workers and from the other options, of which those in
    `given` are the user's own. The paper's values follow from nothing."""
    paper_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The paper's own values, chosen by the flag `paper`."""

    about: str = ""
    """One line for those whose worker is a text shared by several methods."""

    def is_trained_itself(self, ends: int, options: Options) -> bool:
        """Whether the output model is the very one that so many workers take their gradients at."""
        return self.trains_output(options) or (ends == 1 and self.output in ("mean", "server"))

    @property
    def summary(self) -> str:
        return self.about or (inspect.getdoc(self.worker) or "").splitlines()[0]

    @property
    def servers_hold_model(self) -> bool:
        """Whether gradients are applied on servers; a worker's own steps move a copy between two
        reads of them."""
        return self.output in ("server", "moving average")

    def defaults(self) -> dict[str, Any]:
        """The options of all roles."""
        return options_of(self.worker) | (options_of(self.server) if self.server else {})

    def values(
        self, workers: int, steps: int, given: Options, *, is_paper: bool = False
    ) -> dict[str, Any]:
        """All options of a run of that many workers and steps each."""
        values = self.defaults() | self.suits(workers, steps)
        if is_paper:
            return values | dict(self.paper_values) | dict(given)
        values |= given
        return values | self.follows(workers, values, given) | dict(given)


def options_of(role: Role) -> dict[str, Any]:
    """The keyword-only parameters of a coroutine, with their defaults."""
    parameters = inspect.signature(role).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def for_role(role: Role, options: Options) -> dict[str, Any]:
    """Those of a method's options that this role takes."""
    return {name: options[name] for name in options_of(role)}
