"""A method with its options as a short string: `name:key=value,...`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

from gossamer.compression import COMPRESSORS, Compressor, parse_compressor
from gossamer.compression.pairing import refusal
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.methods.changing import DROP, changing
from gossamer.methods.method import Method, Options, options_of
from gossamer.methods.registry import METHODS
from gossamer.optim.momentum import explicit_momentum
from gossamer.optim.optimisers import Optimiser, Sgd, make_optimiser
from gossamer.own_code import (
    entry_points,
    is_own,
    load_entry_point,
    load_object,
    parse_reference,
    place_of,
)
from gossamer.pipeline.shape import SHAPE_OPTIONS, ReplicaShape, read_shape
from gossamer.replica import DIVISIONS
from gossamer.specs import bind, convert, parse_spec, print_spec, split_suffix
from gossamer.topology import NEEDS, make_topology


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as a user chose them; prints and parses back as a short string."""

    method: Method
    options: Mapping[str, Any]
    """What was given, as values or as text; the rest is the method's defaults or suits the run."""
    is_paper: bool = False
    groups: int | str = 0
    balance: str = ""
    """`speed` gives each worker a batch in proportion to how fast it is."""
    server_optimiser: str = ""
    servers: int = 1
    """Over how many servers the parameters are cut."""
    placement: str = "own"
    """Whether servers have machines of their own or sit on the workers'."""
    standby: str = ""
    """Whether each server has a standby that goes on after its death: `sync`, or how many messages
    may be lost then."""
    lower_momentum: bool = False
    """Lower the server's explicit momentum by what asynchrony itself adds."""
    keep_momentum: bool = False
    """Keep SGD's momentum where it is left out otherwise."""
    shape: ReplicaShape = field(default_factory=ReplicaShape)
    """Over which machines each replica is spread."""
    compressor: Compressor | None = None
    """What makes the exchanges of the method smaller."""

    def __post_init__(self) -> None:
        """However a spec is made, what is wrong with its options is said before anything runs."""
        options = _bind(self.method, self.options)
        _check(self.name, options)
        object.__setattr__(self, "options", options)
        if self.groups != "host" and (not isinstance(self.groups, int) or self.groups < 0):
            raise ConfigurationError(
                f"{self.name}: groups must be a number of groups or 'host', got {self.groups!r}"
            )
        self._check_balance()
        if self.compressor is None and self.method.default_compressor:
            usual = parse_compressor(self.method.default_compressor)
            object.__setattr__(self, "compressor", usual)
        if self.compressor is not None:
            reason = refusal(self.method.exchange, self.compressor)
            if reason is not None:
                raise ConfigurationError(f"{self.name} cannot use {self.compressor.name}: {reason}")
        _need_server(
            self.method, [k for k in _SERVER_SIDE if getattr(self, k) != getattr(MethodSpec, k)]
        )
        if self.server_optimiser:
            make_optimiser(self.server_optimiser)
        if self.servers < 1:
            raise ConfigurationError(f"{self.name}: servers must be at least 1, got {self.servers}")
        if self.placement not in ("own", "workers"):
            raise unknown_name(f"{self.name} placement", self.placement, ("own", "workers"))
        if self.standby and not (self.standby == "sync" or self.standby.isdecimal()):
            raise ConfigurationError(
                f"{self.name}: standby must be sync or the number of messages that the death of a "
                f"server may lose, got {self.standby!r}"
            )
        if self.standby and self.shape.machines > 1:
            raise ConfigurationError(
                f"{self.name}: the servers of divided models have no standby; leave out standby= "
                "or stages= and tensor="
            )
        if self.shape.machines > 1 and (self.groups or self.balance):
            raise ConfigurationError(
                f"{self.name}: a replica of several machines has no groups and no balance; leave "
                f"out {'groups=' if self.groups else 'balance='}, or stages= and tensor="
            )

    def _check_balance(self) -> None:
        if self.balance not in ("", "speed"):
            raise ConfigurationError(
                f"{self.name}: balance must be speed, got {self.balance!r}; leave it out for equal "
                "batches"
            )
        if self.balance and not self.method.balances:
            able = " and ".join(name for name, method in METHODS.items() if method.balances)
            raise ConfigurationError(
                f"{self.name} cannot balance its batches: only where every step is along the mean "
                f"of all workers' gradients can these be weighted by samples; use {able}, or leave "
                "out balance="
            )
        if self.balance and self.groups:
            raise ConfigurationError(
                f"{self.name}: the members of a group have equal batches; leave out groups= or "
                "balance="
            )

    @property
    def name(self) -> str:
        return self.method.name

    def __str__(self) -> str:
        shown: dict[str, Any] = {"paper": True} if self.is_paper else {}
        shown.update(self.options)
        if self.groups:
            shown["groups"] = self.groups
        if self.balance:
            shown["balance"] = self.balance
        if self.server_optimiser:
            shown["server_optimiser"] = self.server_optimiser
        if self.servers != 1:
            shown["servers"] = self.servers
        if self.placement != "own":
            shown["placement"] = self.placement
        if self.standby:
            shown["standby"] = self.standby
        if self.lower_momentum:
            shown["lower_momentum"] = True
        if self.keep_momentum:
            shown["keep_momentum"] = True
        shown |= self.shape.options()
        text = print_spec(self.method.reference or self.name, shown)
        own = self.method.default_compressor
        is_own = self.compressor is None or (own and self.compressor == parse_compressor(own))
        return text if is_own else f"{text}+{self.compressor}"

    def optimiser(self, asked: Optimiser, ends: int, *, is_synchronous: bool) -> Optimiser:
        """What the replicas of a run descend with, the workers' as well as the servers': the one
        that was asked for, or named for the servers."""
        chosen = make_optimiser(self.server_optimiser) if self.server_optimiser else asked
        if not isinstance(chosen, Sgd):
            return chosen
        momentum = self.momentum(chosen.momentum, ends, is_synchronous=is_synchronous)
        # Without momentum there is nothing to dampen or to look ahead with.
        none: dict[str, Any] = {} if momentum else {"dampening": 0.0, "nesterov": False}
        return dataclasses.replace(chosen, momentum=momentum, **none)

    def momentum(self, own: float, ends: int, *, is_synchronous: bool) -> float:
        """What is left of the momentum that an SGD has of its own."""
        if self._is_without_momentum(is_synchronous):
            return 0.0
        is_lowered = self.lower_momentum and not is_synchronous
        return explicit_momentum(own, ends) if is_lowered else own

    def _is_without_momentum(self, is_synchronous: bool) -> bool:
        if self.method.own_momentum or self._compressor_momentum:
            return True
        is_chosen = bool(self.server_optimiser) or self.keep_momentum or self.lower_momentum
        return self.method.leaves_out_momentum and not is_synchronous and not is_chosen

    @property
    def _compressor_momentum(self) -> str:
        return "" if self.compressor is None else self.compressor.own_momentum

    @property
    def clips_first(self) -> bool:
        """Whether gradients are clipped before they are encoded, and not again when what was
        decoded is descended along: it holds what was left out of earlier ones."""
        return self.compressor is not None and self.method.exchange in ("gradients", "server")

    def notice(self, momentum: float, *, is_synchronous: bool) -> str | None:
        """What a user must be told whose SGD has that momentum."""
        if not momentum or not self._is_without_momentum(is_synchronous):
            return None
        own = self.method.own_momentum or self._compressor_momentum
        if own:
            whose = self.name if self.method.own_momentum else str(self.compressor).split(":")[0]
            return (
                f"SGD's momentum of {momentum:g} is left out, because {whose} has one of its own; "
                f"set that by {own}="
            )
        return (
            f"SGD's momentum of {momentum:g} is left out where nobody waits for anybody, because "
            "momentum and delay multiply; keep_momentum=true in the method puts it back"
        )

    def check_kind(self, is_sgd: bool, name: str) -> None:
        """Refuse an optimiser that the method could take nothing but the rate from."""
        if self.method.own_momentum and not is_sgd:
            raise ConfigurationError(
                f"{self.name} descends by SGD with a momentum of its own "
                f"({self.method.own_momentum}) and cannot use {name}; choose sgd, or another method"
            )

    def check_newcomers(self) -> None:
        """Refuse what no worker can come into while the run is under way."""
        fixed = {
            "groups": bool(self.groups),
            "balance": bool(self.balance),
            "stages or tensor": self.shape.machines > 1,
            "a change of method": bool(_CHANGE.search(self.name)),
        }
        for what in [what for what, is_chosen in fixed.items() if is_chosen]:
            raise ConfigurationError(
                f"{self}: with {what} no worker can come during the run; leave it out, or the "
                "arrivals, returns and repairs of the cluster"
            )

    def resolve(self, workers: int, steps: int) -> dict[str, Any]:
        """All options for a run of that many workers and steps each."""
        values = self.method.values(workers, steps, self.options, is_paper=self.is_paper)
        if values.get("least", 0.0) > values.get("most", inf):
            raise ConfigurationError(
                f"{self.name}: least must not be above most, got least={values['least']:g} and "
                f"most={values['most']:g}"
            )
        if values.get("bound") == 0 and values.get("overlap"):
            raise ConfigurationError(
                f"{self.name}: with bound=0 every read waits for the end of its clock, so there is "
                "nothing that it could overlap; leave out overlap, or give it a bound of 1"
            )
        is_bounded = self.standby not in ("", "sync") and self.method.server is not None
        if is_bounded and self.method.is_synchronous(values):
            raise ConfigurationError(
                f"{self.name}: its workers are in step, and a message that is lost with a server "
                f"would leave one behind; write standby=sync, got standby={self.standby}"
            )
        if values.get("backups", 0) >= workers:
            raise ConfigurationError(
                f"{self.name}: backups must be fewer than the workers, got {values['backups']} of "
                f"{workers}"
            )
        if self.balance and values.get("backups", 0):
            raise ConfigurationError(
                f"{self.name}: a gradient that is dropped leaves a balanced mean without its share;"
                " leave out backups= or balance="
            )
        if values.get("n", 1) > workers:
            raise ConfigurationError(
                f"{self.name}: n must not exceed the {workers} workers, got {values['n']}"
            )
        if self.compressor is not None and self.method.exchange == "gradients":
            values |= {"overlap": False} if "overlap" in values else {}  # it is encoded as a whole
        if reason := self.method.refuses(workers, values):
            raise ConfigurationError(f"{self.name}: {reason}")
        if "topology" in values:
            graph, need = make_topology(values["topology"], workers), self.method.needs_topology
            if need and graph.name not in NEEDS[need]:
                raise ConfigurationError(
                    f"{self.name} needs {need}, got topology={values['topology']}; use one of "
                    f"{', '.join(NEEDS[need])}"
                )
        return values


