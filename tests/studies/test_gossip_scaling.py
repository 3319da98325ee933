"""The tables about shapes: gossip over workers, and four methods on 16 of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import gossamer
from gossamer.optim.schedules import make_schedule
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions import TABLES, PublishedCell, PublishedTable
from gossamer.studies.reproductions.ad_psgd_cifar10 import TABLE as AD_PSGD
from gossamer.studies.reproductions.ad_psgd_cifar10 import verdict as ad_psgd_verdict
from gossamer.studies.reproductions.gossip_scaling import DIGITS
from gossamer.studies.reproductions.gossip_scaling import TABLE as CIFAR10
from gossamer.studies.reproductions.shapes import (
    AGREES,
    DIFFERS,
    OPEN,
    Margin,
    Number,
    PartOfRun,
    accuracy,
    alike,
    judged,
    less,
    moment,
)
from gossamer.studies.reproductions.table import Trainings
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained
from tiers import only

SHAPES = {"gossip-scaling": CIFAR10, "gossip-scaling-digits": DIGITS}
numbers = st.one_of(st.none(), st.just(math.inf), st.floats(0, 1e6))
margins = st.builds(Margin, absolute=st.floats(0, 10), relative=st.floats(0, 0.5))


def trainings_of(table: PublishedTable) -> Trainings:
    assert table.trainings is not None
    return table.trainings


def work_of(table: PublishedTable, quick: bool = False) -> list[CellTraining]:
    return trainings_of(table).make(0, quick, 90.0)


# ---------------------------------------------------------------------- statements


@given(numbers, numbers, margins)
def test_an_order_and_its_opposite_never_both_agree(
    one: float | None, other: float | None, margin: Margin
) -> None:
    """One agrees exactly where the other differs, and both are open together."""
    first, second = Number("first", one, "s"), Number("second", other, "s")
    findings = [less("here", *pair, margin).finding for pair in ((first, second), (second, first))]
    assert sorted(findings) in ([OPEN, OPEN], sorted([AGREES, DIFFERS]))


@given(numbers, numbers, margins)
def test_what_is_ordered_is_not_alike(
    one: float | None, other: float | None, margin: Margin
) -> None:
    """Two known numbers are alike, or one of them is below the other."""
    first, second = Number("first", one, "s"), Number("second", other, "s")
    ordered = less("here", first, second, margin).finding
    near = alike("here", first, second, margin).finding
    if one is None or other is None or one == other == math.inf:
        assert (ordered, near) == (OPEN, OPEN)
    else:
        assert (ordered == OPEN) == (near == AGREES)


def test_a_statement_agrees_only_where_all_of_it_does() -> None:
    """One part that differs decides; one that is open leaves it open; nothing says nothing."""
    yes, no, open_ = PartOfRun(AGREES, "a"), PartOfRun(DIFFERS, "b"), PartOfRun(OPEN, "c")
    assert judged("it", [yes, yes]) == "it: agrees (a)"
    assert judged("it", [yes, open_, open_]) == "it: cannot say (c)"
    assert judged("it", [yes, no, open_]) == "it: does not agree (b)"
    assert judged("it", []) == "it: cannot say"


def test_diverged_is_worst_and_never_reached_is_last() -> None:
    """A training that failed loses against any that did not; one that is missing does not."""
    assert less("p", accuracy("a", math.nan), accuracy("b", 12.0), Margin(1.0)).finding == AGREES
    assert less("p", moment("a", 9.0, "s"), moment("b", math.nan, "s"), Margin()).finding == AGREES
    missing = less("p", moment("a", None, "s"), moment("b", 9.0, "s"), Margin())
    assert missing == PartOfRun(OPEN, "p: not trained")
    assert str(moment("a", math.nan, "s")) == "a not reached"


# ---------------------------------------------------------------------- gossip over workers


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_methods_are_there_for_each_number_of_workers(name: str) -> None:
    """Four up to 16 workers, EASGD at two periods, two beyond; each with the paper's settings."""
    work = work_of(SHAPES[name])
    assert len({one.label for one in work}) == len(work) == 16
    assert SHAPES[name].cells == 5 * len(work)
    columns = {p: [one.column for one in work if one.cluster.workers == p] for p in (16, 32, 128)}
    assert columns[16] == [
        "all_reduce", "easgd", "easgd, tau 1", "pull_gossip", "push_gossip"
    ]  # fmt: skip
    assert columns[32] == columns[128] == ["all_reduce", "pull_gossip"]
    digits = Problem("digits-logistic").load(None)
    for one in work:
        chosen = one.settings(digits, "cpu", 1)
        options = chosen.method_options()
        workers = one.cluster.workers
        if one.column == "easgd":
            assert options["alpha"] == pytest.approx(0.8 / workers)
            assert options["period"] == 10
        elif "gossip" in one.column or "tau 1" in one.column:
            assert options["period"] == 1
        schedule = make_schedule(chosen.schedule, epochs=90.0, workers=workers)
        rates = [0.1 * schedule.factor(epoch) for epoch in (0, 29, 31, 59, 61, 90)]
        assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert {one.cluster.workers for one in work_of(SHAPES[name], quick=True)} == {8, 32}


