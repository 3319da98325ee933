"""The step of each method in closed form, for equal workers.

If compute times do not vary, workers that start together stay together, so asynchronous workers all
reach the server at the same moment. If they vary, the workers disperse, and a closed queueing
network (`queueing`) describes the server. The symbols are: c compute time, L latency, G seconds per
byte, B bytes of the model, p workers, and q = p B G / S, the time that the transfers of all workers
take at one of S servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.plan.cost.case import Case, NoClosedForm, StepParts, split
from gossamer.plan.cost.queueing import answered_by_one_of_s, binomial, pulled_round_s, response_s

Form = Callable[[Case], StepParts]
_ROUNDS = 20


def all_reduce(case: Case) -> StepParts:
    """The pieces are reduced in turn, each as soon as the slowest worker has it."""
    stale, pace = case.options["stale"], case.pace
    whole_s = case.all_reduce_s(case.model_bytes)
    latest_s = pace.latest_s(case.ends)
    pieces = case.pieces if case.options["overlap"] else ()
    reduced_s = sum(one.count * case.all_reduce_s(one.size_bytes) for one in pieces) or whole_s
    if stale:
        # The next step hides the reduction, unless the reduction takes longer.
        step_s = max(latest_s, reduced_s)
        return split(pace.mean_s, latest_s, reduced_s, step_s, ignores_jitter=True)
    if not pieces:
        return split(pace.mean_s, latest_s, whole_s, latest_s + whole_s)
    gradient_s, forward = pace.gradient_s(case.ends), pace.compute.forward_share
    done_s = 0.0
    for piece in pieces:
        one_s = case.all_reduce_s(piece.size_bytes)
        # A group has its whole gradient at the end of the step.
        first_s, last_s = (
            gradient_s * (forward + (1 - forward) * share if pace.members == 1 else 1.0)
            for share in (piece.ready_share, piece.last_share)
        )
        # Of equal parts at equal distances the first or the last decides.
        done_s = max(max(done_s, first_s) + piece.count * one_s, last_s + one_s)
    return split(pace.mean_s, latest_s, reduced_s, max(latest_s, done_s))


def local(case: Case) -> StepParts:
    """H local steps, then one all-reduce: (H c + T) / H; T also for the optimiser's state."""
    period, pace = case.options["period"], case.pace
    exchange_s = case.all_reduce_s(case.model_bytes)
    if case.options.get("state") == "averaged":
        exchange_s += case.all_reduce_s(case.workload.optimiser_slots * case.model_bytes)
    early = case.options.get("switch", 0.0)
    # Before the switch the workers average after every step.
    meetings = early + (1 - early) / period
    together_s = pace.latest_sum_s(case.ends, period) / period
    latest_s = early * pace.latest_s(case.ends) + (1 - early) * together_s
    shared_s = exchange_s * meetings
    return split(pace.mean_s, latest_s, shared_s, latest_s + shared_s)


def hierarchical(case: Case) -> StepParts:
    """H local steps and an all-reduce of all workers, and every h steps between one of each site;
    the largest site is waited for."""
    period, inner, pace = case.options["period"], case.options["inner"], case.pace
    if period % inner:
        raise NoClosedForm(
            f"hierarchical_sgd has no closed form where the inner period of {inner} steps does not "
            f"divide the outer one of {period}; choose one that does, or simulate it"
        )
    largest = (case.ends + case.options["sites"] - 1) // case.options["sites"]
    site_s = case.link.all_reduce_s(case.wires.collective, largest, case.model_bytes)
    shared_s = site_s / inner + (case.all_reduce_s(case.model_bytes) - site_s) / period
    latest_s = pace.latest_sum_s(case.ends, period) / period
    return split(pace.mean_s, latest_s, shared_s, latest_s + shared_s, ignores_jitter=True)


def ensemble(case: Case) -> StepParts:
    """c, and in the shared part of the run c + T."""
    shared, pace = case.options.get("shared", 0.0), case.pace
    if shared == 0.0:
        return StepParts(pace.mean_s)
    exchange_s = shared * case.all_reduce_s(case.model_bytes)
    latest_s = shared * pace.latest_s(case.ends) + (1 - shared) * pace.mean_s
    return split(pace.mean_s, latest_s, exchange_s, latest_s + exchange_s)


