"""The goodput of elastic, of data-parallel and of decoupled training at up to 2.4 million chips.

A learner of so many chips is one worker that fails so much more often: with N chips in M learners,
each of them at the rate lambda N / M. So the run is in virtual time, without gradients, and has
from one to sixteen workers instead of a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Failures
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable
from gossamer.tasks import make_task

YEAR_S = 8766 * 3600.0
"""The mean time between two interruptions of one chip."""
STEP_S = 1.0
DEATHS = 1000
"""So many interruptions of one learner are played, and of M learners an M-th of it: with more of
them each costs the run less. The standard error is below a point."""
_SIMULATED, _FORM = "simulated", "closed form"
_READ = "as quoted by digests of the paper; its text was not read"
_PERCENT = 100.0


@dataclass(frozen=True)
class Learners:
    """So many chips, divided into learners that fail one by one."""

    chips: float
    learners: int
    is_elastic: bool
    published: float
    """Goodput in percent."""

    @property
    def label(self) -> str:
        kind = f"decoupled, {self.learners} learners" if self.learners > 1 else "elastic"
        return f"{self.chips / 1e6:g}M chips, {kind if self.is_elastic else 'data-parallel'}"

    @property
    def failures_per_s(self) -> float:
        """Of one learner."""
        return self.chips / self.learners / YEAR_S


ARRANGEMENTS = (
    Learners(1.2e6, 1, is_elastic=False, published=27),
    Learners(2.4e6, 1, is_elastic=False, published=18),
    Learners(1.2e6, 1, is_elastic=True, published=58),
    Learners(2.4e6, 1, is_elastic=True, published=40),
    Learners(1.2e6, 2, is_elastic=True, published=70),
    Learners(1.2e6, 8, is_elastic=True, published=88),
    Learners(1.2e6, 16, is_elastic=True, published=93),
    Learners(2.4e6, 8, is_elastic=True, published=80),
    Learners(2.4e6, 16, is_elastic=True, published=86),
)


def fitted_downtime(*, is_elastic: bool) -> float:
    """The seconds that an interruption costs a learner: those with which the closed form gives the
    published goodput of the one learner of 1.2 million chips."""
    one = next(own for own in ARRANGEMENTS if own.is_elastic == is_elastic)
    return (_PERCENT / one.published - 1) / one.failures_per_s


def closed_form(one: Learners) -> float:
    """Percent: 1 / (1 + lambda (N / M) D)."""
    lost = one.failures_per_s * fitted_downtime(is_elastic=one.is_elastic)
    return _PERCENT / (1 + lost)


def simulated(one: Learners, seed: int, deaths: int = DEATHS) -> float:
    """Percent of a run in virtual time in which learners fail and come back."""
    mtbf, repair = 1 / one.failures_per_s, fitted_downtime(is_elastic=one.is_elastic)
    cluster = Cluster(
        name="learners", workers=one.learners,
        compute=Compute(seconds=STEP_S, distribution="constant"),
        network=Wires(bandwidth=1e15, latency=1e-6), failure_detection=0.0,
        failures=Failures(mtbf=mtbf, repair=repair),
    )  # fmt: skip
    task = make_task("quadratic:dimension=1,samples=1024")
    choices: dict[str, Any] = {
        "seed": seed, "batch": 1, "engine": "none",
        "epochs": deaths / one.failures_per_s / one.learners / STEP_S / len(task.train),
    }  # fmt: skip
    method = "decoupled_diloco:fragments=1" if one.learners > 1 else "all_reduce"
    run = Simulation(make_settings(task, method, cluster, **choices)).run()
    return _PERCENT * run.summary["goodput"]


def _goodputs(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for one in ARRANGEMENTS:
        ours, form = simulated(one, seed), closed_form(one)
        cells.append(PublishedCell(one.label, _SIMULATED, one.published, ours, _READ))
        cells.append(PublishedCell(one.label, _FORM, one.published, form, _READ))
        progress(f"{one.label}: {ours:.1f} % simulated, {form:.1f} % by the closed form")
    return cells


def _verdict(cells: list[PublishedCell]) -> str:
    ours = [cell for cell in cells if cell.column == _SIMULATED]
    forms = [cell for cell in cells if cell.column == _FORM]
    near = sum(abs(cell.ours - (cell.published or 0.0)) <= 6 for cell in ours)
    apart = max(abs(one.ours - form.ours) for one, form in zip(ours, forms, strict=True))
    return (
        f"{near} of {len(ours)} simulated cells within 6 points of the published ones; simulation "
        f"and closed form at most {apart:.1f} points apart"
    )


TABLE = PublishedTable(
    name="goodput",
    title="Goodput with an interruption per chip and year, in percent",
    source="Douillard et al. 2026, Decoupled DiLoCo",
    unit="%",
    settings=(
        "M learners of N / M chips each fail at the rate N / M per year and come back after D "
        f"seconds; steps of {STEP_S:g} s, a network that takes no time, about {DEATHS} / M "
        "interruptions a cell. Two constants are fitted, each to one cell: "
        f"D = {fitted_downtime(is_elastic=True):.1f} s where a learner goes on with its other "
        "chips (elastic, 1.2M), "
        f"and {fitted_downtime(is_elastic=False):.1f} s where all stop (data-parallel, 1.2M). The "
        "closed form is 1 / (1 + lambda N D / M)."
    ),
    cells=len(ARRANGEMENTS),
    compute=_goodputs,
    verdict=_verdict,
)
