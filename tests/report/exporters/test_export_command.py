"""`gossamer export` on the folders of simulate, train and compare, and on damaged ones."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.commands.export import export
from gossamer.errors import ConfigurationError
from gossamer.runs.kept_runs import read_folder

PACKAGES = {"parquet": "pyarrow", "tensorboard": "tensorboard", "mlflow": "mlflow"}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_each_folder_gets_its_tables_inside(
    simulated: Path, compared: Path, trained: Path
) -> None:  # fmt: skip
    """A row per run, and runs of a comparison by their own names."""
    export([simulated, compared, trained])
    names = {
        place: [row["run"] for row in table(place / "export/csv/summary.csv")]
        for place in (simulated, compared, trained)
    }
    assert names[simulated] == [simulated.name]
    assert names[trained] == [trained.name]
    assert names[compared] == [f"{compared.name}/ad_psgd-seed{seed}" for seed in (3, 4)]
    rows = table(compared / "export/csv/metrics.csv")
    assert {row["seed"] for row in rows} == {"3", "4"}
    (real,) = table(trained / "export/csv/summary.csv")
    assert (real["clock"], real["workers"]) == ("real", "2")
    assert float(real["steps_by_worker_mean"]) == 30.0
    # What was exported is no run.
    assert len(read_folder(compared).runs) == 2
    assert len(read_folder(simulated).runs) == 1


def test_one_place_takes_runs_of_several_folders(
    simulated: Path, trained: Path, tmp_path: Path
) -> None:
    """Beside each other in one table; the same folder twice is told apart."""
    export([simulated, trained, simulated], out_folder=tmp_path / "all")
    runs = [row["run"] for row in table(tmp_path / "all" / "summary.csv")]
    assert runs == [simulated.name, trained.name, f"{simulated.name}-2"]
    assert not (simulated / "export").exists()


@pytest.mark.parametrize("to", ["csv", *PACKAGES])
def test_nothing_is_written_outside_and_nothing_overwritten(
    to: str, simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All new files are in --out; a second time is refused, or forced."""
    if to in PACKAGES:
        pytest.importorskip(PACKAGES[to], reason=f"{to} needs {PACKAGES[to]}")
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    before = files(tmp_path)
    export([simulated], to=to, out_folder=tmp_path / "out")
    new = files(tmp_path) - before
    assert new
    assert all(path.is_relative_to(tmp_path / "out") for path in new)
    with pytest.raises(ConfigurationError, match=r"is not empty.*--force"):
        export([simulated], to=to, out_folder=tmp_path / "out")
    assert files(tmp_path) - before == new
    export([simulated], to=to, out_folder=tmp_path / "out", force=True)


def test_weights_and_biases_offline(simulated: Path, tmp_path: Path) -> None:
    """In a process of its own, for W&B keeps threads and a helper until its end: a run file inside
    of --out, and nothing in the home folder."""
    pytest.importorskip("wandb", reason="W&B needs wandb")
    (tmp_path / "home").mkdir()
    kept = {key: text for key, text in os.environ.items() if not key.startswith("WANDB_")}
    quiet = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    program = (
        "import sys; from pathlib import Path; from gossamer.commands.export import export\n"
        "export([Path(sys.argv[1])], to='wandb', out_folder=Path(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(simulated), str(tmp_path / "out")],
        env={**kept, **quiet, "HOME": str(tmp_path / "home")}, cwd=tmp_path, check=True,
        timeout=300,
    )  # fmt: skip
    assert len(list((tmp_path / "out").glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert files(tmp_path / "home") == set()
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "out", "home"}


def test_damage_is_named_and_the_rest_exported(
    simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line cut in half and no summary: the other rows are there, the status is unfinished."""
    with (simulated / "metrics.jsonl").open("a") as file:
        file.write('{"epochs": 1.0, "virt')
    (simulated / "summary.json").unlink()
    export([simulated])
    said = capsys.readouterr().err
    assert "half-written" in said
    assert "has no summary.json" in said
    rows = table(simulated / "export/csv/metrics.csv")
    assert [row["method"] for row in rows] == ["ad_psgd"] * len(rows)
    (summary,) = table(simulated / "export/csv/summary.csv")
    assert summary["status"] == "unfinished"


def test_bad_input_is_one_sentence(simulated: Path, tmp_path: Path) -> None:
    """What is wrong, and what to do."""
    (tmp_path / "empty").mkdir()
    for runs, choices, words in [
        ([simulated], {"to": "parket"}, "unknown format 'parket'; did you mean 'parquet'"),
        ([tmp_path / "nowhere"], {}, "does not exist; give the folder of a run"),
        ([tmp_path / "empty"], {}, "holds no run to export; give folders of simulate"),
        ([simulated], {"out_folder": simulated / "config.json"}, "is a file; name a folder"),
    ]:
        with pytest.raises(ConfigurationError, match=words) as caught:
            export(runs, **choices)
        assert "\n" not in str(caught.value)
    assert list((tmp_path / "empty").iterdir()) == []