def d_psgd(case: Case) -> StepParts:
    """max(c, L + d B G) if the exchange overlaps the gradient, otherwise their sum."""
    exchange_s, alone_s, latest_s = _neighbours_s(case)
    compute_s = case.pace.mean_s
    if case.options["overlap"] and case.options["adapt"] != "before":
        # A message leaves when its step begins, so only a lag of a whole step causes waiting.
        return split(compute_s, compute_s, alone_s, max(compute_s, exchange_s), ignores_jitter=True)
    return split(compute_s, latest_s, alone_s, latest_s + exchange_s, ignores_jitter=True)


def gradient_tracking(case: Case) -> StepParts:
    """D-PSGD's overlapped step with messages of two models."""
    exchange_s, alone_s, _ = _neighbours_s(case, models=2)
    compute_s = case.pace.mean_s
    return split(compute_s, compute_s, alone_s, max(compute_s, exchange_s), ignores_jitter=True)


def after_the_step(case: Case) -> StepParts:
    """c + L + d B G: what the neighbours get depends on the gradient."""
    exchange_s, alone_s, latest_s = _neighbours_s(case)
    return split(
        case.pace.mean_s, latest_s, alone_s, latest_s + exchange_s, ignores_jitter=True
    )  # fmt: skip


def push_sum(case: Case) -> StepParts:
    """c + L + d B G; with overlap tau the slowest of c, d B G and (c + L + d B G) / (tau + 1)."""
    exchange_s, alone_s, latest_s = _neighbours_s(case)
    compute_s, tau = case.pace.mean_s, case.options["overlap"]
    if not tau:
        return split(compute_s, latest_s, alone_s, latest_s + exchange_s, ignores_jitter=True)
    carried_s = exchange_s - case.link.latency_s
    step_s = max(compute_s, carried_s, (compute_s + exchange_s) / (tau + 1))
    return split(compute_s, compute_s, alone_s, step_s, ignores_jitter=True)


def _neighbours_s(case: Case, models: int = 1) -> tuple[float, float, float]:
    """The seconds of a mean exchange on the topology, of one message alone, and of the slowest.

    A step waits at least for the slowest of a neighbourhood. Workers that wait delay their own
    neighbours, for which there is no closed form.
    """
    if case.ends == 1:
        return 0.0, 0.0, case.pace.mean_s
    degrees = [] if case.meetings is None else case.meetings.degrees
    size = models * case.model_bytes
    carried_s = [case.link.crowded_s(degree, size) for degree in degrees]
    latest_s = [case.pace.latest_s(degree + 1) for degree in degrees]
    count = len(degrees)
    alone_s = case.link.message_s(size)
    return sum(carried_s) / count, alone_s, sum(latest_s) / count


def ad_psgd(case: Case) -> StepParts:
    """Active workers take max(c, A), passive ones c; A = 2 (L + B G) without other requests.

    The next gradient hides the averaging. Several active workers may ask the same passive worker.
    """
    compute_s, least = case.pace.mean_s, case.options["least"]
    graph = case.meetings
    if case.ends == 1 or least == 0 or graph is None:
        return StepParts(compute_s)
    if graph.active == 0:
        raise NoClosedForm(
            f"ad_psgd on {graph.name} with {case.ends} workers has no closed form, as everyone "
            "asks and answers at once; take an even number of workers and a bipartite topology, "
            "or simulate it"
        )
    choices, users = graph.links / graph.active, graph.links / graph.passive
    pauses_s = 2 * case.link.latency_s
    alone_s = least * (pauses_s + 2 * case.model_s)
    busy_s, idle_s = compute_s, 0.0
    for _ in range(_ROUNDS):
        think_s = pauses_s + idle_s
        asked_s = answered_by_one_of_s(graph.active, choices, users, think_s, case.model_s)
        others = asked_s / (2 * case.model_s) - 1
        if graph.active == 2 and case.pace.is_constant:
            # Two workers that ask at the same moment stay synchronised.
            others = (users - 1) / choices
        chances = binomial(round(users) - 1, others)
        busy_s = sum(
            chance * max(compute_s, least * (pauses_s + 2 * case.model_s * (1 + count)))
            for count, chance in enumerate(chances)
        )
        # A worker that has averaged before its gradient is ready sends no requests meanwhile.
        idle_s = max(0.0, busy_s - least * (pauses_s + asked_s))
    mean_rate = (graph.active / busy_s + graph.passive / compute_s) / case.ends
    return split(compute_s, compute_s, alone_s, busy_s, rate=busy_s * mean_rate)


