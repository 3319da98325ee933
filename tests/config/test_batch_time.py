"""The time of a gradient follows its batch, in the description, the simulator and closed forms."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config.cluster import DISTRIBUTIONS, Cluster, Compute, cluster_from, load_cluster
from gossamer.errors import ConfigurationError
from gossamer.plan.batch_line import batch_line
from gossamer.plan.cost.agreement import compare_step
from gossamer.plan.cost.workload import workload_of
from gossamer.tasks import make_task
from support import bowl, build, cluster_of


@settings(max_examples=30)
@given(st.sampled_from(DISTRIBUTIONS), st.integers(1, 256), st.integers(0, 99))
def test_a_draw_for_a_batch_is_that_of_its_whole_time(kind: str, batch: int, seed: int) -> None:
    """fixed + per_sample * batch, to the bit what one fixed time of that length draws."""
    follows = Compute(seconds=0.002, per_sample=0.0005, distribution=kind)
    fixed = Compute(seconds=0.002 + 0.0005 * batch, distribution=kind)
    assert follows.draw(random.Random(seed), batch) == fixed.draw(random.Random(seed), batch)
    assert follows.at(batch) == fixed


def test_without_a_time_per_sample_no_batch_changes_a_draw() -> None:
    """A plain `seconds` stays what it was, whatever the batch is."""
    plain = Compute(seconds=0.0123, jitter=0.3)
    assert plain.draw(random.Random(1), 512) == plain.draw(random.Random(1))


def test_a_run_with_twice_the_batch_takes_longer_steps_by_that_many_samples() -> None:
    """One worker, constant times: a step lasts exactly as the description says."""
    compute = Compute(seconds=0.002, per_sample=0.001, distribution="constant")
    cluster = Cluster(workers=1, compute=compute)
    for batch in (4, 8):
        run = build(bowl(), "ensemble", cluster, steps=6, batch=batch, engine="none").run()
        assert run.virtual_seconds == pytest.approx(6 * (0.002 + 0.001 * batch), abs=1e-7)


def test_closed_forms_and_the_simulator_agree_at_a_batch() -> None:
    """Both take the batch of the workload, not one sample."""
    cluster = cluster_of(4, seconds=0.001, distribution="constant")
    compute = Compute(seconds=0.001, per_sample=0.0005, distribution="constant")
    cluster = cluster_from({**cluster.as_dict(), "compute": vars(compute)})
    task = make_task("digits-mlp")
    for batch in (8, 64):
        what = workload_of(task, model_bytes=1e6, batch=batch)
        found = compare_step("all_reduce", cluster, task, workload=what, steps=4)
        assert found.prediction.parts.compute_s == pytest.approx(0.001 + 0.0005 * batch)
        assert abs(found.error) < 0.01


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        ('per_sample = "1ms"', "without seconds"),
        ("seconds = 0", "above 0"),
        ('seconds = "1ms"\nper_sample = -1', "per_sample must be a time"),
        ('memory = "-80GB"', "memory must be a size"),
    ],
)
def test_impossible_times_and_memories_are_one_sentence(
    tmp_path: Path, compute: str, said: str
) -> None:
    """Negative values, nothing at all, and half of a line."""
    path = tmp_path / "bad.toml"
    path.write_text(f"workers = 2\n[compute]\n{compute}\n")
    with pytest.raises(ConfigurationError, match=said):
        load_cluster(path)


@given(st.integers(1, 64), st.floats(1e-4, 1.0), st.floats(0, 1e-2))
def test_the_line_over_the_batch_finds_a_line(batch: int, fixed: float, each: float) -> None:
    """Exactly where there is one; what it gives at its own batch is what was measured there."""
    times = {size: fixed + each * size for size in (batch, 2 * batch, 4 * batch)}
    own = times.pop(batch)
    line = batch_line(batch, own, times)
    assert line is not None
    assert line.per_sample == pytest.approx(each, abs=1e-9)
    assert line.error < 1e-6
