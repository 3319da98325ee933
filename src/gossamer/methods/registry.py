"""The one table of methods. A row is a method's name, its paper and its promises, and the tests
read the promises from here: a new method is a row, not a file of tests."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.methods import decentralised, elastic, gossip, local, server, synchronous
from gossamer.optimisers import make_optimiser
from gossamer.options import bind, parse_spec, print_spec
from gossamer.topology import make_topology

Role = Callable[..., Coroutine[Any, Any, None]]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Promises:
    """What a method promises, in the form in which a test can check it."""

    keeps_mean: bool
    """Averaging changes no sum: the mean of workers (with the centre, where there is one) moves by
    gradients only."""
    waits_for: str
    """everyone, neighbours, partner, server or nobody."""
    staleness: str
    """The bound on a gradient's staleness, in updates."""
    survives_death: bool
    traffic: str
    """Models that a worker puts on the network per step, as a formula."""
    models_per_step: Callable[[int, Options], float]
    """The same for p workers, as a number."""
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
    server_optimiser: str = ""
    """What a server descends with unless the user says otherwise; empty: as the workers do."""
    is_synchronous: Callable[[Options], bool] = lambda options: True
    suits: Callable[[int, int], dict[str, Any]] = lambda workers, steps: {}
    """Defaults that suit the run at hand, from the number of workers and of steps."""
    paper_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The paper's own values, chosen by the flag `paper`."""

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.worker) or "").splitlines()[0]

    def defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.worker).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as a user chose them; prints and parses back as a short string."""

    method: Method
    options: Mapping[str, Any]
    """What was given; the rest is the method's defaults or suits the run."""
    is_paper: bool = False
    groups: int | str = 0
    server_optimiser: str = ""

    @property
    def name(self) -> str:
        return self.method.name

    def __str__(self) -> str:
        shown: dict[str, Any] = {"paper": True} if self.is_paper else {}
        shown.update(self.options)
        if self.groups:
            shown["groups"] = self.groups
        if self.server_optimiser:
            shown["server_optimiser"] = self.server_optimiser
        return print_spec(self.name, shown)

    def resolve(self, workers: int, steps: int) -> dict[str, Any]:
        """All options for a run of that many workers and steps each."""
        values = self.method.defaults() | self.method.suits(workers, steps)
        if self.is_paper:
            values |= self.method.paper_values
        values |= self.options
        if values.get("least", 0.0) > values.get("most", inf):
            raise ConfigurationError(
                f"{self.name}: least must not be above most, got least={values['least']:g} and "
                f"most={values['most']:g}"
            )
        if "topology" in values:
            make_topology(values["topology"], workers)
        return values


def parse_method(text: str | MethodSpec) -> MethodSpec:
    """`name` or `name:key=value,...`; `name:paper` takes the paper's own values."""
    if isinstance(text, MethodSpec):
        return text
    name, given = parse_spec(text, "method")
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    method = METHODS[name]
    is_paper = given.pop("paper", "false") == "true"
    groups = _groups(given.pop("groups", "0"), name)
    server_optimiser = given.pop("server_optimiser", "")
    if server_optimiser:
        if not method.has_server:
            raise ConfigurationError(f"{name} has no server, so server_optimiser cannot be set")
        make_optimiser(server_optimiser)
    options = bind("method", name, method.worker, given)
    _check(name, options)
    return MethodSpec(method, options, is_paper, groups, server_optimiser)


def _groups(text: str, name: str) -> int | str:
    if text == "host":
        return text
    if not text.isdigit():
        raise ConfigurationError(
            f"{name}: groups must be a number of groups or 'host', got {text!r}"
        )
    return int(text)


_CHOICES = {"state": ("local", "averaged", "reset"), "adapt": ("before", "after")}
_AT_LEAST_ONE = ("period", "n_push", "n_fetch")
_SHARES = ("switch", "beta", "delta", "block_momentum", "outer_momentum", "alpha")


def _check(name: str, options: Options) -> None:
    for key, value in options.items():
        if key in _CHOICES and value not in _CHOICES[key]:
            raise unknown_name(f"{name} {key}", str(value), _CHOICES[key])
        if key in _AT_LEAST_ONE and value < 1:
            raise ConfigurationError(f"{name}: {key} must be at least 1, got {value}")
        if key in ("stale", "overlap") and isinstance(value, int) and value < 0:
            raise ConfigurationError(f"{name}: {key} must not be negative, got {value}")
        if key in ("least", "most") and not value >= 0:
            raise ConfigurationError(f"{name}: {key} must not be negative, got {value:g}")
        if key in _SHARES and not 0 <= value <= 1:
            raise ConfigurationError(f"{name}: {key} must lie between 0 and 1, got {value:g}")


