"""Laws of the methods for workers whose data differ: what each computes, compared with the same
recursion written with dense matrices, and where it comes to rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer import simulate
from gossamer.config.faults import Fault
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.runs.statistics import interval
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.sim.simulation import Simulation
from gossamer.tasks.split import shares
from gossamer.topology import Topology, make_topology
from support import (
    batches,
    before_each_descent,
    bowl,
    bowl_gradient,
    build,
    cluster_of,
    rows,
    scatter,
)
from tiers import wide

RATE = 0.05
few = examples(max_examples=8)
seeds = st.integers(0, 999)


def run_from_apart(
    method: str, workers: int, seed: int, **choices: object
) -> tuple[Tensor, Tensor]:
    """Where all replicas began and ended, with true gradients and plain SGD."""
    given_choices = {"optimiser": "sgd", "learning_rate": RATE, "engine": "loop", **choices}
    simulation = build(
        bowl(), method, cluster_of(workers, jitter=0.5), steps=6, seed=seed, **given_choices
    )
    scatter(simulation, seed)
    start = rows(simulation).clone()
    simulation.run()
    return start, rows(simulation)


def gradients_of(workers: int, seed: int) -> Callable[[Tensor], Tensor]:
    """The gradients of all workers on their next batches."""
    draw = batches(bowl(), workers, 4, seed)
    return lambda x: torch.stack([bowl_gradient(bowl(), x[r], draw(r)) for r in range(workers)])


def mixing(topology: str, workers: int) -> Tensor:
    return torch.from_numpy(make_topology(topology, workers).matrix())


@few
@given(st.sampled_from(["ring", "star", "exponential"]), st.integers(2, 7), seeds)
def test_gradient_tracking_is_its_recursion(topology: str, workers: int, seed: int) -> None:
    """X <- W X - eta Q and Q <- W Q + G(X_new) - G(X_old), from Q = G."""
    x, end = run_from_apart(f"gradient_tracking:topology={topology}", workers, seed)
    gradients, w = gradients_of(workers, seed), mixing(topology, workers)
    last = tracked = torch.zeros_like(x)
    for _ in range(6):
        now = gradients(x)
        tracked = w @ tracked + now - last
        last, x = now, w @ x - RATE * tracked
    torch.testing.assert_close(end, x, rtol=1e-4, atol=1e-5)


@few
@given(st.sampled_from(["ring", "star", "complete", "chain"]), st.integers(2, 7), seeds)
def test_d2_is_its_recursion(topology: str, workers: int, seed: int) -> None:
    """X <- V (2 X - X_old - eta G + eta G_old), where V is W with its least eigenvalue lifted to
    zero by as much of the identity as that takes."""
    x, end = run_from_apart(f"d2:topology={topology}", workers, seed)
    gradients, w = gradients_of(workers, seed), mixing(topology, workers)
    lowest = min(0.0, float(torch.linalg.eigvalsh(w)[0]))
    lifted = (w - lowest * torch.eye(workers)) / (1 - lowest)
    assert float(torch.linalg.eigvalsh(lifted)[0]) > -1e-6
    before, last = x, torch.zeros_like(x)
    for step in range(6):
        now = gradients(x)
        ahead = x - RATE * now if step == 0 else 2 * x - before - RATE * now + RATE * last
        before, last, x = x, now, lifted @ ahead
    torch.testing.assert_close(end, x, rtol=1e-4, atol=1e-5)


@few
@given(st.integers(1, 7), seeds, st.sampled_from([0.5, 0.9]))
def test_quasi_global_momentum_is_its_recursion(workers: int, seed: int, mu: float) -> None:
    """X <- W (X - eta (G + 0.9 M)) and M <- mu M + (1 - mu) (X_old - X) / eta; SGD's own momentum
    has no part in it."""
    optimiser = "sgd:momentum=0.5"
    x, end = run_from_apart(f"qg_dsgdm:mu={mu}", workers, seed, optimiser=optimiser)
    gradients, w = gradients_of(workers, seed), mixing("ring", workers)
    velocity = torch.zeros_like(x)
    for _ in range(6):
        mixed = w @ (x - RATE * (gradients(x) + 0.9 * velocity))
        velocity = mu * velocity + (1 - mu) * (x - mixed) / RATE
        x = mixed
    torch.testing.assert_close(end, x, rtol=1e-4, atol=1e-5)


def hops(graph: Topology) -> Tensor:
    """How many links lie between each two members."""
    size = len(graph.members)
    linked = torch.from_numpy(graph.matrix()) > 0
    reached, far = torch.eye(size, dtype=torch.bool), torch.zeros(size, size, dtype=torch.long)
    for _ in range(size):
        far += ~reached
        reached = (reached.double() @ linked.double()) > 0
    return far


@few
@given(st.sampled_from(["binary_tree", "chain", "star"]), st.integers(2, 7), seeds)
def test_relay_sgd_averages_models_that_are_as_old_as_they_are_far(
    topology: str, workers: int, seed: int
) -> None:
    """x_i <- 1/n sum over j of the model that j had, after its local step, as many rounds ago as
    there are workers between them; before it is heard of, the own one stands for it."""
    x, end = run_from_apart(f"relay_sgd:topology={topology}", workers, seed)
    gradients = gradients_of(workers, seed)
    ages = (hops(make_topology(topology, workers)) - 1).clamp(min=0)
    stepped: list[Tensor] = []
    for t in range(6):
        stepped.append(x - RATE * gradients(x))
        x = torch.stack([
            torch.stack([
                stepped[t - age][j] if (age := int(ages[i, j])) <= t else stepped[t][i]
                for j in range(workers)
            ]).mean(0)
            for i in range(workers)
        ])  # fmt: skip
    torch.testing.assert_close(end, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 5, 8])
@pytest.mark.parametrize("topology", ["binary_tree", "chain", "star"])
def test_relaying_is_exact_after_as_many_rounds_as_the_tree_is_wide(
    topology: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the models stand still, every worker has heard of all n of them after `diameter`
    rounds, counts say so, and what it computes is their exact mean; a round before it is not."""
    rounds = int(hops(make_topology(topology, workers)).max())
    simulation = build(
        bowl(), f"relay_sgd:topology={topology}", cluster_of(workers), steps=rounds, engine="none"
    )
    scatter(simulation)
    start = rows(simulation).clone()
    computed: list[list[Tensor]] = [[] for _ in range(workers)]
    counted = [0] * workers

    def keep(replica: SimulatedReplica, value: Tensor) -> None:
        computed[replica.row].append(value.double())
        counts = [int(m) for name, m in replica.memory.items() if "count" in name]
        counted[replica.row] = 1 + sum(counts)

    monkeypatch.setattr(SimulatedReplica, "assign_", keep)
    simulation.run()
    last = torch.stack([values[-1] for values in computed])
    mean = start.mean(0).expand_as(start)
    assert counted == [workers] * workers
    torch.testing.assert_close(last, mean, rtol=1e-5, atol=1e-6)
    if rounds > 1:
        assert (torch.stack([values[-2] for values in computed]) - mean).abs().max() > 1e-3


