"""The commands of the laboratory, and the published tables that it trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import gossamer, strict
from gossamer import DelayedOptimizer
from gossamer.report.page.build import report_data
from gossamer.studies.reproductions.delayed_gradients import ADAM_CELLS, SGD_CELLS, verdict
from gossamer.studies.reproductions.table import PublishedCell
from tiers import wide

# ---------------------------------------------------------------------- published tables


def test_the_published_cells_are_all_there() -> None:
    """Counts by table, and some cells read back."""
    assert len(SGD_CELLS) == 6 * 8 * 5
    assert len(ADAM_CELLS) == 3 * 4 * 7
    sgd = "sgd:momentum=0.9"
    assert SGD_CELLS[sgd, 4, 256, 0.01] == 0.975
    assert SGD_CELLS[sgd, 8, 512, 10**-2.5] == 0.904
    assert SGD_CELLS[sgd, 1, 64, 0.1] is None
    assert SGD_CELLS[sgd, 0, 64, 10**-0.5] is None
    assert (sgd, 0, 64, 10**-4.5) not in SGD_CELLS
    assert ADAM_CELLS["adam", 8, 1024, 10**-2.5] == 0.896
    assert ADAM_CELLS["adam", 8, 2048, 10**-2.5] is None


def test_agreement_in_failing_is_counted_apart() -> None:
    failed = "read in the paper: fails, that is, stays at chance level (about 9 to 18 %)"
    cells = [
        PublishedCell("a", "1", 0.98, 0.975),
        PublishedCell("a", "2", 0.98, 0.10),
        PublishedCell("a", "3", 0.113, 0.114),
        PublishedCell("b", "1", None, float("nan"), failed),
        PublishedCell("b", "2", None, 0.9, failed),
    ]
    said = verdict(cells)
    assert "2 of the 3 cells that fail in the paper fail here" in said
    assert "1 of the 2 that train there train here" in said
    assert "median difference 0.50 points" in said


# ---------------------------------------------------------------------- the commands

QUICK = ("--lr", "0.01,0.1", "--batch", "32", "--delay", "0,2", "--epochs", "0.5")


def test_lab_delay_prints_its_grid_and_keeps_it(tmp_path: Path) -> None:
    """Table, JSON, picture; every combination once."""
    said = gossamer("lab", "delay", *QUICK, "--seeds", "2", "--runs", str(tmp_path), "--json")
    assert said.status == 0, said.err
    points = said.json["points"]
    assert len(points) == 2 * 2 * 2
    assert {(p["optimiser"], p["delay"]) for p in points} == {
        (name, delay) for name in ("sgd:momentum=0.9", "adam") for delay in (0, 2)
    }
    assert all(p["finished"] and 0 <= p["accuracy"] <= 1 for p in points)
    assert said.json["ended"] == "finished"
    assert "predicted edge" in said.err
    (folder,) = tmp_path.iterdir()
    assert strict((folder / "summary.json").read_text())["points"] == points
    assert (folder / "delay.png").stat().st_size > 10_000
    page = report_data([folder])
    assert page["pictures"] == []
    for drawn in page["heat_maps"]:
        assert (drawn["rates"], drawn["batches"]) == ([0.01, 0.1], [32])
        assert [panel["delay"] for panel in drawn["panels"]] == [0, 2]
        for panel in drawn["panels"]:
            for rate, batch, score, failed, _ in panel["cells"]:
                (one,) = [
                    p for p in points
                    if (p["optimiser"], p["delay"], p["batch"], p["learning_rate"])
                    == (drawn["optimiser"], panel["delay"], drawn["batches"][batch],
                        drawn["rates"][rate])
                ]  # fmt: skip
                assert (score, failed) == (one["accuracy"], one["failed"])
    assert len(page["heat_maps"]) == 2
    again = gossamer("lab", "delay", "--resume", str(folder), "--json")
    assert again.json["points"] == points


def test_a_time_limit_stops_and_resume_goes_on(tmp_path: Path) -> None:
    """It says how, and the end is the same as without the stop."""
    said = gossamer(
        "lab", "delay", *QUICK, "--minutes", "1e-9", "--runs", str(tmp_path / "a"), "--json"
    )
    assert said.status == 0, said.err
    assert said.json["ended"] == "stopped"
    (folder,) = (tmp_path / "a").iterdir()
    assert f"gossamer lab delay --resume {folder}" in said.err
    rest = gossamer("lab", "delay", "--resume", str(folder), "--json")
    assert rest.json["ended"] == "finished"
    straight = gossamer("lab", "delay", *QUICK, "--runs", "none", "--json")
    assert rest.json["points"] == straight.json["points"]


def test_lab_staleness_shows_both_histograms(tmp_path: Path) -> None:
    said = gossamer(
        "lab", "staleness", "--workers", "4", "--updates", "1500", "--runs", str(tmp_path), "--json"
    )
    assert said.status == 0, said.err
    assert said.json["expected_mean"] == 3
    for mean in (said.json["mean_staleness"], said.json["monte_carlo"]["mean"]):
        assert mean == pytest.approx(3, abs=0.02)
    assert sum(said.json["staleness_histogram"].values()) == 1500
    (folder,) = tmp_path.iterdir()
    assert (folder / "staleness.png").exists()
    # What it keeps can be given to an optimiser as it is.
    kept = strict((folder / "summary.json").read_text())["staleness_histogram"]
    DelayedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), kept)


def test_the_laboratory_alone_lists_its_questions() -> None:
    said = gossamer("lab")
    assert said.status == 0
    assert "staleness" in said.out
    assert "delay" in said.out


REFUSED = {
    "lab delay --lr 0.1,": "--lr must be numbers separated by commas, got '0.1,'",
    "lab delay --lr -1": "learning rate must be a finite number above 0, got -1.0",
    "lab delay --batch 8,1.5": "--batch must be whole numbers separated by commas",
    "lab delay --batch 0": "batch must be at least 1, got 0",
    "lab delay --batch 5000": "a batch of 5000 is larger than the 1437 samples of digits-mlp",
    "lab delay --delay -1": "delay must be at least 0, got -1",
    "lab delay --delay 1,1": "the grid needs one or more different delays, got 1, 1",
    "lab delay --optimizer sgdd": "unknown optimiser 'sgdd'; did you mean 'sgd'?",
    "lab delay --optimizer sgd:momentum=x": "sgd: momentum must be a number, got 'x'",
    "lab delay --task digit-mlp": "unknown task 'digit-mlp'; did you mean 'digits-mlp'?",
    "lab delay --task mnist-lenet": "task mnist-lenet needs data",
    "lab delay --epochs 0": "epochs must be a finite number above 0, got 0.0",
    "lab delay --seeds 0": "seeds must be at least 1, got 0",
    "lab delay --warmup 30": "warmup must be shorter than the run",
    "lab delay --minutes 0": "minutes must be above 0, got 0",
    "lab delay --device tpu": "unknown device 'tpu'; choose cpu or cuda",
    "lab delay --threads 0": "threads must be a finite number above 0, got 0",
    "lab delay --resume nowhere": "nowhere cannot be resumed, because it is not the folder",
    "lab delay --resume nowhere --lr 1": "leave out --lr",
    "lab staleness --workers 0": "workers must be at least 1, got 0",
    "lab staleness --distribution norml": "unknown distribution 'norml'; did you mean 'normal'?",
    "lab staleness --updates 0": "updates must be at least 1, got 0",
    "lab dlay": "no such command 'dlay'; did you mean 'delay'?",
    "reproduce ad-psgd-speedup --quick": "leave out --quick, which delayed-gradients-sgd",
    "reproduce delayed-gradients-sgd": "task mnist-lenet needs data",
    "reproduce delayed-gradients-adam --resume nowhere": "nowhere cannot be resumed",
    "reproduce delayed-gradients-adam --resume nowhere --seed 5": "leave out --seed",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = gossamer(*line.split())
    assert said.status == 2, said
    assert said.err.count("\n") == 1, said.err
    assert REFUSED[line] in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- tables that are trained


def write_mnist(folder: Path, training: int, test: int) -> Path:
    """Files in MNIST's format: noise, with the class as the brightness of one row."""
    generator = np.random.default_rng(0)
    for part, count in (("train", training), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = generator.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels + 4] = 250
        for kind, magic, values in (("labels-idx1", 1, labels), ("images-idx3", 3, images)):
            sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
            header = bytes((0, 0, 8, magic)) + sizes
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + values.tobytes())
    return folder