def _period(steps: int, most: int) -> int:
    """A period of at most 1/20 of the steps: a short run must still meet often enough."""
    return max(1, min(most, steps // 20))


def _degree(workers: int, options: Options) -> float:
    graph = make_topology(options["topology"], workers)
    rounds = range(graph.period)
    sent = sum(len(graph.out_neighbours(rank, t)) for rank in graph.members for t in rounds)
    return sent / (workers * graph.period)


def _ring(workers: int) -> float:
    return 2 * (workers - 1) / workers


def _bipartite(workers: int, steps: int) -> dict[str, Any]:
    even = workers % 2 == 0
    return {"topology": "bipartite_exponential" if even else "complete"}


def _offers(workers: int, options: Options) -> float:
    """An exchange is two models; on a bipartite graph half of the workers start one per step."""
    if workers == 1:
        return 0.0
    return 1.0 if make_topology(options["topology"], workers).sides else 2.0


_AVERAGED = Promises(True, "everyone", "0", True, "2(p-1)/p / period", lambda p, o: _ring(p))


def _outer(*, plain: bool) -> Promises:
    def traffic(workers: int, options: Options) -> float:
        twice = 2 if options.get("state") == "averaged" else 1
        return twice * _ring(workers) / options["period"]

    return dataclasses.replace(_AVERAGED, models_per_step=traffic, is_plain_alone=plain)


_ROWS = (
    Method(
        "all_reduce", "synchronous", "Jin et al. 2016, Algorithm 1", "mean",
        synchronous.all_reduce,
        Promises(True, "everyone", "stale", True, "2(p-1)/p", lambda p, o: _ring(p)),
    ),
    Method(
        "d_psgd", "decentralised", "Lian et al. 2017", "mean", decentralised.d_psgd,
        Promises(True, "neighbours", "0", True, "degree", _degree),
    ),
    Method(
        "ad_psgd", "decentralised", "Lian et al. 2018, Algorithms 2-4", "mean",
        decentralised.ad_psgd,
        Promises(True, "partner", "none", True, "1 (2 where all offer)", _offers),
        is_synchronous=lambda options: False,
        suits=_bipartite,
        paper_values={"topology": "bipartite_ring", "least": 0.0, "most": inf},
    ),
    Method(
        "pull_gossip", "gossip", "Jin et al. 2016, Algorithm 3", "mean", gossip.pull_gossip,
        Promises(
            False, "peer's card", "0", True, "1 / period", lambda p, o: (p > 1) / o["period"]
        ),
        is_synchronous=lambda options: False,
    ),
    Method(
        "push_gossip", "gossip", "Jin et al. 2016, Algorithm 4", "mean", gossip.push_gossip,
        Promises(False, "nobody", "0", True, "1 / period", lambda p, o: (p > 1) / o["period"]),
        is_synchronous=lambda options: False,
    ),
    Method(
        "push_sum", "gossip", "Assran et al. 2019, Algorithms 1-2", "mean", gossip.push_sum,
        Promises(True, "in-neighbours", "0", True, "out-degree", _degree),
        paper_values={"topology": "one_peer_exponential"},
    ),
    Method(
        "easgd", "elastic", "Zhang, Choromanska & LeCun 2015", "centre", elastic.easgd,
        Promises(
            True, "centre", "0", True, "2 / period", lambda p, o: 2 / o["period"],
            is_plain_alone=False,
        ),
        has_server=True,
        is_synchronous=lambda options: bool(options["synchronous"]),
        suits=lambda workers, steps: {"alpha": 0.9 / workers, "period": _period(steps, 4)},
        paper_values={"period": 10},
    ),
    Method(
        "eamsgd", "elastic", "Zhang, Choromanska & LeCun 2015", "centre", elastic.eamsgd,
        Promises(
            True, "centre", "0", True, "2 / period", lambda p, o: 2 / o["period"],
            is_plain_alone=False,
        ),
        has_server=True,
        is_synchronous=lambda options: bool(options["synchronous"]),
        suits=lambda workers, steps: {"alpha": 0.9 / workers, "period": _period(steps, 4)},
        paper_values={"period": 10, "delta": 0.99},
    ),
    Method(
        "downpour", "parameter server", "Dean et al. 2012", "server", server.downpour,
        Promises(
            False, "server", "none (mean p-1)", True, "1/n_push + 1/n_fetch",
            lambda p, o: 1 / o["n_push"] + 1 / o["n_fetch"], is_plain_alone=False,
        ),
        server=server.downpour_server,
        has_server=True,
        # Momentum and delay multiply: on a server that waits for nobody it would diverge.
        server_optimiser="sgd",
        is_synchronous=lambda options: False,
    ),
    Method(
        "local_sgd", "local updates", "Zinkevich et al. 2010; Lin et al. 2020", "mean",
        local.local_sgd, _outer(plain=True),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        paper_values={"period": 16, "switch": 0.5},
    ),
    Method(
        "bmuf", "local updates", "Chen & Huo 2016", "mean", local.bmuf, _outer(plain=False),
        suits=lambda workers, steps: {
            "period": _period(steps, 8), "block_momentum": 1 - 1 / workers,
        },
    ),
    Method(
        "slowmo", "local updates", "Wang et al. 2020", "mean", local.slowmo, _outer(plain=False),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        paper_values={"period": 48},
    ),
    Method(
        "diloco", "local updates", "Douillard et al. 2023", "mean", local.diloco,
        _outer(plain=False),
        suits=lambda workers, steps: {"period": _period(steps, 8)},
        paper_values={"period": 500},
    ),
    Method(
        "ensemble", "independent", "Ben-Nun & Hoefler 2019", "ensemble", synchronous.ensemble,
        Promises(True, "nobody", "0", True, "0", lambda p, o: 0.0),
        is_synchronous=lambda options: False,
    ),
)  # fmt: skip

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}
