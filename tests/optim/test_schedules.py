"""A schedule is a pure function of the epoch, and agrees with torch's where torch has one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from gossamer.errors import ConfigurationError
from gossamer.optim.schedules import SCHEDULES, make_schedule


def torch_factors(make_scheduler, epochs):
    """The factor at the start of each epoch, from 0 to `epochs`, by one of torch's schedulers."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make_scheduler(optimiser)
    factors = [scheduler.get_last_lr()[0]]
    for _ in range(epochs):
        optimiser.step()
        scheduler.step()
        factors.append(scheduler.get_last_lr()[0])
    return factors


@pytest.mark.parametrize(
    ("spec", "make_scheduler"),
    [
        ("constant", lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step:at=8/12,gamma=0.2", lambda o: lr_scheduler.MultiStepLR(o, [8, 12], gamma=0.2)),
        ("step:at=5", lambda o: lr_scheduler.MultiStepLR(o, [5])),
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 16)),
        ("cosine:final=0.1", lambda o: lr_scheduler.CosineAnnealingLR(o, 16, eta_min=0.1)),
        ("linear", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=16)),
        ("constant:warmup=5,start=0.2", lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 5)),
        (
            "cosine:warmup=4,start=0.25",
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.25, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 12)],
                [4],
            ),
        ),
    ],
)
def test_whole_epochs_agree_with_torch(spec, make_scheduler):
    """At each whole epoch the factor is that of torch's scheduler, stepped once an epoch."""
    schedule = make_schedule(spec, epochs=16, workers=1)
    ours = [schedule.factor(epoch) for epoch in range(17)]
    assert ours == pytest.approx(torch_factors(make_scheduler, 16), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("spec", "epoch", "factor"),
    [
        ("step:at=81/122", 80.999, 1.0),
        ("step:at=81/122", 81.0, 0.1),
        ("step:at=81/122", 122.0, 0.01),
        ("step:at=()", 163.0, 1.0),
        ("step", 81.9, 1.0),
        ("step", 82.0, 0.1),
        ("step", 123.0, 0.01),
        ("cosine", 82.0, 0.5),
        ("linear", 41.0, 0.75),
        ("linear:warmup=64", 114.0, 0.5),
        ("constant:scale=3", 10.0, 3.0),
        ("constant:scale=workers", 10.0, 8.0),
        ("constant:scale=square_root", 10.0, 8.0**0.5),
        ("constant:warmup=5", 0.0, 0.1),
        ("constant:warmup=5", 2.5, 0.55),
        ("constant:warmup=5,scale=0.5", 0.0, 0.05),
        ("constant:warmup=5,scale=workers,start=0.5", 0.0, 4.0),
    ],
)
def test_known_values(spec, epoch, factor):
    """Hand-computed factors for a run of 164 epochs on 8 workers."""
    assert make_schedule(spec, epochs=164, workers=8).factor(epoch) == pytest.approx(factor)


def test_goyal_s_rule_rises_from_the_base_rate_to_the_scaled_one():
    """Warm-up over five epochs from 1 to k times the base rate, then tenfold drops of that."""
    schedule = make_schedule("step:at=30/60/80,warmup=5,scale=workers", epochs=90, workers=32)
    factors = [schedule.factor(epoch) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 90)]
    assert factors == pytest.approx([1, 16.5, 32, 32, 3.2, 0.32, 0.032, 0.032])


specs = st.sampled_from(
    ["constant", "step", "step:gamma=0.5", "cosine", "cosine:final=0.2", "linear"]
)


@given(specs, st.floats(0, 0.4), st.floats(1, 100), st.floats(0, 2), st.floats(0, 2))
def test_the_rate_rises_through_the_warm_up_and_never_after(spec, share, scale, one, other):
    """Monotone up to the end of the warm-up, monotone down from there, never above the scale."""
    epochs = 10.0
    options = f"warmup={share * epochs!r},scale={scale!r}"
    text = f"{spec},{options}" if ":" in spec else f"{spec}:{options}"
    schedule = make_schedule(text, epochs=epochs, workers=1)
    early, late = sorted((one * epochs, other * epochs))
    before, after = schedule.factor(early), schedule.factor(late)
    assert 0 <= min(before, after) <= max(before, after) <= scale * (1 + 1e-12)
    if late < schedule.warmup:
        assert before <= after * (1 + 1e-12)
    if early >= schedule.warmup:
        assert before >= after * (1 - 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_after_the_end_the_last_value_stays(name):
    """Asynchronous workers overshoot the budget; a cosine must not rise again."""
    schedule = make_schedule(f"{name}:warmup=1,scale=workers", epochs=10, workers=4)
    assert schedule.factor(13.7) == schedule.factor(10)


@pytest.mark.parametrize(
    "spec",
    [
        *SCHEDULES,
        "step:scale=workers,at=81.0/122.0,gamma=0.2",
        "step:at=()",
        "cosine:warmup=5.0,start=0.5,final=0.1",
        "linear:scale=4.0",
    ],
)
def test_a_schedule_prints_the_spec_that_makes_it(spec):
    """str is the inverse of make_schedule; the run's length and size are not part of the spec."""
    schedule = make_schedule(spec, epochs=164, workers=8)
    assert str(schedule) == spec
    assert make_schedule(str(schedule), epochs=164, workers=8) == schedule


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("cosin", "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ("cosine:finale=1", "unknown cosine option 'finale'; did you mean 'final'?"),
        (
            "linear:epochs=3",
            "unknown linear option 'epochs'; choose one of scale, start, warmup",
        ),
        (
            "linear:scale=all",
            "linear: scale must be a number or one of workers, square_root, got 'all'",
        ),
        (
            "linear:scale=0",
            "linear: scale must be a finite number above 0, workers or square_root, got 0.0",
        ),
        ("linear:start=0", "linear: start must be above 0 and at most 1, got 0.0"),
        ("linear:start=1.5", "linear: start must be above 0 and at most 1, got 1.5"),
        ("linear:warmup=-1", "linear: warmup must be at least 0, got -1.0"),
        (
            "linear:warmup=10",
            "linear: warmup must be shorter than the run, got warmup=10 for 10 epochs; "
            "shorten it or run for longer",
        ),
        ("cosine:final=-0.1", "cosine: final must be at least 0, got -0.1"),
        ("step:gamma=-0.1", "step: gamma must be at least 0, got -0.1"),
        ("step:at=-1", "step: at must be at least 0, got -1.0"),
        ("step:at=4/4", "step: at must increase from one epoch to the next, got 4/4"),
        (
            "step:at=4/8,warmup=5",
            "step: at must not begin before the warm-up ends, got at=4/8, warmup=5; "
            "shorten the warm-up or drop later",
        ),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(spec, sentence):
    """One sentence with what was got and what was expected."""
    with pytest.raises(ConfigurationError) as failure:
        make_schedule(spec, epochs=10, workers=4)
    assert str(failure.value) == sentence


@pytest.mark.parametrize(
    ("epochs", "workers", "sentence"),
    [
        (0, 4, "constant: epochs must be a finite number above 0, got 0"),
        (float("inf"), 4, "constant: epochs must be a finite number above 0, got inf"),
        (1, 0, "constant: workers must be at least 1, got 0"),
    ],
)
def test_a_run_without_length_or_workers_is_refused(epochs, workers, sentence):
    """A schedule needs a run to be a schedule of."""
    with pytest.raises(ConfigurationError) as failure:
        make_schedule("constant", epochs=epochs, workers=workers)
    assert str(failure.value) == sentence
