"""Every promise of a method's row, as a law: what holds if the promise is kept.

A law takes a method with its options and returns in a few words what was found; a promise that is
broken raises `BrokenPromise`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.config.faults import Fault
from gossamer.contract.outer_laws import OUTER_LAWS
from gossamer.contract.small_worlds import (
    Ones,
    bowl,
    build,
    centre,
    cluster_of,
    digits,
    pieces,
    racing,
    rows,
    scatter,
    total,
    watch_end,
)
from gossamer.contract.storms import require, weather
from gossamer.errors import Error
from gossamer.methods import WAITS_FOR, MethodSpec
from gossamer.precision import threads_of
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import simulate
from gossamer.tasks import make_sampler

MODEL_BYTES = 1_000_000
SLOW = 20
LEAST_ACCURACY = 0.93


def trains(spec: MethodSpec) -> str:
    """At its defaults, the output model gets 93 % of the test digits right on eight workers."""
    result = simulate(digits(), spec, "equal-8", seed=3, evaluations=1)
    found = f"{100 * result.accuracy:.1f} % of the test digits"
    require(result.accuracy >= LEAST_ACCURACY, f"{found}, expected at least 93 %")
    return found


def is_fixed_by_its_seed(spec: MethodSpec) -> str:
    """The same seed gives the same events and the same bits, another seed other events."""

    def digests(seed: int) -> tuple[str, str]:
        result = build(bowl(), spec, racing(5), steps=8, seed=seed, engine="loop").run()
        return result.digest, result.parameters_digest

    require(
        digests(1) == digests(1),
        "two runs with one seed differ; draw from w.rng, and take time from w.now()",
    )
    require(digests(1)[0] != digests(2)[0], "runs with two seeds have the same events")
    return "the same bits twice"


def is_clipped(spec: MethodSpec) -> str:
    """With next to no length allowed, gradients leave the models where they began, though without
    that bound they move them."""

    def moved(clip: float | None) -> float:
        simulation = build(
            pieces(4), spec, cluster_of(3), steps=4, own_engine=Ones(), engine="none",
            learning_rate=0.1, optimiser="sgd", clip=clip,
        )  # fmt: skip
        holders = centre if simulation.world.servers else rows
        before = holders(simulation).clone()
        simulation.run()
        return float((holders(simulation) - before).abs().max())

    bound, free = moved(1e-7), moved(None)
    require(
        bound < 1e-5 < 1e-3 < free,
        f"the models moved by {bound:.2g} with a clip of 1e-7 and by {free:.2g} without; apply "
        "gradients by x.descend_()",
    )
    return "gradients are applied by descend_"


def keeps_mean(spec: MethodSpec) -> str:
    """With zero gradients the sum of replicas (with the centre) stays, under every race; where the
    row does not promise it, the sum is seen to change."""
    is_promised, largest = spec.method.promises.keeps_mean, 0.0
    for seed in range(3):
        simulation = build(bowl(), spec, racing(8), steps=12, seed=seed, engine="none")
        scatter(simulation, seed)
        before = total(simulation)
        simulation.run()
        change = float(((total(simulation) - before) / before).abs().max())
        largest = max(largest, change)
        if is_promised:
            require(
                change < 1e-5,
                f"exchanges moved the mean by {100 * change:.2g} % (seed {seed}); add what the "
                "other loses, and never assign a value computed from an old snapshot",
            )
        else:
            require(change > 1e-3, "the mean is kept although the row says it is not")
    return f"the mean moved by {100 * largest:.2g} %"


def puts_models_on_the_network(spec: MethodSpec) -> str:
    """Bytes per step are the row's formula times the size of a model, within 5 %; where it is a
    bound, no more than that, and not less than half of it."""
    # What an encoding leaves of a small vector is mostly its header.
    dimension, size = (64, MODEL_BYTES) if spec.compressor is None else (32768, None)
    simulation = build(
        bowl(dimension), spec, cluster_of(8), steps=100, engine="none", model_bytes=size
    )
    sent = simulation.run().bytes_per_step / (size or 4 * dimension)
    promises = spec.method.promises
    options = simulation.settings.method.resolve(8, 100)
    if spec.compressor is not None:
        layout = simulation.world.layout
        options["compressed"] = spec.compressor.size(layout) / (4 * layout.total)
    expected = promises.models_per_step(8, options)
    found = f"{sent:.3g} models a step, promised {expected:.3g}"
    if promises.is_traffic_a_bound:
        require(0.5 * expected <= sent <= 1.05 * expected, found)
    else:
        require(abs(sent - expected) <= max(0.05 * expected, 1e-6), found)
    return found


def is_delayed_by_whom_it_waits_for(spec: MethodSpec) -> str:
    """With one worker 20 times slower, who waits for everyone or for neighbours takes 20 times as
    long; who waits for a partner, a server or nobody takes at most 25 % longer."""

    def seconds(*faults: Fault) -> float:
        cluster = cluster_of(8, jitter=0.02, latency=1e-6, faults=faults)
        return build(bowl(), spec, cluster, steps=100, engine="none").run().virtual_seconds

    equal, said = seconds(), spec.method.promises.waits_for
    ratio = 0.0
    for rank in (3, 4):
        ratio = seconds(Fault("slow", worker=rank, amount=SLOW)) / equal
        found = f"one worker {SLOW} times slower: the run takes {ratio:.2f} times as long"
        if WAITS_FOR[said]:
            require(abs(ratio - SLOW) <= 0.1 * SLOW, f"{found}, though it waits for {said}")
        else:
            require(1.0 < ratio < 1.25, f"{found}, though it waits for {said}")
    return f"{ratio:.2f} times as long with one {SLOW} times slower"


def survives_death(spec: MethodSpec, victim: int | None = None) -> str:
    """The run ends, the others do the victim's share, nobody hangs."""
    for one in (0, 5) if victim is None else (victim,):
        cluster = cluster_of(6, faults=[Fault("kill", at=0.15, worker=one)])
        simulation = build(bowl(), spec, cluster, steps=40, engine="none")
        result = simulation.run()
        budget = simulation.world.budget
        own = [account.steps for account in simulation.world.metrics.workers.values()]
        more = budget.processed - budget.samples
        is_shared = own[one] < 20 and all(made > 40 for r, made in enumerate(own) if r != one)
        require(
            result.living == 5 and is_shared and 0 <= more < 5 * budget.batch,
            f"after the death of worker {one}, {result.living} of 5 live and steps are {own}",
        )
    return "the others do the dead one's share"


