"""Laws of the methods that are made for compression, CHOCO-SGD and 1-bit Adam."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.sim.simulation import Simulation
from support import bowl, build, cluster_of, digits, rows, scatter, spread, total

few = examples(max_examples=8)


def ended(method: str, workers: int, seed: int, **choices: object) -> Simulation:
    simulation = build(bowl(), method, cluster_of(workers, jitter=0.4), seed=seed, **choices)
    scatter(simulation, seed)
    simulation.run()
    return simulation


@few
@given(st.sampled_from(["ring", "star", "exponential"]), st.integers(2, 6), st.integers(0, 99))
def test_choco_with_all_values_and_gamma_one_is_d_psgd(
    topology: str, workers: int, seed: int
) -> None:
    """The copies are then the models themselves: x <- W (x - eta g)."""
    choices = {"steps": 6, "optimiser": "sgd", "learning_rate": 0.05, "engine": "loop"}
    choco = ended(f"choco_sgd:gamma=1,topology={topology}+topk:share=1", workers, seed, **choices)
    plain = ended(f"d_psgd:adapt=before,topology={topology}", workers, seed, **choices)
    torch.testing.assert_close(rows(choco), rows(plain), rtol=1e-4, atol=1e-5)


def naive(start: Tensor, share: float, rounds: int) -> Tensor:
    """Neighbours on a ring that send top-k of their models themselves, and keep the sum."""
    x = start.clone()
    kept = max(1, round(share * x.shape[1]))
    for _ in range(rounds):
        sent = torch.zeros_like(x)
        largest = x.abs().topk(kept, dim=1).indices
        sent.scatter_(1, largest, x.gather(1, largest))
        x = x + (sent.roll(1, 0) + sent.roll(-1, 0) - 2 * sent) / 3
    return x


def test_choco_agrees_where_naive_compression_stalls() -> None:
    """Without gradients and with a tenth of the values, CHOCO's replicas approach each other to
    the last digits and keep their mean; top-k of the models themselves leaves them apart."""
    simulation = build(
        bowl(40), "choco_sgd+topk:share=0.1", cluster_of(6), steps=400, engine="none",
    )  # fmt: skip
    scatter(simulation)
    start, before = rows(simulation).clone(), total(simulation)
    simulation.run()
    apart = spread(rows(simulation)) / spread(start)
    assert apart < 1e-3
    torch.testing.assert_close(total(simulation), before, rtol=1e-4, atol=1e-3)
    stalled = spread(naive(start, 0.1, 400)) / spread(start)
    assert stalled > 100 * apart


def test_a_bit_of_each_number_is_a_thirtieth_of_the_traffic() -> None:
    """And trains the digits as well as whole models do, within a point."""

    def run(method: str) -> tuple[float, float]:
        result = build(digits(), method, cluster_of(8), steps=100, batch=16, evaluations=1).run()
        return result.accuracy, result.bytes_per_step

    (choco, few_bytes), (plain, all_bytes) = run("choco_sgd:gamma=0.5"), run("d_psgd:adapt=before")
    assert choco > plain - 0.01
    assert all_bytes / few_bytes == pytest.approx(32, rel=0.06)


def test_one_bit_adam_is_adam_until_its_variance_is_frozen() -> None:
    """On all workers, with the whole batch's gradient, to rounding; afterwards v stays, and all
    replicas are equal, though each sent one bit per number of its own momentum."""
    choices = {"steps": 20, "optimiser": "sgd", "learning_rate": 0.01, "engine": "loop"}
    warm = ended_equal("one_bit_adam:warmup=1", choices)
    adam = ended_equal("all_reduce", choices | {"optimiser": "adam"})
    torch.testing.assert_close(rows(warm), rows(adam), rtol=1e-4, atol=1e-5)
    compressed = ended_equal("one_bit_adam:warmup=0.25", choices)
    short = ended_equal("one_bit_adam:warmup=1", choices | {"steps": 5})
    squares = [run.world.replicas[0].memory["square"] for run in (compressed, short)]
    torch.testing.assert_close(*squares)
    assert spread(rows(compressed)) == 0
    assert (rows(compressed) - rows(warm)).norm() < 0.2 * (rows(warm) - rows(short)).norm()


def ended_equal(method: str, choices: dict[str, object]) -> Simulation:
    simulation = build(bowl(), method, cluster_of(4), seed=2, **choices)
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("choco_sgd+dgc", "choco_sgd cannot use dgc: it corrects the momentum of gradients"),
        ("choco_sgd+terngrad", "choco_sgd cannot use terngrad: its error may be longer"),
        ("d2+sign", "d2 cannot use sign: it sends whole models"),
        ("choco_sgd:gamma=1.5", "gamma must lie between 0 and 1, got 1.5"),
    ],
)
def test_what_does_not_go_together_is_refused(method: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        parse_method(method)


def test_the_compressor_that_a_method_has_by_default_is_left_out_of_its_name() -> None:
    """As other defaults are; another one is said."""
    assert str(parse_method("choco_sgd+sign")) == str(parse_method("choco_sgd")) == "choco_sgd"
    assert parse_method("choco_sgd+sign") == parse_method("choco_sgd")
    assert str(parse_method("choco_sgd+topk")) == "choco_sgd+topk"
