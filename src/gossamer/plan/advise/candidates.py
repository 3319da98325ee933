"""What advice chooses from: methods with their main settings, and one grid of learning rates.

The rows of the menu are in order of importance: where a budget does not pay for all of them, the
last ones are dropped first. Every row gets the same rates, because the rate decides more than the
method does; so a row must train at one of them, and settings that need another grid (ssp:bound=16)
are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.plan.advise.changes import UNCHANGED, Changes
from gossamer.plan.advise.splits import Splits
from gossamer.plan.hardware.room import Room
from gossamer.quantities import counted

MENU = (
    # One row for each way to couple workers.
    "all_reduce",
    "all_reduce:balance=speed",
    "ad_psgd",
    "local_sgd:period=8",
    "push_sum",
    "easgd:period=4",
    "downpour",
    "d_psgd",
    "push_gossip",
    "backup_workers",
    "ssp:bound=4,divide=true",
    # Another period, topology, bound or number of servers.
    "local_sgd:period=32",
    "push_sum:overlap=1",
    "ad_psgd:topology=bipartite_ring",
    "push_gossip:period=8",
    "easgd:period=16",
    "all_reduce:stale=1",
    "diloco:period=8",
    "bmuf:period=8",
    "slowmo:period=8",
    "d_psgd:topology=exponential",
    "d_psgd:topology=complete",
    "eamsgd:period=4",
    "downpour:n_push=8,n_fetch=8",
    "softsync",
    "dc_asgd",
    "staleness_aware",
    "ssp:bound=1,divide=true",
    "sync_server:servers=4",
    "pull_gossip",
    # For data that differ between workers.
    "gradient_tracking",
    "d2",
    "qg_dsgdm",
    "relay_sgd",
    # Made for compression, or for few bytes and slow links.
    "choco_sgd",
    "one_bit_adam",
    "sparse_loco",
    "noloco:period=8",
    "hierarchical_sgd",
    "async_diloco:period=8",
    "decoupled_diloco",
    # The same exchanges in fewer bits.
    "all_reduce+bf16",
    "all_reduce+powersgd:rank=2",
    "all_reduce+topk:share=0.05",
    "diloco:period=8+int4",
    "local_sgd:period=8+int8",
    "downpour+int8",
    "ad_psgd+bf16",
    # Finer choices.
    "ad_psgd:topology=complete",
    "local_sgd:period=2",
    "local_sgd:period=128",
    "bmuf:period=32",
    "slowmo:period=32",
    "diloco:period=32",
    "eamsgd:period=16",
    "pull_gossip:period=8",
    "push_sum:overlap=4",
    "ssp:bound=4",
    "bounded_delay:bound=4,divide=true",
    "softsync:n=4",
    "downpour:servers=4",
    "backup_workers:servers=4",
)
NOT_ADVISED = {
    "ensemble": "it gives as many models as workers instead of one",
    "codistill": "its workers train apart, so that each sees only its part of the samples",
    "pbt": "its workers train apart, and it looks for settings instead of for speed; try --search",
    "hogwild": "it needs one memory that all workers share, which a cluster has not",
}
_FEWEST_MEETINGS = 4
_MOST_MODELS = 16


@dataclass(frozen=True)
class Candidate:
    """A method with its options and a learning rate."""

    method: str
    learning_rate: float
    changes: Changes = UNCHANGED

    @property
    def name(self) -> str:
        """The method without its options, and its compressor if it was given one."""
        spec = parse_method(self.method)
        own = spec.compressor
        if own is None or not str(spec).endswith(f"+{own}"):
            return spec.name
        return f"{spec.name}+{own.name}"

    def __str__(self) -> str:
        return f"{self.label} at {self.learning_rate:g}"

    @property
    def label(self) -> str:
        """The method, and what is changed with it."""
        changed = str(self.changes)
        return f"{self.method} ({changed})" if changed else self.method

    def settings(self, base: Settings) -> Settings:
        """The base settings with this method, its changes and its rate, checked."""
        changed = self.changes.apply(base, self.method)
        return dataclasses.replace(changed, learning_rate=self.learning_rate).resolved()


def menu_with(own: Sequence[str], *, only: bool = False) -> dict[str, tuple[str, ...]]:
    """What `candidates` needs to try the user's methods first, or no others; unknown ones are
    refused."""
    for method in own:
        parse_method(method)
    if only:
        if not own:
            raise ConfigurationError(
                "--only tries no methods but those of --method; give at least one"
            )
        return {"menu": tuple(dict.fromkeys(own))}
    return {"menu": tuple(dict.fromkeys((*own, *MENU)))} if own else {}


def candidates(
    base: Settings, rates: Sequence[float], menu: Sequence[str] = MENU,
    changes: Sequence[Changes] = (UNCHANGED,),
) -> tuple[list[Candidate], dict[str, str]]:  # fmt: skip
    """The candidates that can run on this cluster, in the menu's order, and why others cannot.
    Replicas of several machines come first, where they are suggested. Changed settings come after
    all methods without them."""
    found: list[Candidate] = []
    able: list[str] = []
    left_out = dict(NOT_ADVISED)
    room, splits = _room(base), Splits(base)
    refused = room.refusal("all_reduce") if room else ""
    for method in dict.fromkeys((*splits.rows(refused), *menu)):
        reason = _obstacle(base, method)
        if not reason and room:
            spec = parse_method(method)
            reason = splits.refusal(spec) if spec.shape.machines > 1 else room.refusal(spec)
        if reason:
            left_out[method] = reason
        else:
            able.append(method)
    for change in changes:
        for method in able:
            reason = _obstacle_to(base, method, change)
            if reason:
                left_out[Candidate(method, rates[0], change).label] = reason
            else:
                found += [Candidate(method, rate, change) for rate in rates]
    if not found:
        method, reason = next((m, r) for m, r in left_out.items() if m in menu)
        raise ConfigurationError(f"no method can run on this cluster: {method}: {reason}")
    return found, left_out


def _room(base: Settings) -> Room | None:
    """What the workers can hold, if the cluster says what memory they have."""
    if not base.cluster.compute.memory:
        return None
    return Room.of(base.task, base.cluster, base.batch or 1, optimiser=base.optimiser)


def _obstacle_to(base: Settings, method: str, change: Changes) -> str:
    """Why this change cannot be made with the method; empty if it can."""
    if not str(change):
        return ""
    try:
        changed = change.apply(base, method).resolved()
    except ConfigurationError as error:
        return str(error)
    momentum = change.momentum
    if momentum and changed.method.notice(momentum, is_synchronous=_is_in_rounds(changed)):
        return "the method leaves the optimiser's momentum out"
    return ""


def _is_in_rounds(settings: Settings) -> bool:
    return settings.method.method.is_synchronous(settings.method_options())


def _obstacle(base: Settings, method: str) -> str:
    if base.cluster.workers == 1 and method != "all_reduce":
        return "with one worker there is nobody to exchange anything with"
    try:
        settings = dataclasses.replace(base, method=parse_method(method)).resolved()
    except ConfigurationError as error:
        return str(error)
    if settings.method.balance and (reason := _why_balance_is_idle(base.cluster)):
        return reason
    options = settings.method_options()
    models = settings.method.method.promises.models_per_step(base.cluster.workers, options)
    if models > _MOST_MODELS:
        return f"it sends {models:.0f} models a step, too many messages to simulate in a search"
    period = max(int(options.get(key, 1)) for key in ("period", "n_push"))
    if period > 1 and period * _FEWEST_MEETINGS > settings.steps_per_worker:
        return (
            f"with {counted(settings.steps_per_worker, 'step')} a worker it would meet fewer than "
            f"{_FEWEST_MEETINGS} times"
        )
    return ""


def _why_balance_is_idle(cluster: Cluster) -> str:
    """Why batches in proportion to speed would change nothing here; empty where they may."""
    if not cluster.compute.per_sample:
        return "a gradient takes as long here whatever its batch is; [compute] per_sample says more"
    is_uneven = cluster.phases.are_there or any(f.kind == "slow" for f in cluster.faults)
    return "" if is_uneven else "all workers are equally fast"


def kind_of(candidate: Candidate, settings: Settings) -> str:
    """How this candidate couples its workers: the kind that it belongs to."""
    method = settings.method.method
    if method.family == "local updates":
        return "local updates"
    options = settings.method_options()
    is_synchronous = method.is_synchronous(options)
    if options.get("backups"):
        return "synchronous with backups"
    if method.has_server:
        return "synchronous" if is_synchronous else "asynchronous server"
    if method.family == "synchronous":
        return "synchronous"
    return "gossip in rounds" if is_synchronous else "asynchronous gossip"