def trains_exactly_its_samples(spec: MethodSpec, workers: int | None = None) -> str:
    """As many gradients as the samples need, whoever is slow: none begins after the last of them
    was there, and what changes afterwards the end of the run waits for."""
    for size in range(1, 6) if workers is None else (workers,):
        for seed in range(2):
            slow = Fault("slow", worker=seed % size, amount=7)
            cluster = cluster_of(size, distribution="exponential", latency=4e-3, faults=[slow])
            simulation = build(bowl(), spec, cluster, steps=8, seed=seed, engine="none")
            changed, begun, delivered = watch_end(simulation)
            result = simulation.run()
            require(
                result.steps == 8 * size and result.samples == simulation.settings.samples,
                f"{size} workers made {result.steps} steps, expected {8 * size}",
            )
            require(max(begun) <= max(delivered), "a gradient begins after the last was there")
            require(
                max(changed) <= round(result.virtual_seconds * SECOND),
                "a replica changes after the end of the run",
            )
    return "from one to five workers"


def counts_staleness(spec: MethodSpec) -> str:
    """Each gradient that is applied counts once; where the row says 0, none is stale."""
    simulation = build(bowl(), spec, cluster_of(8), steps=80, engine="none")
    result = simulation.run()
    counted = sum(result.staleness.values())
    applied = result.steps - result.dropped_gradients
    require(counted == applied, f"{counted} gradients are counted as applied, expected {applied}")
    found = f"mean {result.mean_staleness:.2f}, greatest {result.max_staleness}"
    if spec.method.promises.staleness in ("0", "stale"):
        require(result.max_staleness == 0, f"{found}, promised 0")
    return found