def parse_method(text: str | MethodSpec) -> MethodSpec:
    """`name` or `name:key=value,...`; `name:paper` takes the paper's own values, and
    `name+compressor:key=value,...` compresses what the method exchanges."""
    if isinstance(text, MethodSpec):
        return text
    phases = _CHANGE.split(text)
    if len(phases) > 1:
        return _changing(text)
    text, suffix = split_suffix(text, COMPRESSORS)
    if suffix is not None and split_suffix(suffix, COMPRESSORS)[1] is not None:
        raise ConfigurationError(
            f"{text} can have one compressor, got {suffix}; leave out all but one"
        )
    if suffix is None and not is_own(text):
        head, plus, rest = text.partition("+")
        if plus and head.partition(":")[0] in METHODS and not rest[:1].isdecimal():
            raise unknown_name("compressor", parse_spec(rest, "compressor")[0], COMPRESSORS)
    name, given = parse_reference(text, "method")
    method = find_method(name)
    is_paper = given.pop("paper", "false") == "true"
    groups = given.pop("groups", "0")
    balance = given.pop("balance", "")
    server_side = _server_side(name, {key: given.pop(key) for key in _SERVER_SIDE if key in given})
    _need_server(method, list(server_side))
    shape = read_shape(name, {key: given.pop(key) for key in SHAPE_OPTIONS if key in given})
    return MethodSpec(
        method, given, is_paper, int(groups) if groups.isdecimal() else groups, balance,
        compressor=None if suffix is None else parse_compressor(suffix), shape=shape,
        **server_side,
    )  # fmt: skip


