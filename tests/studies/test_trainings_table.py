"""Published tables whose cells are simulated trainings, with a table small enough for a test."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import gossamer, strict
from gossamer.commands.studies import published_table as published
from gossamer.commands.studies.batch import BatchPlan
from gossamer.commands.studies.training_batch import CellJob
from gossamer.commands.work import jobs, simulations
from gossamer.commands.work.jobs import JobPool, JobWatch, run_jobs
from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.optim.schedules import make_schedule
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions import TABLES, PublishedCell, PublishedTable
from gossamer.studies.reproductions.dc_asgd import TABLE as DC_ASGD
from gossamer.studies.reproductions.dc_asgd import trainings, verdict
from gossamer.studies.reproductions.table import Trainings
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained, error_of
from scripts import children
from tiers import wide

REPRODUCTIONS = Path(__file__).parents[2] / "docs" / "reproductions"
CELLS = {("1 worker", "alone"): (1, "sync_server"), ("2 workers", "late"): (2, "downpour"),
         ("2 workers", "together"): (2, "all_reduce")}  # fmt: skip


def cells(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
    choices = {"seed": seed, "epochs": epochs, "batch": 64, "learning_rate": 0.1, "evaluations": 4}
    return [
        CellTraining(row, column, method, Cluster(workers=workers), choices, 5.0, "made up")
        for (row, column), (workers, method) in CELLS.items()
        if workers == 1 or not quick
    ]


def draw(path: Path, work: Sequence[CellTraining], trained: Mapping[str, Trained]) -> None:
    path.write_text(" ".join(one.label for one in work if one.label in trained))


TINY = PublishedTable(
    name="tiny",
    title="A table for tests",
    source="nobody",
    unit="",
    settings="logistic regression on digits",
    cells=len(CELLS),
    trainings=Trainings(
        Problem("digits-logistic"),
        epochs=2.0,
        quick_epochs=0.5,
        make=cells,
        value=error_of,
        show=lambda cell: f"{cell.ours:.1f}",
        verdict=lambda found: f"{len(found)} judged",
        picture=draw,
    ),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "tiny", TINY)


def reproduce(*arguments: str) -> Any:
    return gossamer("reproduce", "tiny", *arguments, "--json")


def places(result: Any) -> list[tuple[str, str]]:
    return [(cell["row"], cell["column"]) for cell in result["cells"]]


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The training after so many is ended by this error."""
    execute, calls = simulations.execute, list[int]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > count:
            raise error
        return execute(*arguments, **options)

    monkeypatch.setattr(simulations, "execute", interrupted)


# ---------------------------------------------------------------------- the command


def test_the_cells_come_in_the_order_of_the_table(tmp_path: Path) -> None:
    """Each with its score, its digests and its history; JSON, folder and picture agree."""
    said = reproduce("--runs", str(tmp_path))
    assert said.status == 0, said.err
    assert said.json["ended"] == "finished"
    assert places(said.json) == list(CELLS)
    assert "3 judged" in said.err
    assert "2 epochs (in full: 2), 1 seed, 3 cells of 3" in said.err
    assert "[3/3] 2 workers, together: " in said.err
    (folder,) = tmp_path.iterdir()
    assert said.json.items() <= strict((folder / "summary.json").read_text()).items()
    kept = strict((folder / "progress.json").read_text())
    assert kept["unfinished"] == {}
    for cell, one in zip(said.json["cells"], kept["finished"], strict=True):
        epochs = [row["epochs"] for row in one["history"]]
        assert epochs[:5] == pytest.approx([0, 0.5, 1, 1.5, 2], abs=0.1)
        assert cell["ours"] == pytest.approx(100 * (1 - one["history"][-1]["accuracy"]))
        assert cell["ours"] < 40
        assert len(cell["digest"]) == len(cell["parameters_digest"]) == 32
        assert cell["wall_seconds"] > 0
    assert (folder / "table.png").read_text().startswith("1 worker, alone 2 workers, late")


def test_epochs_shrink_the_trainings_and_quick_leaves_some_out() -> None:
    said = reproduce("--quick", "--runs", "none")
    assert places(said.json) == [("1 worker", "alone")]
    assert said.json["epochs"] == 0.5
    assert "0.5 epochs (in full: 2), 1 seed, 1 cell of 3" in said.err
    assert reproduce("--quick", "--epochs", "1", "--runs", "none").json["epochs"] == 1


