"""TensorBoard, W&B and MLflow get a run's figures against its steps and its seconds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gossamer import Result, simulate
from gossamer.errors import ConfigurationError
from gossamer.report.exporters import MlflowExporter, TensorBoardExporter, WandbExporter
from gossamer.runs.kept_runs import Run, read_folder


@pytest.mark.parametrize(
    ("module", "make", "sentence"),
    [
        ("pyarrow", "ParquetExporter", "a Parquet file needs pyarrow"),
        ("torch.utils.tensorboard", "TensorBoardExporter", "an event file needs tensorboard"),
        ("wandb", "WandbExporter", "Weights & Biases needs wandb"),
        ("mlflow", "MlflowExporter", "MLflow's format needs mlflow"),
    ],
)
def test_what_is_not_installed_is_named_before_the_run(
    module: str, make: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One sentence that says what to install; nothing is written."""
    monkeypatch.setitem(sys.modules, module, None)
    exporter = getattr(importlib.import_module("gossamer.report.exporters"), make)
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        exporter(str(tmp_path / "there"))
    assert "which is not installed; use pip install " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- TensorBoard


def events(folder: Path) -> Any:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard's files need tensorboard",
    )
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return found


def test_scalars_stand_against_steps_and_seconds(tmp_path: Path) -> None:
    """The wall time of an event is the second of the run."""
    pytest.importorskip("tensorboard", reason="event files need tensorboard")
    result = simulate(
        "digits-logistic", "ad_psgd", epochs=1, evaluations=3,
        callbacks=[TensorBoardExporter(tmp_path, name="one")],
    )  # fmt: skip
    found = events(tmp_path / "one")
    told = [(event.step, event.wall_time, event.value) for event in found.Scalars("loss")]
    expected = [(row["steps"], row["virtual_seconds"], row["loss"]) for row in result.history]
    assert told == [(s, pytest.approx(t), pytest.approx(v)) for s, t, v in expected]
    assert {"accuracy", "consensus_distance", "waiting_seconds_max"} <= set(found.Tags()["scalars"])
    assert "summary/text_summary" in found.Tags()["tensors"]


def test_forced_again_a_run_has_one_curve(tmp_path: Path, run: Run) -> None:
    """Events of the export before would be drawn too."""
    pytest.importorskip("tensorboard", reason="event files need tensorboard")
    for _ in range(2):
        TensorBoardExporter(tmp_path, force=True).export(run, "again")
    assert len(events(tmp_path / "again").Scalars("loss")) == len(run.history)
    assert len(list((tmp_path / "again").iterdir())) == 1


def test_steps_of_real_rows_come_from_their_samples(tmp_path: Path, trained: Path) -> None:
    """Rows of real workers tell samples; the folder tells the batch."""
    pytest.importorskip("tensorboard", reason="event files need tensorboard")
    (run,) = read_folder(trained).runs
    TensorBoardExporter(tmp_path / "events").export(run)
    told = events(tmp_path / "events" / run.name).Scalars("loss")
    assert [(event.step, event.wall_time) for event in told] == [(20, 0.5), (60, 1.5)]


# ---------------------------------------------------------------------- Weights & Biases


class FakeRun:
    """Keeps what a run of W&B is told."""

    def __init__(self, **init: Any) -> None:
        self.init = init
        self.config, self.summary = FakeDict(init["config"]), FakeDict()
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeDict(dict[str, Any]):
    def update(self, values: dict[str, Any], allow_val_change: bool = True) -> None:
        super().update(values)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A module that records calls."""
    begun: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        begun.append(FakeRun(**given))
        return begun[-1]

    module = ModuleType("wandb")
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return begun


def test_a_run_there_per_run_here(fake_wandb: list[FakeRun], result: Result) -> None:
    """Rows at their steps without unknown values, labels as its configuration, then the end."""
    exporter = WandbExporter("trial", group="night")
    simulate(
        "digits-logistic", "ad_psgd", seed=3, epochs=1, evaluations=3, callbacks=[exporter]
    )  # fmt: skip
    (run,) = fake_wandb
    assert (run.init["project"], run.init["group"], run.init["name"]) == ("trial", "night", "run-1")
    assert [step for step, _ in run.rows] == [row["steps"] for row in result.history]
    assert [row["loss"] for _, row in run.rows] == [row["loss"] for row in result.history]
    assert "training_loss" not in run.rows[0][1]
    assert run.config["method"] == "ad_psgd"
    assert run.summary["digest"] == result.digest
    assert run.exit_code == 0


def test_a_run_that_did_not_end_is_closed_as_such(fake_wandb: list[FakeRun]) -> None:
    with WandbExporter() as exporter:
        exporter.on_evaluation({"seconds": 1.0, "loss": 2.0})
    assert fake_wandb[0].exit_code == 1
    assert fake_wandb[0].summary["status"] == "unfinished"


def test_a_refusal_is_one_sentence(
    fake_wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def refuse(**given: Any) -> None:
        raise RuntimeError("no API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigurationError, match=r"\(no API key configured\); run `wandb login`"):
        WandbExporter().on_evaluation({"loss": 1.0})


# ---------------------------------------------------------------------- MLflow


def test_mlflow_keeps_parameters_and_metrics_in_a_folder(tmp_path: Path, run: Run) -> None:
    """Every metric at its step and second; what is unknown is left out."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow's format needs mlflow")
    MlflowExporter("trial", folder=tmp_path / "mlruns").export(run, "one")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert (found.info.run_name, found.info.status) == ("one", "FINISHED")
    assert found.data.params["method"] == "ad_psgd"
    assert found.data.params["cluster/workers"] == "8"
    assert found.data.params["digest"] == run.summary["digest"]
    told = client.get_metric_history(found.info.run_id, "loss")
    assert [(one.step, one.value) for one in told] == [
        (row["steps"], pytest.approx(row["loss"])) for row in run.history
    ]
    moments = [one.timestamp - found.info.start_time for one in told]
    assert moments == [int(1000 * row["virtual_seconds"]) for row in run.history]
    assert len(client.get_metric_history(found.info.run_id, "training_loss")) == 3
    assert found.data.metrics["summary/accuracy"] == pytest.approx(run.summary["accuracy"])


def test_mlflow_listens(tmp_path: Path) -> None:
    """Labels come with the end; an unfinished run has failed."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow's format needs mlflow")
    with MlflowExporter(folder=tmp_path / "mlruns", name="night") as exporter:
        exporter.on_evaluation({"seconds": 1.0, "steps": 5, "loss": 2.0})
        exporter.on_end({"method": "easgd", "seed": 4, "loss": 2.0})
        exporter.on_evaluation({"seconds": 1.0, "steps": 5, "loss": 2.0})
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    found = client.search_runs([client.get_experiment_by_name("gossamer").experiment_id])
    ends = {run.info.run_name: (run.info.status, run.data.params.get("method")) for run in found}
    assert ends == {"night": ("FINISHED", "easgd"), "night-2": ("FAILED", None)}