def pull_gossip(case: Case) -> StepParts:
    """c + (2 L + B G) / period, and the delay by other workers that read from the same card."""
    period, compute_s = case.options["period"], case.pace.mean_s
    if case.ends == 1:
        return StepParts(compute_s)
    alone_s = 2 * case.link.latency_s + case.model_s
    think_s = period * compute_s + 2 * case.link.latency_s
    if case.ends == 2 and case.pace.is_constant:
        # Two workers ask each other at the same moment, so neither request waits.
        round_s = think_s + case.model_s
    else:
        round_s = pulled_round_s(case.ends, think_s, case.model_s)
    step_s = round_s / period
    return split(compute_s, compute_s, alone_s / period, step_s)


def push_gossip(case: Case) -> StepParts:
    """c, as no worker waits; if a card cannot carry a model in that time, a queue builds up."""
    compute_s = case.pace.mean_s
    load = case.model_s / (case.options["period"] * compute_s) if case.ends > 1 else 0.0
    return StepParts(compute_s, backlog=load)


def noloco(case: Case) -> StepParts:
    """c + (L + B G) / period: both of a pair wait for the later one, and models cross."""
    period, compute_s = case.options["period"], case.pace.mean_s
    if case.ends == 1:
        return StepParts(compute_s)
    alone_s = case.link.message_s(case.model_bytes) / period
    latest_s = case.pace.latest_sum_s(2, period) / period
    return split(compute_s, latest_s, alone_s, latest_s + alone_s, ignores_jitter=True)


# ---------------------------------------------------------------------- servers


def sync_server(case: Case) -> StepParts:
    """c + 2 (L + q): the first p - b gradients in, then the parameters out to everybody."""
    backups = case.options["backups"]
    if case.pace.is_constant:
        # All gradients arrive at once; those beyond the first p - b are dropped.
        return _in_step(case, 1, 2 * case.crowded_way_s())
    order = case.pace.in_order_s(case.ends)
    latest_s = order[case.ends - backups - 1]
    gathered_s = max(
        _gathered_s(order, case.ends - backups, case.server_s),
        latest_s + case.lone_way_s() - case.link.latency_s,
    )
    step_s = gathered_s + case.link.latency_s + case.crowded_way_s()
    # If late gradients are dropped, the last that counts may come before the mean.
    compute_s = min(case.pace.mean_s, latest_s)
    return split(compute_s, latest_s, 2 * case.lone_way_s(), step_s, ignores_jitter=backups > 0)


def _gathered_s(order: Sequence[float], needed: int, service_s: float) -> float:
    """When the first `needed` gradients have crossed the server's card.

    From the k-th gradient on, for some k, the card is never idle. All gradients that arrive before
    the end share it, including those that will be too late.
    """
    end_s = 0.0
    while True:
        started = sum(start < end_s for start in order)
        count = max(needed, started)
        following_s = max(order[at] + (count - at) * service_s for at in range(needed))
        if following_s <= end_s:
            return end_s
        end_s = following_s


def clock_server(case: Case) -> StepParts:
    """A fresh read at every step: equal workers never differ by the bound."""
    if case.options["bound"] == 0:
        return _in_step(case, 1, 2 * case.crowded_way_s())
    return asynchronous(case)


def asynchronous(case: Case) -> StepParts:
    """A gradient in and the parameters out; workers delay each other at the server's card only."""
    if case.options.get("overlap"):
        return _overlapped(case, 1)
    return _served(case, case.pace.mean_s, 2, 2 * case.link.latency_s, 1)


def hogwild(case: Case) -> StepParts:
    """c + 3 L + 2 q: a read with its request and answer, then the update."""
    return _served(case, case.pace.mean_s, 2, 3 * case.link.latency_s, 1)