def test_several_seeds_give_their_mean_and_interval(tmp_path: Path) -> None:
    """A cell is shown when all its seeds are trained, with the mean of what each seed gives."""
    both = reproduce("--quick", "--seeds", "2", "--runs", str(tmp_path))
    assert both.status == 0, both.err
    assert "2 seeds, 1 cell of 3" in both.err
    (cell,) = both.json["cells"]
    alone = [
        reproduce("--quick", "--seed", str(seed), "--runs", "none").json["cells"][0]["ours"]
        for seed in (0, 1)
    ]
    assert cell["ours"] == pytest.approx(sum(alone) / 2)
    # Of two values Student's t is 12.71, and the deviation of their mean half their distance.
    assert cell["half_width"] == pytest.approx(12.706 * abs(alone[0] - alone[1]) / 2, rel=1e-3)
    (folder,) = tmp_path.iterdir()
    kept = json.loads((folder / "progress.json").read_text())
    kept["finished"] = [one for one in kept["finished"] if "seed" not in one["label"]]
    (folder / "progress.json").write_text(json.dumps(kept))
    again = reproduce("--resume", str(folder), "--minutes", "1e-9")
    assert again.json["cells"] == []


def test_a_time_limit_stops_and_resume_trains_the_rest(tmp_path: Path) -> None:
    """Nothing is begun after the limit; in the end all is as without it."""
    stopped = reproduce("--minutes", "1e-9", "--seed", "3", "--runs", str(tmp_path / "a"))
    assert stopped.status == 0, stopped.err
    assert stopped.json["ended"] == "stopped"
    assert stopped.json["cells"] == []
    (folder,) = (tmp_path / "a").iterdir()
    assert f"gossamer reproduce tiny --resume {folder}" in stopped.err
    done = reproduce("--resume", str(folder))
    straight = reproduce("--seed", "3", "--runs", "none")
    assert done.json["ended"] == "finished"
    assert done.json["seed"] == 3
    assert same_results(done.json, straight.json)


def same_results(one: Any, other: Any) -> bool:
    keys = ("row", "column", "ours", "digest", "parameters_digest")
    first, second = (
        [[cell[key] for key in keys] for cell in result["cells"]] for result in (one, other)
    )
    return bool(first) and first == second


def test_a_limit_inside_a_training_ends_it_at_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no result, but what it had measured can be read."""
    times = iter([0.0] * 4 + [1e9] * 20)
    monkeypatch.setattr(jobs.time, "monotonic", lambda: next(times))
    said = reproduce("--minutes", "1", "--runs", str(tmp_path))
    assert said.json["ended"] == "stopped"
    assert said.json["cells"] == []
    (folder,) = tmp_path.iterdir()
    ((label, rows),) = strict((folder / "progress.json").read_text())["unfinished"].items()
    assert label == "1 worker, alone"
    assert 1 < len(rows) < 5


@wide
def test_finished_cells_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C what is finished is shown, kept and used."""
    with monkeypatch.context() as patch:
        interrupt_after(1, patch, KeyboardInterrupt())
        said = reproduce("--runs", str(tmp_path))
    assert said.status == 130
    assert "interrupted" in said.err
    (folder,) = tmp_path.iterdir()
    summary = strict((folder / "summary.json").read_text())
    assert summary["ended"] == "interrupted"
    assert places(summary) == [("1 worker", "alone")]
    # Only two are left to train: a third would be interrupted.
    interrupt_after(2, monkeypatch, KeyboardInterrupt())
    done = reproduce("--resume", str(folder))
    assert done.status == 0, done.err
    assert places(done.json) == list(CELLS)
    assert done.json["cells"][0] == summary["cells"][0]


def test_a_training_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(2, monkeypatch, RunFailed("the disk is full"))
    said = reproduce("--runs", str(tmp_path))
    assert said.status == 1
    assert "the run ended: the disk is full" in said.err
    (folder,) = tmp_path.iterdir()
    summary = strict((folder / "summary.json").read_text())
    assert summary["ended"] == "the disk is full"
    assert len(summary["cells"]) == 2