_CHANGE = re.compile(r"@([0-9.]+|drop)@")
"""`first@0.5@second`: no shell and no list of methods takes any of it for something else, and
neither `:`, `,` nor `+` of a phase can be mistaken for it."""


@cache
def _changing(text: str) -> MethodSpec:
    """The same object for the same text, so that what was parsed twice is equal."""
    parts = _CHANGE.split(text)
    for at in parts[1::2]:
        if at != DROP:
            convert(at, float, f"method {text!r}: the share of the run")
    return MethodSpec(changing([parse_method(part) for part in parts[::2]], parts[1::2]), {})


GROUP = "gossamer.methods"


def find_method(name: str) -> Method:
    """The row of a method: of the table, of a user's file or module, or of an installed package."""
    if name in METHODS:
        return METHODS[name]
    if is_own(name):
        return own_method(load_object(name, "method", "a coroutine under @gossamer.method"), name)
    brought = entry_points(GROUP)
    if name not in brought:
        raise unknown_name("method", name, [*METHODS, *brought])
    return own_method(load_entry_point(brought[name], "method"), name)


def own_method(found: object, name: str) -> Method:
    """The row that a user's object is."""
    if isinstance(found, Method):
        return dataclasses.replace(found, reference=name)
    place = f" ({where})" if (where := place_of(found)) else ""
    if inspect.iscoroutinefunction(found):
        raise ConfigurationError(
            f"{name}{place} has no row of promises; put @gossamer.method(keeps_mean=..., "
            "waits_for=..., models_per_step=...) above it"
        )
    raise ConfigurationError(
        f"{name}{place} is an object of type {type(found).__name__}, expected a method: a "
        "coroutine under @gossamer.method(...)"
    )