def downpour(case: Case) -> StepParts:
    """Per fetch: its answer, and the pushes that computing does not hide."""
    pushes, fetches = case.options["n_push"], case.options["n_fetch"]
    if case.options["warm_start"] or case.options["introduce"]:
        raise NoClosedForm(
            "downpour with warm_start or introduce has no closed form, as its pace changes during "
            "the run; leave them out, or simulate it"
        )
    if pushes == fetches and case.options["overlap"]:
        return _overlapped(case, pushes)
    if case.options["overlap"]:
        raise NoClosedForm(
            f"downpour with overlap has no closed form for n_push={pushes} and n_fetch={fetches}; "
            "make them equal, or simulate it"
        )
    if pushes == fetches:
        return _served(case, pushes * case.pace.mean_s, 2, 2 * case.link.latency_s, pushes)
    if fetches % pushes == 0:
        return _pushed_meanwhile(case, fetches, pushes)
    if pushes % fetches:
        raise NoClosedForm(
            f"downpour has no closed form where neither of n_push={pushes} and n_fetch={fetches} "
            "divides the other; choose one that does, or simulate it"
        )
    between = pushes // fetches
    ways_s = (between + 1) * case.crowded_way_s() + (between - 1) * case.link.latency_s
    return _in_step(case, pushes, ways_s, ignores_jitter=True)


def ssp(case: Case) -> StepParts:
    """A push at every step, and a read if the cache is older than the bound."""
    if case.options["overlap"]:
        raise NoClosedForm(
            "ssp with overlap has no closed form, as its reads begin by what the last one brought; "
            "leave out overlap, or simulate it"
        )
    return _pushed_meanwhile(case, case.options["bound"] + 1, 1)


def easgd(case: Case) -> StepParts:
    """Per period: max(tau c, q) + 2 L + q, as the worker computes during the push."""
    period, latency_s = case.options["period"], case.link.latency_s
    if case.options["synchronous"]:
        meetings_s = 2 * case.all_reduce_s(case.workload.scalar_bytes)
        ways_s = 2 * case.crowded_way_s() + latency_s + meetings_s
        return _in_step(case, period, ways_s)
    compute_s = period * case.pace.mean_s
    way_s = case.crowded_way_s() - latency_s
    if case.pace.is_constant or way_s >= case.pace.latest_sum_s(case.ends, period):
        # If the pushes take longer than computing, the workers stay together.
        _refuse_unequal_places(case)
        round_s = max(compute_s, way_s) + 2 * latency_s + way_s
        alone_s = latency_s + case.lone_way_s()
        return split(case.pace.mean_s, case.pace.mean_s, alone_s / period, round_s / period)
    return _served(case, compute_s, 1, 2 * latency_s, period)


def async_diloco(case: Case) -> StepParts:
    """Per period: a displacement in and the model out, which delay others at the card only."""
    period = case.options["period"]
    return _served(case, period * case.pace.mean_s, 2, 2 * case.link.latency_s, period)


def decoupled_diloco(case: Case) -> StepParts:
    """c, as no learner waits; if the server's card cannot carry all models, a queue builds up."""
    compute_s = case.pace.mean_s
    load = case.ends * case.server_s / (case.options["period"] * compute_s)
    return StepParts(compute_s, backlog=load)


def _in_step(case: Case, steps: int, ways_s: float, *, ignores_jitter: bool = False) -> StepParts:
    """All workers compute this many steps, then wait for each other and for the server."""
    latest_s = case.pace.latest_sum_s(case.ends, steps) / steps
    alone_s = min(ways_s, 2 * case.lone_way_s()) / steps
    return split(
        case.pace.mean_s, latest_s, alone_s, latest_s + ways_s / steps,
        ignores_jitter=ignores_jitter and not case.pace.is_constant,
    )  # fmt: skip


