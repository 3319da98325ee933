"""Laws of outer loops: local steps, a meeting, a merge, an outer step, and what a worker adopts.

Each of them holds for methods of the family "local updates" whose options fulfil its hypotheses;
`OUTER_LAWS` says for which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer.compression import parse_compressor
from gossamer.contract.small_worlds import Ones, build, centre, cluster_of, pieces, rows, scatter
from gossamer.contract.storms import require
from gossamer.methods import MethodSpec, parse_method
from gossamer.sim.simulation import Simulation

_PLAIN = {
    "outer_rate": 1.0, "outer_momentum": 0.0, "alpha": 1.0, "beta": 0.0, "zeta": 1.0,
    "block_momentum": 0.0, "state": "local", "fragments": 1, "delay": 0, "mix": 0.0,
}  # fmt: skip
"""Rate 1, no momentum, and the whole model at once, in the words of every method."""
_PERIOD, _STEPS = 3, 12


def plain(spec: MethodSpec, period: int) -> MethodSpec:
    """The same method with nothing but averages, and nothing lost on the way."""
    known = spec.method.defaults()
    chosen: dict[str, Any] = {key: value for key, value in _PLAIN.items() if key in known}
    both = {key: period for key in ("period", "inner") if key in known}
    whole = (
        parse_compressor("topk:share=1,scope=global") if spec.method.default_compressor else None
    )
    return dataclasses.replace(spec, options={**chosen, **both}, compressor=whole)


def _trained(spec: MethodSpec, **choices: Any) -> Tensor:
    """Where the workers end, by true gradients of a quadratic."""
    usual: dict[str, Any] = {
        "learning_rate": 0.05,
        "optimiser": "sgd",
        "engine": "loop",
        "evaluations": 1,
    }
    simulation = build(
        pieces(3, 2, 1), spec, cluster_of(4), steps=_STEPS, **(usual | choices)
    )  # fmt: skip
    simulation.run()
    return rows(simulation)


def is_all_reduce(spec: MethodSpec) -> str:
    """With a period of 1, rate 1 and no momentum, models are averaged as gradients would be."""
    apart = _trained(plain(spec, 1)) - _trained(parse_method("all_reduce"))
    most = float(apart.abs().max())
    require(most < 1e-4, f"it ends {most:.2g} away from all_reduce")
    return f"within {most:.1g}"


def is_local_sgd(spec: MethodSpec) -> str:
    """With rate 1 and no momentum every outer optimiser is plain periodic averaging: bit for bit,
    unless it sends differences, which are added to the last common model again."""
    known = _trained(parse_method(f"local_sgd:period={_PERIOD}"), optimiser="sgd:momentum=0.9")
    found = _trained(plain(spec, _PERIOD), optimiser="sgd:momentum=0.9")
    if not spec.method.default_compressor:
        require(torch.equal(found, known), "its bits are not those of local_sgd")
        return "bit for bit"
    most = float((found - known).abs().max())
    require(most < 1e-4, f"it ends {most:.2g} away from local_sgd")
    return f"within {most:.1g}"


def one_fragment_is_the_model(spec: MethodSpec) -> str:
    """However the model is divided, in one fragment it meets as if it were not divided."""
    options = {key: value for key, value in spec.options.items() if key != "by"}
    whole = _trained(dataclasses.replace(spec, options=options | {"fragments": 1}))
    for division in ("balanced", "sequential", "strided"):
        one = dataclasses.replace(spec, options={**options, "fragments": 1, "by": division})
        require(torch.equal(_trained(one), whole), f"by={division} changes its bits")
    return "whichever way it is divided"


def meets_once_a_period(spec: MethodSpec) -> str:
    """Every fragment meets once in every period, and the next one at least floor(H / F) steps
    later, so that with a smaller delay no two are on the wire at once."""
    period, count, periods = 6, 3, 4
    options = {**spec.options, "period": period, "fragments": count, "delay": 1}
    divided = dataclasses.replace(spec, options=options, compressor=None)
    simulation = build(
        pieces(3, 2, 1), divided, cluster_of(4), steps=period * periods, engine="none"
    )
    world = simulation.world
    met: list[tuple[int, int]] = []
    usual = world.collectives.join

    def watched(kind: str, rank: int, value: Tensor, *rest: Any) -> Any:
        if rank == 0 and kind == "all_reduce":
            met.append((world.steps_of(0), value.numel()))
        return usual(kind, rank, value, *rest)

    setattr(world.collectives, "join", watched)  # noqa: B010 - of this one world
    simulation.run()
    for first in range(0, len(met), count):
        sizes = sorted(size for _, size in met[first : first + count])
        require(sizes == [1, 2, 3], f"a period's meetings have {sizes} numbers, expected 1, 2, 3")
    require(len(met) == count * periods, f"{len(met)} meetings in {periods} periods")
    gaps = [after[0] - before[0] for before, after in pairwise(met)]
    require(min(gaps) >= period // count, f"two meetings began {min(gaps)} steps apart")
    return f"{len(met)} meetings in {periods} periods"


def begins_from_one_model(spec: MethodSpec) -> str:
    """All workers and the centre begin with the same bits."""
    simulation = build(pieces(3, 2, 1), spec, cluster_of(4), steps=8, engine="none")
    first = rows(simulation)
    require(bool((first == first[0]).all()), "the workers' first models differ")
    if simulation.world.servers:
        apart = float((centre(simulation) - first[0]).abs().max())
        require(apart == 0.0, f"the servers begin {apart:.2g} away from the workers")
    simulation.run()
    return "the same bits at all ends"


def agrees_on_one_model(spec: MethodSpec) -> str:
    """From one start, all workers hold the same outer model after every meeting, whatever each has
    made of it since."""
    simulation = _run_apart(spec)
    memories = [replica.memory.get("start") for replica in simulation.world.replicas]
    models = [one for one in memories if one is not None]
    found = torch.stack(models) if len(models) == len(memories) else rows(simulation)
    apart = float((found - found[0]).abs().max())
    require(apart == 0.0, f"the workers' outer models differ by {apart:.2g}")
    return "the same bits on all workers"


def _run_apart(spec: MethodSpec) -> Simulation:
    """A run whose workers go different ways, which ends with a meeting."""
    period = int(spec.resolve(4, 100)["period"])
    simulation = build(
        pieces(3, 2, 1), spec, cluster_of(4), steps=4 * period, engine="loop", evaluations=1,
        optimiser="sgd:momentum=0.9", learning_rate=0.05, split="sharded",
    )  # fmt: skip
    require(
        bool((rows(simulation) == rows(simulation)[0]).all()), "the workers' first models differ"
    )
    simulation.run()
    return simulation


def stands_still(spec: MethodSpec) -> str:
    """Without gradients (and without weight decay) nothing moves."""
    simulation = build(pieces(3, 2, 1), spec, cluster_of(4), steps=40, engine="none")
    holders = centre if simulation.world.servers else rows
    before = holders(simulation).clone()
    simulation.run()
    moved = float((holders(simulation) - before).abs().max())
    require(moved < 1e-6, f"it moved by {moved:.2g}")
    return f"moved by {moved:.1g}"


def moves_along(spec: MethodSpec) -> str:
    """If every worker moves down, so does the outer model, and by no more than momentum explains:
    a displacement of the wrong sign would move it up."""
    simulation = build(
        pieces(3, 2, 1), spec, cluster_of(4), steps=80, own_engine=Ones(), engine="none",
        optimiser="sgd", learning_rate=0.01, evaluations=1,
    )  # fmt: skip
    holders = centre if simulation.world.servers else rows
    before = holders(simulation).clone()
    simulation.run()
    moved = (holders(simulation) - before) / (0.01 * 80)
    most, least = float(moved.max()), float(moved.min())
    require(most <= 1e-6 and least < -1e-3, f"it moves by {most:.2g} along every worker's step")
    return f"{float(-moved.mean()):.2f} of the way of a worker alone"


def counts_steps(spec: MethodSpec) -> str:
    """The period counts steps of the optimiser: larger batches change nothing in what travels."""

    def sent(batch: int) -> float:
        simulation = build(
            pieces(64, 64), spec, cluster_of(4), steps=60, batch=batch, engine="none"
        )
        scatter(simulation)
        return simulation.run().bytes_per_step

    small, large = sent(2), sent(8)
    require(
        abs(small - large) <= 0.02 * small,
        f"{small:.4g} bytes a step with a batch of 2, {large:.4g} with one of 8",
    )
    return f"{small:.4g} bytes a step with any batch"


def _is_outer(spec: MethodSpec) -> bool:
    return spec.method.family == "local updates"


def _all_meet(spec: MethodSpec) -> bool:
    return _is_outer(spec) and spec.method.promises.waits_for == "everyone" and not spec.groups


def _has_fragments(spec: MethodSpec) -> bool:
    return (
        _is_outer(spec) and {"fragments", "by"} <= spec.method.defaults().keys() and _all_meet(spec)
    )


OUTER_LAWS: dict[str, tuple[Callable[[MethodSpec], str], Callable[[MethodSpec], bool]]] = {
    "all_reduce at period 1": (is_all_reduce, _all_meet),
    "local_sgd at rate 1": (is_local_sgd, _all_meet),
    "one fragment is the model": (one_fragment_is_the_model, _has_fragments),
    "every fragment meets once a period": (meets_once_a_period, _has_fragments),
    "begins from one model": (begins_from_one_model, _is_outer),
    "one outer model after a meeting": (agrees_on_one_model, _all_meet),
    "nothing moves without gradients": (stands_still, _is_outer),
    "moves the way its workers went": (moves_along, _is_outer),
    "the period counts steps": (counts_steps, _is_outer),
}
"""Each law, and for which methods with which options it holds."""
