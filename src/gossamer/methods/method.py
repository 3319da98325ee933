"""What a method is: its roles, its paper and its promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.compression.pairing import EXCHANGES
from gossamer.errors import ConfigurationError, Error, ProtocolError, RunFailed, unknown_name
from gossamer.own_code import place_in, place_of, told
from gossamer.pipeline.shape import SHAPE_OPTIONS

Role = Callable[..., Coroutine[Any, Any, None]]
Options = Mapping[str, Any]

WAITS_FOR = {
    "everyone": True,
    "neighbours": True,
    "in-neighbours": True,
    "a partner in turn": True,
    "slowest beyond the bound": True,
    "the first p - backups": False,
    "partner": False,
    "centre": False,
    "server": False,
    "peer's card": False,
    "nobody": False,
}
"""What a worker may wait for, and whether one slow worker then sets everybody's pace."""
OUTPUTS = ("mean", "centre", "server", "moving average", "best", "ensemble")


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
    memory: Callable[[int, Options], float] = lambda workers, options: 0.0
    """Models that a worker holds, while it computes a gradient, besides its replica, one gradient
    and the optimiser's state."""


@dataclass(frozen=True)
class Method:
    """One row."""

    name: str
    family: str
    paper: str
    output: str
    """Which model the user gets: mean, centre, server, best or ensemble. The best worker's is that
    with the least score, which the method keeps in its replicas' memory."""
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
    balances: bool = False
    """Whether `balance=speed` may give faster workers larger batches: where each step is along the
    mean of all workers' gradients and nothing is done with one gradient alone."""
    needs_topology: str = ""
    """What its topology must be, by `topology.NEEDS`; nothing if it can be any."""
    suits: Callable[[int, int], dict[str, Any]] = lambda workers, steps: {}
    """Defaults that suit the run at hand, from the number of workers and of steps."""
    follows: Callable[[int, Options, Options], dict[str, Any]] = lambda workers, values, given: {}
    """Defaults that follow from the number of workers and from the other options, of which those in
    `given` are the user's own. The paper's values follow from nothing."""
    refuses: Callable[[int, Options], str] = lambda workers, values: ""
    """Why so many workers cannot run with these options; empty if they can."""
    paper_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The paper's own values, chosen by the flag `paper`."""

    exchange: str = ""
    """What its workers exchange, of `EXCHANGES`, which decides what can be compressed."""

    default_compressor: str = ""
    """What it compresses with unless the user names another, if it is made for compression."""
    compares_losses: bool = False
    """Whether it looks at the loss of each gradient, which a user's loop must then report."""
    acts_by_losses: bool = False
    """Whether what is sent depends on them, so that events cannot be made again without values."""
    normalises: bool = False
    """Whether its steps do not grow with its gradients, so that a clip does not shorten them."""
    about: str = ""
    """One line for those whose worker is a text shared by several methods."""
    reference: str = field(default="", compare=False)
    """By what it is imported that is not in the table: `my.py:name`, or an entry point."""

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


@contextmanager
def blamed_method(method: Method, *, is_worker: bool = False) -> Generator[None]:
    """Around a run: what a method of the user's own does wrong is one sentence with its place.

    In a process that runs one worker alone (`is_worker`) an error of any kind is the method's, if
    it came through a line of the user's.
    """
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, ProtocolError | RunFailed)
        is_theirs = is_worker and not isinstance(error, Error) and bool(place_in(error))
        if not method.reference or not (is_known or is_theirs):
            raise
        cause = error.__cause__ or error
        said = str(cause) if isinstance(cause, Error) else told(cause)
        where = place_of(method.worker)
        raise ConfigurationError(f"method {method.name} ({where}): {said}") from error


def options_of(role: Role) -> dict[str, Any]:
    """The keyword-only parameters of a coroutine, with their defaults."""
    parameters = inspect.signature(role).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def for_role(role: Role, options: Options) -> dict[str, Any]:
    """Those of a method's options that this role takes."""
    return {name: options[name] for name in options_of(role)}


def method(
    *,
    keeps_mean: bool,
    waits_for: str,
    models_per_step: float | Callable[[int, Options], float],
    staleness: str = "none",
    survives_death: bool = True,
    traffic: str = "",
    is_traffic_a_bound: bool = False,
    is_plain_alone: bool = True,
    memory: float | Callable[[int, Options], float] = 0.0,
    is_synchronous: bool | Callable[[Options], bool] = False,
    name: str = "",
    family: str = "own",
    paper: str = "own",
    output: str = "mean",
    server: Role | None = None,
    has_server: bool = False,
    **row: Any,
) -> Callable[[Role], Method]:
    """Make a coroutine a method, with its row of promises; `gossamer check-method` checks them.

    What it says of the method is said in `Promises` and `Method`, whose further fields may be given
    too. `models_per_step` and `memory` are numbers, or functions of the workers and the options;
    `is_synchronous` says whether workers step in rounds, or a function of the options does.
    """

    def decorate(worker: Role) -> Method:
        models, in_rounds, held = models_per_step, is_synchronous, memory
        own = name or getattr(worker, "__name__", "method")
        found = Method(
            own, family, paper, output, worker,
            Promises(
                keeps_mean, waits_for, staleness, survives_death,
                traffic or ("a formula" if callable(models) else f"{models:g}"),
                models if callable(models) else lambda workers, options: float(models),
                is_traffic_a_bound, is_plain_alone,
                held if callable(held) else lambda workers, options: float(held),
            ),
            server=server, has_server=has_server or server is not None,
            is_synchronous=in_rounds if callable(in_rounds) else lambda options: bool(in_rounds),
            reference=_reference(worker), **row,
        )  # fmt: skip
        check_row(found)
        return found

    return decorate


def _reference(worker: Role) -> str:
    """Where workers elsewhere find it; nowhere if it was typed into a notebook."""
    code = inspect.unwrap(worker).__code__
    path = Path(code.co_filename)
    return f"{path.absolute()}:{worker.__name__}" if path.suffix == ".py" else ""


_RESERVED = frozenset(
    {
        "paper",
        "groups",
        "balance",
        "server_optimiser",
        "servers",
        "placement",
        "standby",
        *SHAPE_OPTIONS,
    }
)


def check_row(row: Method) -> None:
    """Refuse what could not be run or checked, with the line of the coroutine."""
    where = f"method {row.name} ({place_of(row.worker) or 'typed in'})"
    if row.promises.waits_for not in WAITS_FOR:
        raise unknown_name(f"waits_for of {where}:", row.promises.waits_for, WAITS_FOR)
    if row.exchange and row.exchange not in EXCHANGES:
        raise unknown_name(f"exchange of {where}:", row.exchange, EXCHANGES)
    if row.output not in OUTPUTS:
        raise unknown_name(f"output of {where}:", row.output, OUTPUTS)
    for role in filter(None, (row.worker, row.server)):
        if not inspect.iscoroutinefunction(role):
            raise ConfigurationError(
                f"{where}: {getattr(role, '__name__', role)} must be a coroutine; write async def"
            )
        parameters = inspect.signature(role).parameters.values()
        placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(placed) != 2:
            raise ConfigurationError(
                f"{where} must take a worker and a replica, and its options after a *, got "
                f"({', '.join(p.name for p in parameters)}); write async def "
                f"{row.name}(w, x, *, option=default)"
            )
        for option, default in options_of(role).items():
            if default is inspect.Parameter.empty:
                raise ConfigurationError(f"{where}: option {option} needs a default")
            if option in _RESERVED:
                raise ConfigurationError(
                    f"{where}: option {option} means something for every method; rename it"
                )
