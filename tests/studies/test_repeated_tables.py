"""Tables of small trainings: rates chosen on a seed that does not count, means with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from command_line import gossamer
from gossamer.config.cluster import Cluster
from gossamer.studies.reproductions import TABLES, PublishedTable
from gossamer.studies.reproductions.repeated import easgd_tau, staleness_remedies
from gossamer.studies.reproductions.repeated.backup_accuracy import layer_staleness
from gossamer.studies.reproductions.repeated.linear_speed_up import PROBLEMS
from gossamer.studies.reproductions.repeated.trials import (
    SEEDS,
    Trial,
    error,
    loss_of_test,
    reached,
    repeated_cell,
    tuned,
)
from gossamer.studies.reproductions.table import PublishedCell, TrialBook, TrialsStopped
from gossamer.studies.reproductions.trainings import Trained
from gossamer.tasks import make_task

REPEATED = [name for name, table in TABLES.items() if table.trials is not None]
SMALL = Trial(
    "digits-logistic", "all_reduce", Cluster(workers=2), {"epochs": 1, "batch": 64}
)  # fmt: skip


def book(**chosen) -> TrialBook:
    return TrialBook(0, lambda said: None, **chosen)


def run(*points: tuple[float, float | None], score: str = "accuracy") -> Trained:
    """Evaluations at these epochs."""
    rows = [{"epochs": at, "accuracy": None, "loss": None, score: value} for at, value in points]
    return Trained("made up", {"accuracy": rows[-1]["accuracy"], "loss": rows[-1]["loss"]}, rows)


def test_all_five_tables_are_there() -> None:
    """By their names in the list of published tables."""
    assert sorted(REPEATED) == [
        "backup-workers-accuracy", "easgd-tau", "hogwild-sparse", "linear-speed-up",
        "staleness-remedies",
    ]  # fmt: skip


def test_a_target_is_met_on_a_straight_line_between_evaluations() -> None:
    """From below by accuracies, from above by losses; NaN where it is not met."""
    rising = run((0.0, 0.1), (1.0, 0.5), (2.0, 0.9))
    assert reached(0.7, "epochs")(rising) == pytest.approx(1.5)
    assert reached(0.1, "epochs")(rising) == 0.0
    assert math.isnan(reached(0.95, "epochs")(rising))
    falling = run((0.0, 3.0), (1.0, None), (2.0, 1.0), score="loss")
    assert reached(2.0, "epochs", "loss")(falling) == pytest.approx(1.0)


def test_a_run_that_diverged_has_no_error_and_no_loss() -> None:
    """NaN, which is never the best rate and never a mean."""
    lost = run((0.0, 0.1), (1.0, None))
    assert math.isnan(error(lost))
    assert math.isnan(loss_of_test(lost))
    cell = repeated_cell("row", "column", [1.0, math.nan, 2.0])
    assert math.isnan(cell.ours)


def test_a_cell_is_a_mean_with_the_interval_of_students_t() -> None:
    """Of 1, 2 and 3 the mean is 2, and 4.303 times 1 / sqrt(3) half the width."""
    cell = repeated_cell("row", "column", [1.0, 2.0, 3.0], 2.5)
    assert cell.ours == 2.0
    assert cell.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert cell.as_dict()["half_width"] == cell.half_width


def test_the_rate_is_chosen_on_a_seed_that_does_not_count() -> None:
    """Every rate is tried with one seed, and the best one trained with the three others."""
    mine = book()
    found = tuned(SMALL, (1e-6, 0.1), mine, loss_of_test)
    assert found.rate == 0.1
    seeds = [label.rpartition("seed ")[2] for label in mine.kept]
    assert seeds == [str(SEEDS)] * 2 + ["0", "1", "2"]
    assert [one.label for one in found.runs] == list(mine.kept)[2:]
    again = book(kept=dict(mine.kept), is_over=lambda: True)
    assert tuned(SMALL, (1e-6, 0.1), again, loss_of_test).values(error) == found.values(error)


def test_nothing_is_begun_when_the_time_is_over() -> None:
    with pytest.raises(TrialsStopped):
        tuned(SMALL, (0.1,), book(is_over=lambda: True), loss_of_test)


def one_cell(mine: TrialBook) -> list[PublishedCell]:
    return [tuned(SMALL, (0.03, 0.1), mine, loss_of_test).cell("row", "column", error)]


def test_a_table_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop shows no cell, and going on gives those of a run without one; a line that was cut is
    computed again."""
    table = PublishedTable(
        name="few", title="few", source="nobody", unit="", settings="small", cells=1,
        trials=one_cell, verdict=lambda cells: "one cell",
    )  # fmt: skip
    monkeypatch.setitem(TABLES, "few", table)
    straight = gossamer("reproduce", "few", "--runs", "none", "--json")
    assert straight.status == 0, straight.err
    stopped = gossamer("reproduce", "few", "--minutes", "1e-9", "--runs", str(tmp_path), "--json")
    assert stopped.json["cells"] == []
    assert "stopped before the end" in stopped.err
    (folder,) = tmp_path.iterdir()
    whole = gossamer("reproduce", "few", "--resume", str(folder), "--json")
    assert whole.json["cells"] == straight.json["cells"]
    kept = folder / "trials.jsonl"
    lines = kept.read_text().splitlines()
    assert len(lines) == 2 + SEEDS
    kept.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    again = gossamer("reproduce", "few", "--resume", str(folder), "--json")
    assert again.json["cells"] == straight.json["cells"]
    assert json.loads((folder / "summary.json").read_text())["ended"] == "finished"