def _served(case: Case, compute_s: float, ways: int, latency_s: float, steps: int) -> StepParts:
    """Rounds of computing and of transfers through the servers' cards, together or dispersed."""
    _refuse_unequal_places(case)
    lone_s = case.lone_way_s() - case.link.latency_s
    alone_s = latency_s + ways * lone_s
    if case.pace.is_constant:
        round_s = compute_s + latency_s + ways * (case.crowded_way_s() - case.link.latency_s)
    else:
        # The time at the worker's own card does not delay other workers.
        think_s = compute_s + latency_s + ways * (lone_s - case.server_s)
        round_s = think_s + response_s(case.ends, think_s, [case.server_s] * ways)
    mean_s = case.pace.mean_s
    return split(mean_s, mean_s, alone_s / steps, round_s / steps)


def _overlapped(case: Case, steps: int) -> StepParts:
    """A push and its answer beside the next step: max(c, q, (c + 2 (L + q)) / 2), as two pushes of
    a worker may be on their way; after n > 1 steps n c and what of 2 (L + q) is beyond c."""
    _refuse_unequal_places(case)
    compute_s, way_s = case.pace.mean_s, case.crowded_way_s()
    if steps == 1:
        step_s = max(compute_s, way_s - case.link.latency_s, (compute_s + 2 * way_s) / 2)
    else:
        step_s = compute_s + max(0.0, 2 * way_s - compute_s) / steps
    alone_s = 2 * case.lone_way_s() / steps
    return split(compute_s, compute_s, alone_s, step_s, ignores_jitter=True)


def _pushed_meanwhile(case: Case, steps: int, between: int) -> StepParts:
    """A push in the background after every `between` steps, and a read after all `steps`.

    The request of the read follows the last push on the same connection: L + max(n c + q, c + m q)
    for m pushes in n steps, then L + q for the answer.
    """
    way_s = case.crowded_way_s() - case.link.latency_s
    compute_s, pushes = steps * case.pace.mean_s, steps // between
    pauses_s = 2 * case.link.latency_s
    if case.pace.is_constant:
        pushed_s = max(compute_s + way_s, compute_s / pushes + pushes * way_s)
        round_s = pushed_s + way_s + pauses_s
    else:
        # A card that is never idle carries all pushes of all workers in a round.
        think_s = compute_s + pauses_s + 2 * (case.lone_way_s() - case.link.latency_s)
        think_s -= 2 * case.server_s
        response = response_s(case.ends, think_s, [case.server_s] * 2)
        round_s = max(think_s + response, pushes * way_s)
    return split(
        case.pace.mean_s, case.pace.mean_s, 2 * case.lone_way_s() / steps, round_s / steps,
        ignores_jitter=True,
    )  # fmt: skip


def _refuse_unequal_places(case: Case) -> None:
    others = sorted(case.shards)[-2:-1] or [0.0]
    if case.servers_on_workers and case.ends > 1 and others[0] < 0.95 * max(case.shards):
        raise NoClosedForm(
            "a server with the largest part of the model on a worker's machine has no closed form, "
            "as that worker is served sooner and gets ahead of the others; use placement=own or "
            "equal parts, or simulate it"
        )


FORMS: dict[str, Form] = {
    "all_reduce": all_reduce,
    "d_psgd": d_psgd,
    "gradient_tracking": gradient_tracking,
    "d2": after_the_step,
    "qg_dsgdm": after_the_step,
    "relay_sgd": after_the_step,
    "ad_psgd": ad_psgd,
    "pull_gossip": pull_gossip,
    "push_gossip": push_gossip,
    "push_sum": push_sum,
    "easgd": easgd,
    "eamsgd": easgd,
    "sync_server": sync_server,
    "backup_workers": sync_server,
    "ssp": ssp,
    "bounded_delay": clock_server,
    "softsync": asynchronous,
    "staleness_aware": asynchronous,
    "dc_asgd": asynchronous,
    "hogwild": hogwild,
    "downpour": downpour,
    "local_sgd": local,
    "hierarchical_sgd": hierarchical,
    "bmuf": local,
    "slowmo": local,
    "diloco": local,
    "async_diloco": async_diloco,
    "decoupled_diloco": decoupled_diloco,
    "noloco": noloco,
    "ensemble": ensemble,
}
"""The closed form of each method; a method without one is simulated."""

COLLECTIVE_ONLY = frozenset({"all_reduce", "local_sgd", "bmuf", "slowmo", "diloco", "ensemble"})
"""Methods that use collectives only, for which the forms also cover machines and racks."""
