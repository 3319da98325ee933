"""Batches that grow instead of the rate falling, by a plan or by the noise of gradients."""

import pytest

import gossamer
from gossamer.config.faults import Fault
from gossamer.errors import ConfigurationError
from gossamer.optim.schedules import BatchGrowth, make_schedule


def schedule(spec, epochs=9.0, workers=2):
    return make_schedule(spec, epochs=epochs, workers=workers)


def test_batches_grow_where_the_rate_would_fall():
    """At each epoch the batch is multiplied as `step` would divide the rate, which stays."""
    made = schedule("growth:at=3/6,by=4")
    assert [made.multiple(epoch, None) for epoch in (0, 2.9, 3, 6, 9)] == [1, 1, 4, 16, 16]
    assert {made.factor(epoch) for epoch in (0, 3, 6, 9)} == {1.0}


def test_the_rate_falls_from_the_largest_batch_on():
    """The batch over the rate is the same as without a limit: here 4 / 1 and then 8 / (1/2)."""
    made = schedule("growth:at=3/6,by=4,most=8")
    assert [made.multiple(epoch, None) for epoch in (3, 6)] == [4, 8]
    assert made.factor(6) == 0.5


def test_a_growing_run_has_fewer_steps():
    """Thirds of a run at batches of 1, 4 and 16 have 1/3, 1/12 and 1/48 of its steps."""
    assert schedule("growth:at=3/6,by=4").step_share == pytest.approx((1 + 1 / 4 + 1 / 16) / 3)


def test_batches_follow_the_noise_in_powers_of_two_and_never_shrink():
    """A scale of 100 samples is 12.5 steps of 8 samples, so 8 batches; a smaller one later leaves
    them; none is known at first; `most` is the limit."""
    scales = iter([None, 100.0, 20.0, 1e9])
    growth = BatchGrowth(schedule("growth:by=noise,most=16"), 8, lambda: next(scales))
    assert [growth.at(1.0) for _ in range(4)] == [1, 8, 8, 16]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("growth:by=1", "by must be at least 2 or noise, got 1"),
        ("growth:by=noise,at=3", "leave one of them out"),
        ("growth:gamma=0.5", "growth has no gamma"),
    ],
)
def test_growth_that_makes_no_sense_is_refused(spec, says):
    """One sentence."""
    with pytest.raises(ConfigurationError, match=says):
        schedule(spec)


@pytest.mark.parametrize("method", ["all_reduce:groups=2", "all_reduce:balance=speed"])
def test_growth_and_unequal_batches_are_refused(method):
    """Who deals batches by another rule says so."""
    with pytest.raises(ConfigurationError, match="the schedule growth does not go with"):
        gossamer.simulate("digits-mlp", method, "equal-8", schedule="growth")


@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd", "sync_server", "ssp"])
@pytest.mark.parametrize("spec", ["growth:at=1/2,by=4", "growth:by=noise,most=4"])
def test_growth_keeps_the_sample_budget(method, spec):
    """The samples of a growing run are those that were asked for and at most one step more, in
    fewer steps."""
    run = gossamer.simulate(
        "digits-mlp", method, gossamer.load_cluster("equal-8").changed(workers=4), epochs=3,
        batch=4, schedule=spec, learning_rate=0.05, engine="vector",
    )  # fmt: skip
    asked, largest = 3 * 1437, 4 * 4 * 16
    assert asked <= run.samples < asked + largest
    assert run.steps < asked / 4 * (0.6 if spec.endswith("by=4") else 1.0)


@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd"])
def test_a_death_leaves_no_samples_of_a_large_batch(method):
    """What a dead worker had in hand is processed by others, in ordinary batches."""
    run = gossamer.simulate(
        "digits-mlp", method,
        gossamer.load_cluster("equal-8").changed(workers=4, faults=(Fault("kill", 0.6, worker=2),)),
        epochs=2,
        batch=4, schedule="growth:at=0.5,by=8", learning_rate=0.05,
    )  # fmt: skip
    assert run.samples >= 2 * 1437


def test_micro_batches_accumulate_to_the_gradient_of_the_batch():
    """With equal parts the mean of their gradients is that of the batch, to rounding."""
    whole, parts = (
        gossamer.simulate("digits-mlp", method, "equal-8", epochs=1, seed=3)
        for method in ("all_reduce", "all_reduce:microbatches=4")
    )
    assert (whole.parameters - parts.parameters).abs().max() < 1e-5
    assert whole.digest == parts.digest


def test_micro_batches_that_do_not_divide_a_batch_are_refused():
    """One sentence with the numbers."""
    with pytest.raises(ConfigurationError, match="cannot be divided into 3 equal micro-batches"):
        gossamer.simulate("digits-mlp", "all_reduce:microbatches=3", "equal-8", batch=16)