def test_layers_are_as_stale_as_published() -> None:
    """Of 40 workers 14.54 at the top layer and 38.97 at the bottom, which nothing was fitted to."""
    found = layer_staleness(0)
    assert found["top"] == pytest.approx(14.54, rel=0.03)
    assert found["bottom"] == pytest.approx(38.97, rel=0.005)


def test_the_least_loss_of_the_noisy_problem_is_what_the_target_says() -> None:
    """The target of 'noise' is 0.05 above the least loss that any parameters have."""
    task = make_task(PROBLEMS["noise"].task)
    least = float(task.loss(task.optimum - task.train.inputs, task.train.targets))
    assert PROBLEMS["noise"].target == pytest.approx(least + 0.05, abs=1e-3)


def test_remedies_are_equally_stale_by_their_rule() -> None:
    """(p - 1) / c is 15 for 16 workers, and for 31 whose gradients are taken in pairs."""
    for remedy in staleness_remedies.REMEDIES:
        c = 2 if remedy.name.startswith("softsync") else 1
        assert (remedy.workers - 1) / c == staleness_remedies.STALENESS


def test_verdicts_say_what_is_clear_and_what_is_not() -> None:
    """A remedy below nothing whose interval meets that of nothing is not clearly better."""
    cells = [
        PublishedCell(remedy.name, column, None, 5.0 if at else 9.0, half_width=1.0)
        for at, remedy in enumerate(staleness_remedies.REMEDIES)
        for column in ("error %, rate of one worker", "error %, own rate")
    ]
    assert "Adam clearly below nothing" in staleness_remedies.verdict(cells)
    near = [PublishedCell(cell.row, cell.column, None, cell.ours, half_width=3.0) for cell in cells]
    assert "no remedy clearly below" in staleness_remedies.verdict(near)
    errors = {"EASGD": (3, 3), "EAMSGD": (3, 8), "Downpour": (3, 50)}
    taus = [
        PublishedCell(
            f"{workers} workers, tau {period}", column, None, last if period == 64 else first
        )
        for workers in easgd_tau.WORKERS
        for column, (first, last) in errors.items()
        for period in easgd_tau.PERIODS
    ]
    said = easgd_tau.verdict(taus).splitlines()
    assert said[0].startswith("EASGD tolerates a period of 64: agrees")
    assert said[1].startswith("EAMSGD tolerates a period of 64: does not agree")
    assert said[2].startswith("Downpour degrades at 16 to 64: agrees")