def test_the_cifar_batches_are_those_of_the_paper() -> None:
    """32 images a worker with 8 of them, 16 with more; a step's time follows them."""
    steps = {one.cluster.workers: one for one in work_of(CIFAR10)}
    assert {p: one.choices["batch"] for p, one in steps.items()} == {
        8: 32, 16: 16, 32: 16, 64: 16, 128: 16
    }  # fmt: skip
    assert steps[8].cluster.compute.seconds == pytest.approx(0.256)
    assert steps[128].cluster.name == "torus-128"


def test_every_cell_can_be_simulated() -> None:
    """Methods, clusters and schedules fit together, up to 128 workers."""
    digits = Problem("digits-logistic").load(None)
    for one in (*work_of(CIFAR10), *work_of(AD_PSGD)):
        world = Simulation(one.settings(digits, "cpu", 1)).world
        assert world.size == one.cluster.workers
        for end in range(world.ends):
            world.kernel.end_tasks(end)


def trained(one: CellTraining, accuracies: list[float | None]) -> Trained:
    """Evaluated every tenth of 90 epochs, two seconds each."""
    rows = [
        {"epochs": 9.0 * at, "virtual_seconds": 18.0 * at, "accuracy": score}
        for at, score in enumerate(accuracies)
    ]
    return Trained(one.label, {"accuracy": accuracies[-1]}, rows)


def test_early_speed_is_measured_before_the_first_drop() -> None:
    """Between two evaluations on a straight line; what comes after the drop does not count."""
    one = work_of(CIFAR10)[0]
    further = trainings_of(CIFAR10).further
    assert further is not None
    other = work_of(CIFAR10)[1]

    def cells(*scores: float | None) -> list[PublishedCell]:
        """Of a training beside an all-reduce whose plateau is 0.9 / 0.97."""
        plateau = trained(one, [0.1, 0.2, 0.3, 0.9 / 0.97])
        own = trained(other, list(scores))
        return further(other, {one.label: plateau, other.label: own})

    seconds, epochs, own, loss = cells(0.1, 0.8, 1.0, 1.0, 0.99)
    assert (seconds.row, epochs.row) == (
        "8 workers, s to the plateau",
        "8 workers, epochs to the plateau",
    )
    assert (seconds.ours, epochs.ours) == pytest.approx((27.0, 13.5))
    assert (own.row, loss.row) == ("8 workers, a worker's own", "8 workers, loss")
    late = cells(0.1, 0.2, None, 0.7, 0.99)
    assert all(math.isnan(cell.ours) for cell in late[:2])
    assert trainings_of(CIFAR10).show(late[0]) == "not reached"
    # Before all-reduce is trained nobody knows its plateau.
    assert len(further(other, {other.label: trained(other, [0.1, 0.9])})) == 2


