"""Runs as tables: the same figures, whether listened to or read from a folder."""

from __future__ import annotations

import contextlib
import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer import Result, simulate
from gossamer.errors import ConfigurationError
from gossamer.report.exporters import CsvExporter, ParquetExporter
from gossamer.report.exporters.facts import flat
from gossamer.report.exporters.tables import columns, one_type
from gossamer.runs.kept_runs import Run, read_folder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def listened(path: Path, **choices: Any) -> Result:
    short = {"seed": 3, "epochs": 1, "evaluations": 3, **choices}
    return simulate("digits-logistic", "ad_psgd", callbacks=[CsvExporter(path)], **short)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_whatever_a_row_holds_becomes_plain_values(row: dict[str, Any]) -> None:
    """Texts, truths and finite numbers under texts; nothing else, and never an error."""
    for name, value in flat(row).items():
        assert isinstance(name, str)
        assert value is None or isinstance(value, bool | int | float | str)
        assert not isinstance(value, float) or math.isfinite(value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_a_list_over_workers_becomes_its_mean_least_and_largest(values: list[float]) -> None:
    """The same for a list and for an object by worker."""
    found = flat({"waited": values})
    assert found.keys() == {"waited_mean", "waited_min", "waited_max"}
    assert found["waited_min"] == min(values)
    assert found["waited_max"] == max(values)
    assert found["waited_mean"] == pytest.approx(sum(values) / len(values))
    assert flat({"waited": {str(rank): one for rank, one in enumerate(values)}}) == found


def test_objects_get_a_name_for_each_member_and_the_rest_is_left_out() -> None:
    row = {
        "waiting_by_cause": {"reply": 1.5}, "staleness_histogram": {"0": 3, "1": 1},
        "cards": [{"name": "worker 0"}], "loss": math.nan, "notices": [], "diverged": False,
    }  # fmt: skip
    assert flat(row) == {"waiting_by_cause/reply": 1.5, "loss": None, "diverged": False}


def test_a_row_per_evaluation_and_a_row_per_run(tmp_path: Path) -> None:
    """Labels, epochs and seconds first; the figures are those of the history."""
    result = listened(tmp_path / "figures")
    rows = table(tmp_path / "figures" / "metrics.csv")
    first = ["run", "method", "learning_rate", "seed", "epochs", "seconds"]
    assert list(rows[0])[:6] == first
    assert len(rows) == len(result.history)
    for row, told in zip(rows, result.history, strict=True):
        assert (row["run"], row["method"], row["seed"]) == ("run-1", "ad_psgd", "3")
        assert float(row["learning_rate"]) == result.learning_rate
        assert float(row["seconds"]) == told["virtual_seconds"]
        assert float(row["loss"]) == told["loss"]
        assert float(row["computing_seconds_max"]) == max(told["computing_seconds"])
        assert "virtual_seconds" not in row
    assert rows[0]["training_loss"] == ""
    (summary,) = table(tmp_path / "figures" / "summary.csv")
    assert list(summary)[:4] == first[:4]
    assert summary["digest"] == result.digest
    assert summary["status"] == "finished"


def test_listening_and_reading_the_folder_give_one_table(
    tmp_path: Path, simulated: Path
) -> None:  # fmt: skip
    """Cell for cell, but for the name of the run."""
    listened(tmp_path / "listened")
    (run,) = read_folder(simulated).runs
    CsvExporter(tmp_path / "read").export(run, "run-1")
    heard, read = (table(tmp_path / way / "metrics.csv") for way in ("listened", "read"))
    assert heard == read


def test_several_runs_follow_each_other_in_one_table(tmp_path: Path) -> None:
    """Each with its own labels, given a name or not."""
    exporter = CsvExporter(tmp_path, name="trial", force=True)
    for seed in (1, 2):
        simulate(
            "digits-logistic", "ad_psgd", epochs=0.2, evaluations=1, seed=seed,
            callbacks=[exporter],
        )  # fmt: skip
    labels = {(row["run"], row["seed"]) for row in table(tmp_path / "metrics.csv")}
    assert labels == {("trial", "1"), ("trial-2", "2")}
    assert [row["seed"] for row in table(tmp_path / "summary.csv")] == ["1", "2"]


def test_an_interrupted_run_leaves_its_rows(tmp_path: Path) -> None:
    """What was evaluated is on disk at once; leaving `with` ends the run as unfinished."""
    with contextlib.suppress(KeyboardInterrupt), CsvExporter(tmp_path / "figures") as exporter:
        exporter.on_evaluation({"epochs": 0.5, "seconds": 1.0, "loss": 2.0})
        assert table(tmp_path / "figures" / "metrics.csv")[0]["loss"] == "2.0"
        raise KeyboardInterrupt
    (summary,) = table(tmp_path / "figures" / "summary.csv")
    assert (summary["run"], summary["status"]) == ("run-1", "unfinished")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "metrics.csv", "summary.csv"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [CsvExporter, ParquetExporter])
def test_what_is_there_is_not_overwritten_unless_forced(tmp_path: Path, kind: type) -> None:
    """Refused before a run could begin; forced, only its own files are replaced."""
    if kind is ParquetExporter:
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="is not empty; name another folder"):
        kind(tmp_path)
    kind(tmp_path, force=True).on_end({"method": "easgd"})
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigurationError, match="is a file; name a folder"):
        kind(tmp_path / "notes.txt", force=True)


def test_parquet_holds_the_same_table_with_types(tmp_path: Path, run: Run) -> None:
    """Names, order and values as in the CSV; numbers are numbers, unknown is null."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    CsvExporter(tmp_path / "csv").export(run)
    ParquetExporter(tmp_path / "parquet").export(run)
    for name in ("metrics", "summary"):
        rows = table(tmp_path / "csv" / f"{name}.csv")
        found = parquet.read_table(tmp_path / "parquet" / f"{name}.parquet").to_pylist()
        as_text = [
            {key: "" if value is None else str(value) for key, value in row.items()}
            for row in found
        ]
        assert as_text == rows
        assert list(found[0]) == list(rows[0])
        assert isinstance(found[0]["loss"], float)
        assert isinstance(found[0]["steps"], int)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=2),
        )
    )
)
def test_a_column_has_one_type_and_a_place_for_every_row(rows: list[dict[str, Any]]) -> None:
    for column in columns(rows).values():
        assert len(column) == len(rows)
        alike = one_type(column)
        assert len({type(value) for value in alike if value is not None}) <= 1
        assert [value is None for value in alike] == [value is None for value in column]
