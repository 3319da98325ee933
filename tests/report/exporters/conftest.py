"""Run folders as `simulate`, `train` and `compare` leave them, made of short runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gossamer import Result, simulate
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import Run, read_folder

# Before any test imports them: nothing of these tests leaves the machine.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


@pytest.fixture(scope="session")
def result() -> Result:
    return simulate("digits-logistic", "ad_psgd", "equal-8", seed=3, epochs=1, evaluations=3)


def keep(folder: RunFolder, result: Result, **changes: Any) -> Path:
    """As the commands do."""
    folder.write_config({**result.settings.as_dict(), **changes})
    for row in result.history:
        folder.add_row(row)
    folder.write_summary({**result.summary, "ended": "finished", **changes})
    folder.close()
    return folder.path


@pytest.fixture
def simulated(tmp_path: Path, result: Result) -> Path:
    return keep(RunFolder.create(tmp_path / "runs", "simulate"), result)


@pytest.fixture
def compared(tmp_path: Path, result: Result) -> Path:
    """Two runs of a comparison."""
    parent = RunFolder.create(tmp_path / "runs", "compare")
    plan = [{**result.settings.as_dict(), "seed": seed} for seed in (3, 4)]
    parent.write_config({"runs": plan, "seeds": 1})
    for seed in (3, 4):
        keep(parent.child(f"ad_psgd-seed{seed}"), result, seed=seed)
    parent.write_summary({"task": "digits-logistic"})
    return parent.path


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of real workers, whose rows have other names."""
    folder = RunFolder.create(tmp_path / "runs", "train")
    folder.write_config({"command": "train", "method": "easgd", "seed": 1, "batch": 16,
                         "learning_rate": 0.1, "task": "digits-logistic"})  # fmt: skip
    folder.add_row({"seconds": 0.5, "epochs": 0.25, "loss": 2.0, "samples": 320})
    folder.add_row({"seconds": 1.5, "epochs": 0.75, "loss": 1.0, "samples": 960})
    folder.write_summary({"ended": "finished", "method": "easgd", "workers": 2, "seconds": 1.5,
                          "epochs": 0.75, "steps_by_worker": {"0": 40, "1": 20},
                          "loss": 1.0})  # fmt: skip
    folder.close()
    return folder.path


@pytest.fixture
def run(simulated: Path) -> Run:
    return read_folder(simulated).runs[0]