def test_a_cell_that_diverged_is_kept_through_json(tmp_path: Path) -> None:
    """JSON knows no NaN, and null must come back as one."""
    row = {"accuracy": math.nan, "epochs": 1.0}
    assert math.isnan(error_of(row))
    assert math.isnan(error_of({**row, "accuracy": None}))


REFUSED = {
    "tiny --jobs 0": "jobs must be at least 1, got 0",
    "tiny --epochs 0": "epochs must be a finite number above 0, got 0.0",
    "tiny --epochs nan": "epochs must be a finite number above 0, got nan",
    "tiny --minutes 0": "minutes must be above 0, got 0",
    "tiny --device tpu": "unknown device 'tpu'; choose cpu or cuda",
    "tiny --data somewhere": "task digits-logistic brings its own data",
    "tiny --resume nowhere": "nowhere cannot be resumed",
    "tiny --resume nowhere --epochs 3": "leave out --epochs",
    "tiny --resume nowhere --seed 3": "leave out --seed",
    "tinny": "unknown table 'tinny'; did you mean 'tiny'?",
    "dc-asgd-cifar10": "task cifar10-resnet20 needs data",
    "delayed-gradients-sgd --epochs 3": "is one fixed grid; leave out --epochs, which dc-asgd",
    "ad-psgd-speedup --jobs 3 --data x": (
        "leave out --data, --jobs, which delayed-gradients-sgd, delayed-gradients-adam, "
        "delayed-gradients-adam-far, dc-asgd-cifar10, ad-psgd-cifar10, ad-psgd-cifar10-vgg, "
        "gossip-scaling, gossip-scaling-digits, bits-cliff, powersgd-cifar10, dgc-cifar10, tiny "
        "take"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = gossamer("reproduce", *line.split())
    assert said.status == 2, said
    assert said.err.count("\n") == 1, said.err
    assert REFUSED[line] in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_another_tables_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "other", dataclasses.replace(TINY, name="other"))
    reproduce("--minutes", "1e-9", "--runs", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    said = gossamer("reproduce", "other", "--resume", str(folder))
    assert said.status == 2
    assert f"{folder} holds tiny, not other; name its own table" in said.err


def test_a_table_without_a_unit_has_no_gap() -> None:
    """One space on each side of the bar, whether or not a unit stands before it."""
    cell = PublishedCell("row", "column", 2.0, 1.0)
    assert published._cell(cell, TABLES["softsync-staleness"]) == "1 | 2 (-50 %)"
    assert published._cell(cell, TABLES["ad-psgd-speedup"]) == "1 x | 2 (-50 %)"


# ---------------------------------------------------------------------- processes


@wide
@pytest.mark.usefixtures("pool_server")
def test_side_by_side_gives_the_same_cells(tmp_path: Path) -> None:
    """Whichever is finished first, in whichever process: the same numbers in the same order."""
    together = reproduce("--jobs", "2", "--runs", str(tmp_path))
    assert together.status == 0, together.err
    assert same_results(together.json, reproduce("--runs", "none").json)


@wide
def test_nothing_outlives_an_interruption() -> None:
    """A child that is under way ends with its parent's command, and what it told has arrived. The
    process that has forked it ends, too."""
    heard: list[str] = []

    def interrupt(job: CellJob, row: Any) -> None:
        heard.append(job.label)
        raise KeyboardInterrupt

    pool, before = JobPool(2), children(os.getpid())
    with pytest.raises(KeyboardInterrupt), pool:
        list(pool.run(cell_jobs(1e4), JobWatch(interrupt)))
    assert heard == ["1 worker, alone"]
    assert pool.pids == []
    assert children(os.getpid()) == before


def cell_jobs(epochs: float, problem: Problem = TINY.trainings.problem, data: Any = None) -> Any:
    plan = BatchPlan({}, data, "cpu", 1)
    return [CellJob(one, problem, plan) for one in cells(0, True, epochs)]


@pytest.mark.usefixtures("pool_server")
def test_a_failure_in_a_process_is_the_same_sentence(tmp_path: Path) -> None:
    """Here the process of the job finds no data, as this process would."""
    with pytest.raises(ConfigurationError, match=r".+ub"):
        list(run_jobs(cell_jobs(1.0, Problem("mnist-lenet"), tmp_path), processes=2))


# ---------------------------------------------------------------------- DC-ASGD on CIFAR-10


TRAINED = [path for path in sorted(REPRODUCTIONS.glob("*.json")) if '"epochs' in path.read_text()]
"""Other tables are of time alone."""


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_only_cells_that_were_trained_to_their_end_are_published(path: Path) -> None:
    """A document's cells and curves are those of finished trainings, however the run ended."""
    published = strict(path.read_text())
    planned = published["epochs" if "epochs" in published else "epochs_planned"]
    for cell in published["cells"]:
        assert cell.get("epochs", planned) >= planned, cell["label"]
    labels = {cell["label"] for cell in published["cells"] if "label" in cell}
    assert set(published.get("histories", ())) <= labels


def test_the_published_cells_are_all_there() -> None:
    """Nine at the paper's rate, one worker first, and as many at another; of one worker also with
    momentum. A quick look leaves those and eight workers out."""
    work = trainings(0, False, 160.0)
    assert DC_ASGD.cells == len(work) == len({one.label for one in work}) == 20
    assert {one.row for one in work[:4]} == {"1 worker"}
    errors = {one.label: one.published for one in work}
    assert errors["1 worker, SGD"] == 8.65
    assert errors["4 workers, DC-ASGD-c"] == 8.67
    assert errors["8 workers, ASGD"] == 10.26
    assert all(one.cluster.workers == int(one.row[0]) for one in work)
    assert len(trainings(0, True, 2.0)) == 5


@pytest.mark.parametrize("epochs", [160.0, 40.0])
def test_every_cell_has_the_papers_rate_and_decays_on_its_server(epochs: float) -> None:
    """The drops stay at half and three quarters, however many epochs there are."""
    digits = Problem("digits-logistic").load(None)
    for one in trainings(0, False, epochs):
        if "rate" in one.column or "momentum" in one.column:
            continue
        settings = one.settings(digits, "cpu", 1)
        schedule = make_schedule(settings.schedule, epochs=epochs, workers=one.cluster.workers)
        parts = (0.0, 0.49, 0.51, 0.74, 0.76, 1.0)
        rates = [0.5 * schedule.factor(part * epochs) for part in parts]
        assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
        assert settings.learning_rate == 0.5
        world = Simulation(settings).world
        (server,) = world.servers
        assert str(server.optimiser) == "sgd:weight_decay=0.0001"
        for end in range(world.ends):
            world.kernel.end_tasks(end)


def test_augmentation_can_be_left_out() -> None:
    """The task is otherwise the same one."""
    made = Problem("digits-logistic", augmented=False).load(None)
    assert made.augment is None
    assert DC_ASGD.trainings is not None
    assert DC_ASGD.trainings.problem.augmented


def judged(**errors: float) -> list[PublishedCell]:
    names = {"a": "DC-ASGD-a", "c": "DC-ASGD-c", "s": "SSGD", "late": "ASGD"}
    return [PublishedCell("4 workers", names[key], 9.0, error) for key, error in errors.items()]


def test_the_verdict_says_where_the_order_breaks() -> None:
    """A training that diverged is the worst of all; one alone has no order."""
    assert "order of the errors, DC-ASGD-a < DC-ASGD-c < SSGD < ASGD, holds" in verdict(
        judged(late=9.4, s=9.3, c=9.2, a=9.1)
    )
    said = verdict(judged(late=9.4, s=9.5, c=9.2, a=math.nan))
    assert "does not hold (DC-ASGD-c is not above DC-ASGD-a, ASGD is not above SSGD)" in said
    assert "largest deviation of 3 cells: +0.50 points (4 workers, SSGD)" in said
    assert "order of" not in verdict(judged(a=9.0))
    assert "overlapping intervals" in verdict([])


def test_the_curves_are_drawn_of_what_is_done(tmp_path: Path) -> None:
    """One cell is enough, and a diverged one does no harm."""
    work = trainings(0, False, 40.0)
    assert DC_ASGD.trainings is not None
    done: dict[str, Trained] = {}
    for one, last in ((work[0], 0.9), (work[1], None), (work[6], 0.8)):
        rows = [{"epochs": 0.0, "accuracy": 0.1}, {"epochs": 40.0, "accuracy": last}]
        done[one.label] = Trained(one.label, {}, rows)
        picture = tmp_path / f"{len(done)}.png"
        DC_ASGD.trainings.picture(picture, work, done)
        assert picture.stat().st_size > 10_000