def is_plain_alone(spec: MethodSpec) -> str:
    """With one worker: same seed, same batches, same bits as torch.optim.SGD with momentum and
    weight decay."""
    seed, batch, steps, rate, momentum, decay = 11, 16, 25, 0.05, 0.9, 1e-3
    task = digits()
    simulation = build(
        task, spec, cluster_of(1), steps=steps, batch=batch, seed=seed, engine="loop",
        learning_rate=rate, optimiser=f"sgd:momentum={momentum},weight_decay={decay}",
        evaluations=1,
    )  # fmt: skip
    result = simulation.run()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.make_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    sampler = make_sampler(task.train.labels, 1, batch, "shuffled", seed, True)
    with threads_of(simulation.settings.threads):
        for _ in range(steps):
            inputs, targets = task.train.at(torch.from_numpy(sampler.next(0)))
            optimiser.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimiser.step()
    plain: Tensor = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert result.parameters is not None
    apart = float((result.parameters - plain).abs().max())
    require(
        torch.equal(result.parameters, plain),
        f"with one worker it ends {apart:.2g} away from plain PyTorch; if its paper says so, "
        "promise is_plain_alone=False",
    )
    return "bit for bit plain PyTorch"


def runs_between_groups(spec: MethodSpec) -> str:
    """The budget of samples is met by all members together, and the groups' leaders speak."""
    nodes = cluster_of(8, workers_per_machine=4)
    two = dataclasses.replace(spec, groups=2)
    simulation = build(bowl(), two, nodes, steps=8, engine="none")
    result = simulation.run()
    own = [account.steps for account in simulation.world.metrics.workers.values()]
    is_even = own[:4] == [own[0]] * 4 and own[4:] == [own[4]] * 4
    require(
        is_even and result.samples >= simulation.settings.samples,
        f"two groups of four made {own} steps and {result.samples} samples",
    )
    return "two groups of four"


def weathers_storms(spec: MethodSpec, storms: int = 20) -> str:
    """Random plans of faults: nothing crashes, nobody hangs, twice the same story."""
    for seed in range(storms):
        weather(spec, seed, twice=seed % 4 == 0)
    return f"{storms} storms"


def outlives_partitions(spec: MethodSpec, storms: int = 10) -> str:
    """A partition that does not heal stalls nobody: the run finishes or names it."""
    for seed in range(20, 20 + storms):
        weather(spec, seed, kills=2, twice=False, heals=False)
    return f"{storms} storms with partitions that do not heal"


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class PromiseFinding:
    """What came of one promise."""

    promise: str
    is_kept: bool | None
    """None: the row does not promise it."""
    found: str


LAWS: dict[str, Callable[[MethodSpec], str]] = {
    "trains the digits on eight workers": trains,
    "a seed fixes the run": is_fixed_by_its_seed,
    "what it applies is clipped": is_clipped,
    "keeps the mean": keeps_mean,
    "models sent per step": puts_models_on_the_network,
    "waits for": is_delayed_by_whom_it_waits_for,
    "survives a death": survives_death,
    "trains exactly its samples": trains_exactly_its_samples,
    "staleness": counts_staleness,
    "plain training with one worker": is_plain_alone,
    "runs between groups": runs_between_groups,
    "weathers storms of faults": weathers_storms,
    "outlives partitions": outlives_partitions,
    **{promise: law for promise, (law, _) in OUTER_LAWS.items()},
}
_PROMISED: dict[str, Callable[[MethodSpec], bool]] = {
    "what it applies is clipped": lambda spec: not spec.method.normalises,
    "survives a death": lambda spec: spec.method.promises.survives_death,
    "weathers storms of faults": lambda spec: spec.method.promises.survives_death,
    "outlives partitions": lambda spec: spec.method.promises.survives_death,
    "plain training with one worker": lambda spec: spec.method.promises.is_plain_alone,
    **{promise: holds for promise, (_, holds) in OUTER_LAWS.items()},
}


def check(spec: MethodSpec, promise: str) -> PromiseFinding:
    """Look whether a method keeps one promise of its row."""
    if not _PROMISED.get(promise, lambda spec: True)(spec):
        return PromiseFinding(promise, None, "not promised")
    try:
        return PromiseFinding(promise, True, LAWS[promise](spec))
    except Error as error:
        return PromiseFinding(promise, False, " ".join(str(error).split()))
