"""A method that changes during a run: when, with what it is handed over, and what is refused."""

from __future__ import annotations

import pytest
import torch

from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.sim.simulation import Simulation
from support import build, cluster_of, pieces, rows, scatter, spread
from tiers import only

CHANGES = (
    "d_psgd:topology=ring@0.5@all_reduce", "ad_psgd@0.5@all_reduce",
    "local_sgd:period=4@0.5@d_psgd",
    "pull_gossip@0.3@local_sgd:period=2@0.6@all_reduce", "push_sum@0.5@all_reduce+int8",
    "diloco:period=4+topk:share=0.2@0.5@all_reduce", "ad_psgd+bf16@0.5@all_reduce",
)  # fmt: skip


def run(method: str, workers: int = 4, steps: int = 24, **choices: object) -> Simulation:
    usual = {"optimiser": "sgd:momentum=0.9", "learning_rate": 0.02, "evaluations": 1,
             "engine": "loop"}  # fmt: skip
    return build(pieces(3, 2, 1), method, cluster_of(workers, jitter=0.4), steps=steps,
                 **(usual | choices))  # fmt: skip


@pytest.mark.parametrize("method", only(CHANGES[:3], CHANGES))
def test_a_changing_method_is_printed_and_parsed_back(method: str) -> None:
    spec = parse_method(method)
    assert parse_method(str(spec)) == spec
    assert str(spec).count("@") == method.count("@")


@pytest.mark.parametrize("phase", ["all_reduce", "local_sgd:period=3,state=averaged"])
def test_a_method_that_changes_to_itself_is_itself(phase: str) -> None:
    """Where all hold the same model and momentum at the change, meeting changes nothing."""
    plain, changed = run(phase), run(f"{phase}@0.5@{phase}")
    plain.run()
    changed.run()
    torch.testing.assert_close(rows(changed), rows(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", only(CHANGES[:2], CHANGES))
def test_all_samples_are_learnt_and_the_last_phase_decides(method: str) -> None:
    """Whoever counts how. Where the last phase is all-reduce, replicas end equal, though the first
    left them apart; after steps that nobody counted, some may make one step more than others."""
    simulation = run(method)
    scatter(simulation)
    apart = spread(rows(simulation))
    result = simulation.run()
    assert result.samples >= simulation.settings.samples
    assert result.steps >= 24 * 4
    if method.rpartition("@")[2].startswith("all_reduce"):
        is_counted = parse_method(method).method.is_synchronous(parse_method(method).resolve(4, 24))
        assert spread(rows(simulation)) < (1e-5 if is_counted else 0.1) * apart


def test_traffic_is_that_of_each_phase() -> None:
    """Half of the steps of one, half of the other."""

    def sent(method: str) -> float:
        simulation = build(pieces(4096), method, cluster_of(4), steps=64, engine="none")
        return simulation.run().bytes_per_step

    mixed = sent("local_sgd:period=8@0.5@all_reduce")
    meeting = 2 * 1.5 * 4 * 4096 / 64  # models and the state of the optimiser, once
    expected = (sent("local_sgd:period=8") + sent("all_reduce")) / 2
    assert mixed == pytest.approx(expected + meeting, rel=0.02)


def test_drop_is_when_the_rate_has_fallen_to_half() -> None:
    """A step schedule falls in the middle: what travels is that of a change in the middle."""

    def sent(method: str, **more: object) -> float:
        simulation = build(pieces(4096), method, cluster_of(4), steps=64, engine="none", **more)
        return simulation.run().bytes_per_step

    dropped = sent("local_sgd:period=8@drop@all_reduce", schedule="step:at=0.5")
    halved = sent("local_sgd:period=8@0.5@all_reduce", schedule="step:at=0.5")
    assert dropped == pytest.approx(halved, rel=0.05)
    never = sent("local_sgd:period=8@drop@all_reduce", schedule="constant")
    assert never == pytest.approx(sent("local_sgd:period=8"), rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("downpour@0.5@all_reduce", "downpour cannot be part of a method that changes"),
        ("d_psgd@1.5@all_reduce", "shares of the run between 0 and 1, in order, got 1.5"),
        ("d_psgd@0.6@local_sgd@0.3@all_reduce", "in order, got 0.6, 0.3"),
        ("all_reduce:groups=2@0.5@d_psgd", "groups= and balance= hold for a whole run"),
        ("pull_gossip@0.5@d_psgd", "d_psgd cannot follow pull_gossip"),
        ("d_psgd@0.5@al_reduce", "did you mean 'all_reduce'"),
        ("d_psgd@0.5@all_reduce+topj", "did you mean 'topk'"),
    ],
)
def test_what_cannot_change_is_said_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_method(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
