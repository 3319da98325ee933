"""One worker of `gossamer train` in this very process, where a test can look into its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import simulate
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.methods import METHODS
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.training import Training
from gossamer.real.train.worker_log import WorkerLog
from gossamer.real.train.worker_main import run_worker
from gossamer.real.transports.local import LocalTransport
from gossamer.replica import Replica
from gossamer.worker import Worker

TASK = "digits-mlp"


def training_of(method: str, folder: Path, **choices: Any) -> Training:
    """Opened, and made to begin."""
    settings = make_settings(TASK, method, Cluster(workers=1), **choices)
    training = Training(TrainRequest(settings, folder), LocalTransport())
    training.open()
    training.start()
    return training


def run(training: Training) -> None:
    training.session.driver.drive(training.main, "main", training.end)


# When a merged model comes back depends on time, even alone.
@pytest.mark.parametrize("method", [name for name in METHODS if name != "decoupled_diloco"])
def test_clipping_gives_the_simulators_bits(method: str, tmp_path: Path) -> None:
    """Whatever a method clips, and by whatever word, it clips in both worlds."""
    choices = {"epochs": 0.1, "clip": 0.01, "evaluations": 1}
    training = training_of(method, tmp_path, **choices)
    run(training)
    expected = simulate(TASK, method, Cluster(workers=1), engine="loop", **choices)
    assert torch.equal(training.output_of([training]), expected.parameters)


def test_what_others_see_in_the_middle_of_a_step_belongs_together(tmp_path: Path) -> None:
    """A method has given half of its mass away but not yet of its weight: whoever asks gets the
    model of the step's beginning, in the first step too; after the end, what there is then."""
    training = training_of("push_sum", tmp_path, epochs=0.05)
    seen: list[torch.Tensor] = []

    async def halving(w: Worker, x: Replica) -> None:
        whole = x.snapshot().clone()
        for _ in w.steps():
            await w.gradient(x)
            x.add_(x.snapshot(), -0.5)
            found = training.own_output()
            seen.append(found.value / found.weight)
            x.weight *= 0.5
        assert len(seen) > 2
        for model in seen:
            torch.testing.assert_close(model, whole)
        x.add_(torch.ones_like(whole))

    training.main.close()
    training.session.main = halving(training.worker, training.replica)
    run(training)
    found = training.own_output()
    assert torch.equal(found.value, training.replica.snapshot())
    assert found.weight == training.replica.weight == 0.5 ** len(seen)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_a_worker_in_a_sentence_when_its_results_find_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of progress can wait for room, the last ones cannot."""
    settings = make_settings(TASK, "all_reduce", Cluster(workers=1), epochs=0.1)
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "0.jsonl").symlink_to("/dev/full")
    diary = WorkerLog(tmp_path, 0)
    diary.write("progress", {})
    with pytest.raises(OSError, match="No space left"):
        diary.write("row", {})
    said: list[str] = []
    status = run_worker(TrainRequest(settings, tmp_path), LocalTransport(), diary, said.append)
    assert status == 1
    assert said == [f"there is no room for more in {tmp_path}: make some, or choose other --runs"]
    assert capsys.readouterr().err.strip() == said[0]
