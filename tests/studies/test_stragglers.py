"""The pictures of staleness against waiting, and the published tables about servers."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from command_line import gossamer, strict
from gossamer.errors import ConfigurationError
from gossamer.report.pictures.stragglers_picture import Runner, Stage, stragglers_picture
from gossamer.runs.statistics import Interval
from gossamer.sim.simulation import Simulation
from gossamer.studies.lab.stragglers import (
    BOUNDS,
    DIAL,
    MEMORYLESS,
    PERMANENT,
    RANDOM,
    StragglerEntry,
    StragglerPace,
    Study,
    claims,
    pace,
    scenes,
)
from gossamer.studies.reproductions import TABLES, PublishedCell, servers
from support import bowl
from tiers import wide

WORKERS, STEPS, SEEDS = 8, 60, (0, 1)


@cache
def timed() -> dict[str, dict[str, StragglerEntry]]:
    """Every scene without gradients, small."""
    study = Study(bowl(1), scenes(WORKERS), SEEDS, rates=(), steps=STEPS)
    found: dict[str, dict[str, StragglerEntry]] = {}
    for job in study.jobs():
        entry = found.setdefault(job.scene.name, {}).setdefault(
            job.label, StragglerEntry(job.label)
        )
        entry.paces.append(pace(job.settings))
    return found


def values(scene: str, method: str, name: str) -> list[float]:
    return [getattr(one, name) for one in timed()[scene][method].paces]


# ---------------------------------------------------------------------- speed and waiting


@wide
@pytest.mark.parametrize(
    ("scene", "chain"),
    [
        (MEMORYLESS, DIAL[:5]),
        (MEMORYLESS, (*DIAL[:4], "downpour")),
        (RANDOM, ("sync_server", "backup_workers", "softsync")),
        (RANDOM, ("sync_server", "ssp:bound=1", "ssp:bound=4", "softsync")),
        (RANDOM, ("sync_server", "ssp:bound=1", "ssp:bound=4", "downpour")),
    ],
)
def test_speed_grows_and_waiting_falls_along_the_dial(scene: str, chain: tuple[str, ...]) -> None:
    """With the same seed, whoever waits for fewer uses more gradients a second and waits less.
    Where backup workers stand among the bounds of SSP depends on the stragglers: between sync and
    bound 1 if times have no memory, further along if a straggler lasts for ten steps."""
    for less, more in pairwise(chain):
        for seed in range(len(SEEDS)):
            slow, fast = timed()[scene][less].paces[seed], timed()[scene][more].paces[seed]
            assert slow.throughput < fast.throughput, (less, more)
            assert slow.waiting > fast.waiting, (less, more)


def test_a_permanent_straggler_sets_the_pace_of_every_bound() -> None:
    """Once the lead of `bound` steps is spent, SSP is as fast as its slowest worker, as sync is."""
    for seed in range(len(SEEDS)):
        sync = values(PERMANENT, "sync_server", "late_throughput")[seed]
        for method in BOUNDS:
            assert values(PERMANENT, method, "late_throughput")[seed] == pytest.approx(
                sync, rel=0.1
            )


def test_a_permanent_straggler_does_not_hold_up_those_who_do_not_wait_for_it() -> None:
    """Backup workers drop its gradients, asynchronous servers take them when they come."""
    for seed in range(len(SEEDS)):
        sync = values(PERMANENT, "sync_server", "late_throughput")[seed]
        for method in ("backup_workers", "softsync", "downpour"):
            assert values(PERMANENT, method, "late_throughput")[seed] > 4 * sync


def test_a_larger_bound_only_buys_a_longer_lead() -> None:
    """Over the whole run bound 16 has made 16 steps more with the fast workers, and no more."""
    tight, loose = (values(PERMANENT, m, "throughput")[0] for m in ("ssp:bound=1", "ssp:bound=16"))
    lead = 15 * (WORKERS - 1) / (STEPS * WORKERS)
    assert loose / tight == pytest.approx(1 / (1 - lead), rel=0.03)


def test_the_clock_gap_reaches_the_bound_and_stays_there() -> None:
    """A read is granted at `bound` clocks ahead of the slowest worker and never beyond."""
    for method in BOUNDS:
        assert values(PERMANENT, method, "max_clock_gap") == [int(method[10:])] * len(SEEDS)


def test_a_dropped_gradient_is_no_throughput() -> None:
    """Used are those that were computed less those that came too late."""
    study = Study(bowl(1), scenes(4)[1:2], (3,), rates=(), steps=40)
    job = next(job for job in study.jobs() if job.label == "backup_workers")
    found = pace(job.settings)
    summary = Simulation(job.settings).run().summary
    assert found.dropped == summary["dropped_gradients"] / summary["steps"] > 0
    computed = summary["steps"] / summary["virtual_seconds"]
    assert found.throughput == pytest.approx(computed * (1 - found.dropped), rel=0.02)


# ---------------------------------------------------------------------- claims and rates


def paces(*throughputs: float) -> list[StragglerPace]:
    return [StragglerPace(value, value, 1 / value, 0, 0, 0, 0, 0) for value in throughputs]


def test_a_claim_is_judged_by_the_interval_of_its_seeds() -> None:
    """Above zero it holds, below it does not, and an interval around zero leaves it open."""
    entries = {name: StragglerEntry(name, paces(*(10.0 * 2**i + j for j in range(3))))
               for i, name in enumerate(DIAL)}  # fmt: skip
    assert {claim.verdict for claim in claims({RANDOM: entries})} == {"holds"}
    entries["ssp:bound=1"].paces = paces(5, 5.1, 5.2)
    entries["ssp:bound=4"].paces = paces(4, 6, 5.2)
    verdicts = {c.statement: c.verdict for c in claims({RANDOM: entries})}
    assert verdicts["throughput: backup_workers < ssp:bound=1"] == "does not hold"
    assert verdicts["waiting: backup_workers > ssp:bound=1"] == "does not hold"
    assert verdicts["throughput: ssp:bound=1 < ssp:bound=4"] == "open"


@pytest.mark.parametrize(
    ("bounded", "free", "verdicts"),
    [
        (1.02, 5.0, ("holds", "holds")),
        (1.3, 1.5, ("does not hold", "does not hold")),
        (0.7, 2.1, ("does not hold", "holds")),
    ],
)
def test_a_pace_is_compared_with_the_synchronous_one(
    bounded: float, free: float, verdicts: tuple[str, str]
) -> None:
    """Within a tenth of it is the same pace, twice as fast is another; SSP must have the same."""
    entries = {name: StragglerEntry(name, paces(100.0 * bounded)) for name in BOUNDS}
    entries |= {"sync_server": StragglerEntry("sync_server", paces(100.0))}
    entries |= {"downpour": StragglerEntry("downpour", paces(100.0 * free))}
    found = [claim.verdict for claim in claims({PERMANENT: entries})]
    assert found == [verdicts[0]] * 3 + [verdicts[1]]


def run(*accuracies: float) -> list[dict[str, float]]:
    return [{"epochs": float(at), "accuracy": value} for at, value in enumerate(accuracies)]


def test_the_best_rate_is_the_best_over_the_whole_run() -> None:
    """A rate that ends as high but gets there later is worth less, one that diverges nothing."""
    histories = {
        0.1: [run(0.1, 0.5, 0.9)],
        0.3: [run(0.1, 0.8, 0.9)],
        1.0: [run(0.1, 0.99, math.nan)],
    }
    entry = StragglerEntry("downpour", paces(1.0), histories)
    assert entry.best_rate == 0.3
    assert entry.average(0.3).mean == pytest.approx((0.45 + 0.85) / 2)
    assert math.isnan(entry.average(1.0).mean)
    assert not entry.is_at_edge
    histories.pop(0.1)
    histories[3.0] = [run(0.1, 0.2, 0.3)]
    assert entry.is_at_edge


# ---------------------------------------------------------------------- the command


SMALL = ("lab", "stragglers", "--workers", "4", "--seeds", "1", "--steps", "40", "--epochs", "1",
         "--lr", "0.1", "--task", "quadratic:dimension=2,samples=128")  # fmt: skip


def test_the_command_tells_draws_and_keeps_everything(tmp_path: Path) -> None:
    """One line of metrics a run, what was decided, what came out, and the picture."""
    said = gossamer(*SMALL, "--runs", str(tmp_path), "--json")
    assert said.status == 0, said.err
    (folder,) = tmp_path.iterdir()
    summary = strict((folder / "summary.json").read_text())
    assert set(summary.pop("made_with")) == {"gossamer", "python", "schema", "torch", "written"}
    assert summary == {"ended": "finished", **said.json}
    assert list(said.json["scenes"]) == [RANDOM, PERMANENT, MEMORYLESS]
    methods = [row["method"] for row in said.json["scenes"][PERMANENT]]
    assert methods == ["sync_server", "backup_workers", *BOUNDS, "softsync", "downpour"]
    for row in said.json["scenes"][RANDOM]:
        span = row["throughput"]
        assert 0 < span["low"] <= span["mean"] <= span["high"]
        assert row["learning_rate"] == 0.1
        assert row["loss"]["mean"] > 0
    assert "loss" not in said.json["scenes"][MEMORYLESS][0]
    verdicts = {claim["verdict"] for claim in said.json["claims"]}
    assert verdicts <= {"holds", "does not hold", "open"}
    assert all(claim["statement"] in said.err for claim in said.json["claims"])
    lines = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 19 + 13
    assert sum("history" in line for line in lines) == 13
    config = strict((folder / "config.json").read_text())
    assert config["learning_rates"] == [0.1]
    assert [scene["cluster"]["workers"] for scene in config["scenes"]] == [4, 4, 4]
    assert (folder / "stragglers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--steps 5", "--steps must be at least 40, got 5"),
        ("--workers 1", "--workers must be at least 2, got 1"),
        ("--lr fast", "--lr must be numbers separated by commas, got 'fast'"),
        ("--lr -1", "--lr must be a finite number above 0, got -1.0"),
        ("--seeds 0", "--seeds must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: str, sentence: str) -> None:
    """It ends with code 2 and leaves nothing behind."""
    said = gossamer("lab", "stragglers", *arguments.split(), "--runs", str(tmp_path))
    assert said.status == 2
    assert said.err.strip() == f"error: {sentence}"
    assert not list(tmp_path.iterdir())


def runner(label: str) -> Runner:
    span = Interval(0.5, 0.4, 0.6)
    return Runner(label, span, span, span, 0.1, [run(0.1, 0.6, 0.9), run(0.1, 0.7, 0.8)])


def test_the_picture_is_written_for_accuracies_too(tmp_path: Path) -> None:
    """Folders on the way are made; a name that no picture can have is refused."""
    stages = [
        Stage("random", [runner("sync_server"), runner("downpour")]),
        Stage("permanent", [runner("sync_server"), runner("ssp:bound=1")], slowest_pace=0.3),
    ]
    stragglers_picture(tmp_path / "deep" / "s.png", stages, title="Title", subtitle="below")
    assert (tmp_path / "deep" / "s.png").stat().st_size > 10_000
    with pytest.raises(ConfigurationError, match=r"end its name in \.png"):
        stragglers_picture(tmp_path / "s.word", stages, title="Title", subtitle="below")


def test_a_picture_without_training_is_refused(tmp_path: Path) -> None:
    """Its third panel would be empty, and say so to nobody."""
    span = Interval(1.0, 1.0, 1.0)
    stage = Stage("random", [Runner("downpour", span, span, span, 0.1, [])])
    with pytest.raises(ConfigurationError, match="needs a trained run of each method"):
        stragglers_picture(tmp_path / "s.png", [stage], title="Title", subtitle="below")


# ---------------------------------------------------------------------- published tables


def computed(name: str) -> dict[tuple[str, str], PublishedCell]:
    table = TABLES[name]
    told: list[str] = []
    assert table.compute is not None
    cells = table.compute(0, told.append)
    assert len(cells) == len(told) == table.cells
    assert all(cell.ours > 0 and cell.evidence for cell in cells)
    return {(cell.row, cell.column): cell for cell in cells}


def test_softsync_means_are_exact_and_its_maxima_about_2n(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal steps, from each learner's second gradient on: (lambda - 1) / c with c = lambda /
    n; jitter only shifts who is last at the end of the run."""
    monkeypatch.setattr(servers, "SOFTSYNC_STEPS", 24)
    cells = computed("softsync-staleness")
    for n in servers.SPLITS:
        exact = (servers.LEARNERS - 1) / (servers.LEARNERS // n)
        mean = cells["mean, equal steps", f"n = {n}"]
        assert mean.ours == pytest.approx(exact, abs=1e-12)
        assert mean.published == n
        most = cells["maximum, equal steps", f"n = {n}"]
        assert n <= most.ours <= most.published == 2 * n
        assert cells["mean, 5 % jitter", f"n = {n}"].ours == pytest.approx(exact, rel=0.01)
        assert cells["maximum, 5 % jitter", f"n = {n}"].ours <= 2 * n


@wide
def test_backup_workers_wait_less_and_drop_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further backup shortens the wait for the last gradient needed; what is dropped is about
    its share of the machines. The published cells are those of the paper's figures."""
    monkeypatch.setattr(servers, "ROUNDS", 400)
    monkeypatch.setattr(servers, "UPDATES", 4)
    cells = computed("backup-workers")
    known = {(cell.column, cell.published) for cell in cells.values() if cell.published}
    assert known == {("b=0", 30.0), ("b=0", 310.0), ("b=2", 80.0), ("b=4", 1.0)}
    columns = [f"b={b}" for b in servers.BACKUPS]
    waits = [cells["mean wait (s)", column].ours for column in columns]
    assert waits == sorted(waits, reverse=True)
    within = [cells["N-th within 2 s (%)", column].ours for column in columns]
    assert within == sorted(within)
    for b, column in zip(servers.BACKUPS, columns, strict=True):
        used = cells["gradients used (%)", column].ours
        assert 100 - b - 0.5 <= used <= 100
    best = [cell for (row, _), cell in cells.items() if row.startswith("to converge")]
    assert min(cell.ours for cell in best) == 1.0


def test_the_straggling_was_fitted_to_the_published_figures() -> None:
    """No other probability comes nearer to 30 % and 80 % within 2 s; the tail ends at 310 s."""

    def in_time(late: int, q: float) -> float:
        return sum(math.comb(100, k) * q**k * (1 - q) ** (100 - k) for k in range(late + 1))

    def error(q: float) -> float:
        return (in_time(0, q) - 0.3) ** 2 + (in_time(2, q) - 0.8) ** 2

    fitted = servers.STRAGGLING
    q = fitted.pause_probability
    assert error(q) < min(error(q - 1e-4), error(q + 1e-4))
    delays = q * 100 * 76_200
    assert fitted.shortest_delay * delays ** (1 / fitted.tail) == pytest.approx(310, rel=0.01)
    rng = random.Random(0)
    drawn = [fitted.draw(rng) for _ in range(40_000)]
    assert sum(time > 2 for time in drawn) / len(drawn) == pytest.approx(q, rel=0.1)