@wide
def test_a_trained_table_is_computed_in_pieces(tmp_path: Path) -> None:
    """A quick part of it, stopped, taken up, and shown beside the published cells."""
    data = tmp_path / "data"
    data.mkdir()
    write_mnist(data, 256, 50)
    table, runs = "delayed-gradients-adam", tmp_path / "runs"
    stopped = gossamer(
        "reproduce", table, "--data", str(data), "--quick", "--minutes", "1e-9",
        "--runs", str(runs), "--json",
    )  # fmt: skip
    assert stopped.status == 0, stopped.err
    assert stopped.json["cells"] == []
    (folder,) = runs.iterdir()
    assert f"gossamer reproduce {table} --resume {folder}" in stopped.err
    done = gossamer("reproduce", table, "--resume", str(folder), "--json")
    assert done.json["ended"] == "finished"
    assert len(done.json["cells"]) == 3 * 3 * 2
    by_place = {(cell["row"], cell["column"]): cell for cell in done.json["cells"]}
    assert by_place["delay 8, rate 1e-3", "batch 256"]["published"] == 0.988
    failing = by_place["delay 16, rate 3.16e-3", "batch 64"]
    assert failing["published"] is None
    assert "fails" in failing["evidence"]
    assert "cells that fail in the paper fail here" in done.err
    assert (folder / "table.png").stat().st_size > 10_000
    other = gossamer("reproduce", "delayed-gradients-sgd", "--resume", str(folder))
    assert other.status == 2
    assert f"holds {table}, not delayed-gradients-sgd" in other.err


@pytest.mark.parametrize("line", ["lab", "lab delay", "lab staleness"])
def test_the_help_is_whole(line: str) -> None:
    """Nothing is cut off, and it fits a terminal of 80 columns."""
    said = gossamer(*line.split(), "--help")
    assert said.status == 0
    assert "…" not in said.out
    assert "..." not in said.out.partition("Options:")[2]
    assert max(map(len, said.out.splitlines())) <= 80
