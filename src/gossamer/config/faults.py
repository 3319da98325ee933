"""What can break in a cluster, simulated or real, and how a user writes it.

kill 3@2.5s               worker 3 dies
return 3@4s               worker 3, which has died, comes back
arrive 5@2s               worker 5 is not there before
pause 2@1s+0.5s           worker 2 stands still for half a second
slow 0=10                 worker 0 computes ten times slower (from 1s for 2s: 0=10@1s+2s)
slow-link 0=10            the network card of worker 0 is ten times slower
drop 0.05                 each message is lost with that probability and sent again later
delay 20ms@1s+2s          every message takes that much longer
partition 0,1|2-7@1s+2s   the sides cannot reach each other until it heals
kill-server 0@2s          the machine of server 0 dies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.quantities import number, seconds

FOREVER = float("inf")
_SLOWEST = 1e9
_MOST_WORKERS = 1_000_000


@dataclass(frozen=True)
class _Kind:
    """What a fault of one kind must say, and an example of how it is written."""

    example: str
    is_of_worker: bool = False
    """Whether it happens to one worker, or server."""
    fits: Callable[[float], bool] | None = None
    """Which amounts it may have; None where it has no amount."""
    is_moment: bool = False
    """Whether it happens at one moment, which must be given, and has no duration."""
    must_end: bool = False


def _is_factor(amount: float) -> bool:
    return 0 < amount <= _SLOWEST


_KINDS = {
    "kill": _Kind("3@2.5s", is_of_worker=True, is_moment=True),
    "return": _Kind("3@4s", is_of_worker=True, is_moment=True),
    "arrive": _Kind("5@2s", is_of_worker=True, is_moment=True),
    "pause": _Kind("2@1s+0.5s", is_of_worker=True, must_end=True),
    "slow": _Kind("0=10 or 0=10@1s+2s", is_of_worker=True, fits=_is_factor),
    "slow-link": _Kind("0=10 or 0=10@1s+2s", is_of_worker=True, fits=_is_factor),
    "drop": _Kind(
        "0.05 or 0.05@1s+2s (a probability below 1)", fits=lambda amount: 0 <= amount < 1
    ),
    "delay": _Kind("20ms or 20ms@1s+2s", fits=lambda amount: 0 <= amount < FOREVER),
    "partition": _Kind("0,1|2-7@1s+2s, no worker on two sides"),
    "kill-server": _Kind("0@2s", is_of_worker=True, is_moment=True),
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Fault:
    """One thing that breaks, from `at` for `lasts` seconds after the start of the run.

    The seconds are of virtual time in the simulator and of the clock on real workers.
    """

    kind: str
    at: float = 0.0
    lasts: float = FOREVER
    worker: int = -1
    amount: float = 0.0
    """The factor of slow and slow-link, the probability of drop, the seconds of delay."""
    sides: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        """Refuse a fault that cannot happen, or that would be ignored."""
        kind = _kind_of(self.kind)
        named = [rank for side in self.sides for rank in side]
        fits = (
            0 <= self.at < FOREVER
            and self.lasts > 0
            and (self.amount == 0 if kind.fits is None else kind.fits(self.amount))
            and (self.worker >= 0) == kind.is_of_worker
            and (not kind.is_moment or self.lasts == FOREVER)
            and (not kind.must_end or self.lasts < FOREVER)
            and (self.kind == "partition") == (len(self.sides) > 1 and all(self.sides))
            and len(named) == len(set(named))
        )
        if not fits:
            raise ConfigurationError(
                f"the fault '{self}' cannot happen; write it as {self.kind} {kind.example}"
            )

    @property
    def is_trait(self) -> bool:
        """Whether it lasts for the whole run: a worker or a link of the cluster that is slow."""
        return self.kind in ("slow", "slow-link") and self.at == 0 and self.lasts == FOREVER

    def is_on(self, time_s: float) -> bool:
        return self.at <= time_s < self.at + self.lasts

    def __str__(self) -> str:
        """As a user writes it; `read_fault` reads it."""
        kind = _KINDS.get(self.kind, _Kind(""))
        is_always = self.at == 0 and self.lasts == FOREVER and not kind.is_moment
        when = "" if is_always else f"@{_shown(self.at)}s"
        if self.lasts != FOREVER:
            when += f"+{_shown(self.lasts)}s"
        amount = f"{_shown(self.amount)}{'s' if self.kind == 'delay' else ''}"
        if kind.is_of_worker:
            what = str(self.worker) if kind.fits is None else f"{self.worker}={amount}"
        elif self.kind == "partition":
            what = "|".join(",".join(map(str, sorted(side))) for side in self.sides)
        else:
            what = amount
        return f"{self.kind} {what}{when}"


@dataclass(frozen=True)
class Failures:
    """How often workers die by themselves, and how long until they are back."""

    mtbf: float = 0.0
    """Mean seconds from the beginning of a life to its end, exponentially distributed; 0: they do
    not die."""
    repair: float = 0.0
    """Seconds from a death until the worker starts again; 0: it does not come back."""
    checkpoint: float = 0.0
    """Seconds that a run stands still for a checkpoint; 0: not said. No simulated run writes any:
    it is for the advice on how often a run should that a death stops."""
    restart: float = 0.0
    """Seconds until such a run trains again."""
    per: str = "worker"
    """What dies: a worker, or a machine with all of its workers."""

    @property
    def are_there(self) -> bool:
        return self.mtbf > 0

    def check(self) -> None:
        if self.per not in ("worker", "machine"):
            raise unknown_name("unit of [failures] per", self.per, ("worker", "machine"))
        for name in ("mtbf", "repair", "checkpoint", "restart"):
            if not 0 <= getattr(self, name) < FOREVER:
                raise ConfigurationError(
                    f"[failures] {name} must be a finite time, got {getattr(self, name):g} s"
                )
        needs = [name for name in ("repair", "checkpoint", "restart") if getattr(self, name)]
        if needs and not self.mtbf:
            raise ConfigurationError(
                f"[failures] {needs[0]} needs mtbf, the mean time between two deaths; give both"
            )


def check_lives(faults: Sequence[Fault]) -> None:
    """Refuse a worker that comes back without having died, or arrives twice or where it lives."""
    alive: dict[int, bool] = {fault.worker: False for fault in faults if fault.kind == "arrive"}
    for fault in sorted(faults, key=lambda fault: fault.at):
        if fault.kind not in ("kill", "return", "arrive"):
            continue
        if fault.kind != "kill" and alive.get(fault.worker, True):
            raise ConfigurationError(
                f"the fault '{fault}' cannot happen, because worker {fault.worker} is alive then; "
                "kill it before, or let it arrive once"
            )
        alive[fault.worker] = fault.kind != "kill"


def _kind_of(name: str) -> _Kind:
    if name not in _KINDS:
        raise unknown_name("fault", name, KINDS)
    return _KINDS[name]


def read_fault(line: str) -> Fault:
    """One fault from a line such as "kill 3@2.5s"."""
    kind, _, rest = line.partition(" ")
    return parse_fault(kind, rest)


def parse_faults(**texts: Sequence[str] | None) -> tuple[Fault, ...]:
    """The faults that the options of a command line give, such as `slow_link=["0=10"]`."""
    return tuple(
        parse_fault(kind, text)
        for kind in KINDS
        for text in texts.get(kind.replace("-", "_")) or ()
    )


def parse_fault(kind: str, text: str) -> Fault:
    """One fault from its kind and the text behind it, such as ("kill", "3@2.5s")."""
    known = _kind_of(kind)
    try:
        return _parsed(kind, text)
    except (ConfigurationError, ValueError):
        raise ConfigurationError(
            f"--{kind} cannot read {text!r}; write it as {known.example}"
        ) from None


def _parsed(kind: str, text: str) -> Fault:
    what, has_time, when = text.strip().partition("@")
    start, has_end, duration = when.partition("+")
    at = seconds(start, kind) if has_time else 0.0
    lasts = seconds(duration, kind) if has_end else FOREVER
    if _KINDS[kind].is_moment and not has_time:
        raise ValueError
    if kind == "partition":
        return Fault(kind, at, lasts, sides=tuple(_ranks(side) for side in what.split("|")))
    if kind == "delay":
        return Fault(kind, at, lasts, amount=seconds(what, kind))
    worker, has_amount, amount = what.partition("=")
    if kind == "drop":
        worker, has_amount, amount = "-1", "=", what
    factor = number(amount) if has_amount else 0.0
    if factor is None:
        raise ValueError
    return Fault(kind, at, lasts, worker=int(worker), amount=factor)


def _shown(value: float) -> str:
    """A short text if no digit is lost, so that the text always reads back the same."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) > _MOST_WORKERS:
            raise ValueError
        ranks.update(range(int(first), int(last or first) + 1))
    return frozenset(ranks)