def shape(**changed: tuple[float, float]) -> list[PublishedCell]:
    """The paper's shape as (s, final accuracy), with some cells changed: p8_easgd=(1, 90)."""
    found = {
        "p8_push_gossip": (97.0, 91.0), "p16_push_gossip": (55.0, 91.0),
        "p8_all_reduce": (100.0, 91.0), "p8_easgd": (60.0, 90.0), "p8_pull_gossip": (98.0, 91.0),
        "p16_all_reduce": (100.0, 91.0), "p16_easgd": (80.0, 90.0), "p16_pull_gossip": (50.0, 91.0),
    }  # fmt: skip
    for workers in (32, 64, 128):
        found |= {f"p{workers}_all_reduce": (90.0, 91.0), f"p{workers}_pull_gossip": (50.0, 89.0)}
    cells: list[PublishedCell] = []
    for key, (seconds, final) in (found | changed).items():
        place, _, column = key.partition("_")
        row = f"{place[1:]} workers"
        cells += [
            PublishedCell(row, column, None, final),
            PublishedCell(f"{row}, s to the plateau", column, None, seconds),
            PublishedCell(f"{row}, epochs to the plateau", column, None, seconds / 2),
        ]
    return cells


def said_of(cells: list[PublishedCell]) -> list[str]:
    """The finding of each statement, in the order of the verdict."""
    lines = [line for line in trainings_of(CIFAR10).verdict(cells).splitlines() if line[0] == "J"]
    return [next(word for word in (DIFFERS, OPEN, AGREES) if f": {word}" in line) for line in lines]


def test_the_papers_shape_agrees_with_itself() -> None:
    assert said_of(shape()) == [AGREES] * 6


def test_each_statement_breaks_on_its_own_cells() -> None:
    """J4, J5, J6 early and late, J7 early and late."""
    # Without EASGD nobody is clearly before all-reduce, as the paper itself has it.
    slow_elastic = said_of(shape(p8_easgd=(150.0, 90.0)))
    assert slow_elastic == [DIFFERS, AGREES, AGREES, AGREES, OPEN, AGREES]
    assert said_of(shape(p16_pull_gossip=(95.0, 91.0)))[1] == DIFFERS
    assert said_of(shape(p64_pull_gossip=(math.nan, 89.0)))[2] == DIFFERS
    best_gossip = said_of(shape(p128_pull_gossip=(50.0, 92.0)))
    assert [best_gossip[at] for at in (3, 5)] == [DIFFERS, DIFFERS]
    assert said_of(shape(p8_all_reduce=(20.0, 91.0)))[4] == DIFFERS
    assert said_of(shape(p32_pull_gossip=(50.0, 90.8)))[3] == OPEN
    assert said_of([]) == [OPEN] * 6


def test_what_is_not_trained_yet_may_still_be_the_first() -> None:
    """All-reduce wins against all asynchronous methods, or nothing is said."""
    rows = shape(p16_pull_gossip=(200.0, 91.0), p16_easgd=(200.0, 91.0))
    assert said_of(rows)[4] == AGREES
    assert said_of([cell for cell in rows if cell.column != "push_gossip"])[4] == OPEN


@pytest.mark.parametrize("name", only(list(SHAPES)[:1], SHAPES))
def test_the_curves_are_drawn_of_what_is_done(name: str, tmp_path: Path) -> None:
    """One cell is enough, and a diverged one does no harm."""
    work = work_of(SHAPES[name])
    done: dict[str, Trained] = {}
    for one, scores in ((work[0], [0.1, 0.2]), (work[1], [0.1, None]), (work[-1], [0.1, 0.99])):
        done[one.label] = trained(one, scores)
        picture = tmp_path / f"{len(done)}.png"
        trainings_of(SHAPES[name]).picture(picture, work, done)
        assert picture.stat().st_size > 10_000