# ---------------------------------------------------------------------- what is kept, and deaths


def directions(simulation: Simulation) -> list[tuple[Tensor, Tensor]]:
    """While it runs: the mean direction and the mean gradient of those who make a step."""
    world = simulation.world
    found: list[tuple[Tensor, Tensor]] = []

    def look() -> None:
        living = [world.replicas[rank].memory for rank in sorted(world.alive)]
        if all("direction" in memory for memory in living):
            means = [torch.stack([m[what] for m in living]).mean(0) for what in
                     ("direction", "gradient")]  # fmt: skip
            found.append((means[0], means[1]))

    steps: dict[int, int] = {}

    def note(replica: object, _: object) -> None:
        made = steps[id(replica)] = steps.get(id(replica), 0) + 1
        alive = [steps.get(id(world.replicas[rank]), 0) for rank in world.alive]
        if alive == [made] * len(alive):
            look()  # all of them have made this step, and none the next

    before_each_descent(simulation, note)
    simulation.run()
    return found


@pytest.mark.parametrize("deaths", [0, 1])
def test_the_mean_of_what_is_tracked_is_the_mean_gradient(deaths: int) -> None:
    """At every step, whatever the data; and again for the survivors of a death."""
    faults = [Fault("kill", at=0.155, worker=2)][:deaths]
    simulation = build(
        bowl(), "gradient_tracking", cluster_of(5, faults=faults), steps=40, split="sharded",
        optimiser="sgd", learning_rate=RATE, engine="loop",
    )  # fmt: skip
    scatter(simulation)
    found = directions(simulation)
    assert len(found) >= 20
    exact = [torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in found]
    # Between the death and the round from which all leave the dead out, its part is missing.
    assert sum(not one for one in exact) <= 2 * deaths
    assert all(exact[-10:])