def _bind(method: Method, given: Options) -> dict[str, Any]:
    """Options of any role; a name that no role knows is refused with the nearest that one does."""
    known = method.defaults()
    for key in given:
        if key not in known and known:
            raise unknown_name(f"{method.name} option", key, known)
    values: dict[str, Any] = {}
    for role in (method.worker, method.server):
        if role is not None:
            own = {key: value for key, value in given.items() if key in options_of(role)}
            values |= bind("method", method.name, role, own if known else given)
    return values


_MOMENTUM = ("lower_momentum", "keep_momentum")
_SERVER_SIDE = ("server_optimiser", "servers", "placement", "standby", *_MOMENTUM)


def _need_server(method: Method, given: Sequence[str]) -> None:
    if given and not method.has_server:
        raise ConfigurationError(f"{method.name} has no server, so {given[0]} cannot be set")
    for key in () if method.server is not None else given:
        is_rule = key == "server_optimiser" or key in _MOMENTUM
        if is_rule and not (key in _MOMENTUM and method.leaves_out_momentum):
            raise ConfigurationError(
                f"{method.name} has no optimiser on its server, so {key} cannot be set; leave it "
                "out"
            )


def _server_side(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The options that every method with a server has, from text."""
    values: dict[str, Any] = dict(given)
    if "server_optimiser" in given:
        values["server_optimiser"] = str(make_optimiser(given["server_optimiser"]))
    if "servers" in given:
        values["servers"] = convert(given["servers"], int, f"{name}: servers")
    for key in _MOMENTUM:
        if key in given:
            values[key] = convert(given[key], bool, f"{name}: {key}")
    return values


_CHOICES = {
    "state": ("local", "averaged", "reset"),
    "adapt": ("before", "after"),
    "by": DIVISIONS,
    "merge": ("radial", "mean"),
}
_AT_LEAST_ONE = (
    "period",
    "n_push",
    "n_fetch",
    "n",
    "pieces",
    "fragments",
    "fewest",
    "quorum",
    "inner",
    "sites",
    "teachers",
    "spread",
)
_NOT_NEGATIVE = (
    "least", "most", "bound", "backups", "cap", "compensation", "strength", "outer_rate", "zeta",
    "delay", "grace", "patience", "weight",
)  # fmt: skip
_SHARES = (
    "switch", "beta", "delta", "block_momentum", "outer_momentum", "alpha", "warm_start",
    "introduce", "decay", "mean_square", "mu", "gamma", "warmup", "beta1", "beta2", "mix",
    "burn_in", "change",
)  # fmt: skip


def _check(name: str, options: Options) -> None:
    for key, value in options.items():
        if key in _CHOICES and value not in _CHOICES[key]:
            raise unknown_name(f"{name} {key}", str(value), _CHOICES[key])
        if key in _AT_LEAST_ONE and value < 1:
            raise ConfigurationError(f"{name}: {key} must be at least 1, got {value}")
        if key in ("stale", "overlap") and isinstance(value, int) and value < 0:
            raise ConfigurationError(f"{name}: {key} must not be negative, got {value}")
        if key in _NOT_NEGATIVE and value is not None and not value >= 0:
            raise ConfigurationError(f"{name}: {key} must not be negative, got {value:g}")
        if key in _SHARES and value is not None and not 0 <= value <= 1:
            raise ConfigurationError(f"{name}: {key} must lie between 0 and 1, got {value:g}")