def test_one_training_gives_all_its_cells_and_going_on_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The early cells come from the history, so a finished cell that is read back has them too."""
    own = trainings_of(DIGITS)

    def few(seed: int, quick: bool, epochs: float) -> list[CellTraining]:
        return [
            dataclasses.replace(one, choices={**one.choices, "evaluations": 4})
            for one in own.make(seed, quick, epochs)[-2:]
        ]

    two = dataclasses.replace(own, make=few)
    monkeypatch.setitem(TABLES, "two", dataclasses.replace(DIGITS, name="two", trainings=two))

    def reproduce(*arguments: str) -> Any:
        return gossamer("reproduce", "two", *arguments, "--json")

    straight = reproduce("--quick", "--epochs", "0.5", "--runs", str(tmp_path))
    assert straight.status == 0, straight.err
    places = [(cell["row"], cell["column"]) for cell in straight.json["cells"]]
    assert places[:3] == [
        ("32 workers", "all_reduce"),
        ("32 workers, s to the plateau", "all_reduce"),
        ("32 workers, epochs to the plateau", "all_reduce"),
    ]
    assert len(places) == 10
    assert "10 cells of 80" in straight.err
    assert "J7: " in straight.err
    (folder,) = tmp_path.iterdir()
    assert (folder / "table.png").stat().st_size > 10_000
    assert reproduce("--resume", str(folder)).json["cells"] == straight.json["cells"]


# ---------------------------------------------------------------------- AD-PSGD on CIFAR-10


@pytest.mark.parametrize("epochs", [160.0, 40.0])
def test_the_four_methods_have_the_papers_schedule(epochs: float) -> None:
    """Linear scaling after five epochs of warm-up, drops at 81 and 122 of 160 epochs, and all of it
    in the same places of fewer; beside it two rows at 0.1."""
    every = trainings_of(AD_PSGD).make(0, False, epochs)
    work = [one for one in every if one.row == "16 workers"]
    assert [one.choices["batch"] for one in every if one not in work] == [32, 32, 32, 32, 128]
    assert {one.column: one.published for one in work} == {
        "AllReduce": 90.72, "D-PSGD": 90.81, "EAMSGD": 89.82, "AD-PSGD": 91.49
    }  # fmt: skip
    digits = Problem("digits-logistic").load(None)
    for one in work:
        chosen = one.settings(digits, "cpu", 1)
        assert (one.cluster.workers, chosen.batch) == (16, 128)
        schedule = make_schedule(chosen.schedule, epochs=epochs, workers=16)
        rates = [0.1 * schedule.factor(epoch * epochs / 160) for epoch in (0, 5, 80, 82, 123)]
        assert rates == pytest.approx([0.1, 1.6, 1.6, 0.16, 0.016])
        if one.column == "EAMSGD":
            assert chosen.method_options()["period"] == 1


def test_the_verdict_holds_every_order_against_ours() -> None:
    """The published cells agree with themselves where they are far enough apart."""
    published = {one.column: one.published for one in work_of(AD_PSGD) if one.published}

    def said(**changed: float) -> list[str]:
        ours = published | {key.replace("_", "-"): value for key, value in changed.items()}
        cells = [
            PublishedCell("16 workers", key, published[key], value) for key, value in ours.items()
        ]
        return ad_psgd_verdict(cells).splitlines()

    assert all(f": {AGREES}" in line for line in said()[:5])
    assert "largest deviation of 4 cells: +0.00 points" in said()[5]
    worse = said(AD_PSGD=90.5, EAMSGD=math.nan)
    assert worse[0].startswith(f"AllReduce below AD-PSGD: {OPEN}")
    assert worse[2].startswith(f"EAMSGD below AD-PSGD: {AGREES}")
    assert "largest deviation of 3 cells: -0.99 points (16 workers, AD-PSGD)" in worse[5]
    assert f"D-PSGD as good as AllReduce: {DIFFERS}" in said(D_PSGD=85.0)[3]
    assert "from memory" in ad_psgd_verdict([])