def test_the_mean_of_d2_follows_plain_sgd_after_a_death_too() -> None:
    """With zero gradients the survivors' mean stands still once the dead is left out; without the
    new beginning it would move by the same step for ever."""
    fault = Fault("kill", at=0.205, worker=1)

    def mean_after(steps: int) -> Tensor:
        simulation = build(
            bowl(), "d2", cluster_of(4, faults=[fault]), steps=steps, engine="none",
        )  # fmt: skip
        scatter(simulation)
        simulation.run()
        return rows(simulation)[[0, 2, 3]].mean(0)

    torch.testing.assert_close(mean_after(30), mean_after(60), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- where they come to rest


def distance_to_the_optimum(method: str, rate: float = 0.2) -> float:
    """After 500 steps with the whole of each worker's own data as its batch."""
    workers = 4
    task = bowl()
    dealt = shares(task.train.targets, workers, "by_class", 3)
    simulation = build(
        task, method, cluster_of(workers), steps=500, batch=len(dealt[0]), seed=3, split="by_class",
        optimiser="sgd", learning_rate=rate,
    )  # fmt: skip
    assert {len(share) for share in dealt} == {len(dealt[0])}
    simulation.run()
    optimum = task.train.inputs.double().mean(0)
    return float((rows(simulation) - optimum).norm(dim=1).max())


def test_corrected_methods_reach_the_common_optimum_with_a_constant_step() -> None:
    """All workers end at the optimum of all data; D-PSGD's workers stay apart from it, by a
    distance that the rate decides."""
    for method in ("gradient_tracking", "d2"):
        assert distance_to_the_optimum(method) < 2e-4
    biased = distance_to_the_optimum("d_psgd")
    assert biased > 20 * 2e-4
    assert distance_to_the_optimum("d_psgd", 0.4) > 1.5 * biased


RATES = (0.03, 0.1, 0.3)


def accuracies(method: str) -> list[float]:
    """Of six seeds, in per cent, at the best of the rates by a seed of its own."""

    def accuracy(rate: float, seed: int) -> float:
        return 100 * simulate(
            "digits-mlp", method, "ethernet-10g-16", seed=seed, epochs=10, split="by_class",
            learning_rate=rate, evaluations=1,
        ).accuracy  # fmt: skip

    best = max(RATES, key=lambda rate: accuracy(rate, 100))
    return [accuracy(best, seed) for seed in range(6)]


@wide
@pytest.mark.parametrize("method", ["gradient_tracking", "d2", "qg_dsgdm", "relay_sgd"])
def test_where_each_worker_has_its_own_classes_they_beat_d_psgd(method: str) -> None:
    """By at least three points, with intervals of 95 % that do not meet."""
    plain, corrected = interval(accuracies("d_psgd")), interval(accuracies(method))
    assert corrected.low > plain.high
    assert corrected.mean > plain.mean + 3


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("relay_sgd:topology=ring", "relay_sgd needs a tree, got topology=ring; use one of bin"),
        ("d2:topology=exponential", "d2 needs a fixed graph with links both ways, got topology=e"),
    ],
)
def test_a_topology_that_does_not_suit_is_refused(method: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        parse_method(method).resolve(8, 100)
