"""What Chen et al. say about staleness and accuracy: K1, K2 and K5 to K7, on small problems."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import numpy as np
import torch

from gossamer.config.cluster import Cluster, Wires
from gossamer.studies.lab.grid import Grid
from gossamer.studies.lab.training import GroupTraining, Models
from gossamer.studies.reproductions.repeated.trials import (
    SEEDS,
    Trial,
    at_rate,
    error,
    loss_of_test,
    reached,
    repeated_cell,
    tuned,
)
from gossamer.studies.reproductions.servers import STRAGGLING
from gossamer.studies.reproductions.shapes import AGREES, DIFFERS
from gossamer.studies.reproductions.table import PublishedCell, PublishedTable, TrialBook
from gossamer.studies.reproductions.trainings import Trained
from gossamer.tasks import make_task

_READ = "read in the paper (arXiv 1604.00981 v3)"

# ---------------------------------------------------------------------- K1: staleness by layer

_MACHINES, _LAYERS, _FORWARD = 40, 20, 1 / 3
_STEPS = 60
_PUBLISHED_LAYERS = {"top": 14.54, "bottom": 38.97}


def layer_staleness(seed: int) -> dict[str, float]:
    """The mean number of updates of the top and of the bottom layer that others make between a
    worker's read of all parameters, at the start of its step, and its own update of the layer.

    The forward pass takes a third of a step. Backward passes run from the top layer down, and each
    layer is updated when its gradient is there.
    """
    rng = random.Random(f"{seed}/layers")
    shares = {"top": _FORWARD + (1 - _FORWARD) / _LAYERS, "bottom": 1.0}
    read: list[float] = []
    updated: dict[str, list[float]] = {name: [] for name in shares}
    for _ in range(_MACHINES):
        now = rng.random()
        for _ in range(_STEPS):
            lasted = max(0.1, rng.gauss(1.0, 0.1))
            read.append(now)
            for name, share in shares.items():
                updated[name].append(now + share * lasted)
            now += lasted
    found: dict[str, float] = {}
    for name, moments in updated.items():
        ordered = np.sort(moments)
        # Not at the beginning and the end, where not everybody takes part.
        middle = [i for i, at in enumerate(read) if 5.0 < at < _STEPS - 15.0]
        between = [
            np.searchsorted(ordered, moments[i]) - np.searchsorted(ordered, read[i], "right")
            for i in middle
        ]
        found[name] = float(np.mean(between))
    return found


def _layers(book: TrialBook) -> list[PublishedCell]:
    found = [layer_staleness(book.seed + one) for one in range(SEEDS)]
    cells = [
        repeated_cell(
            "K1: staleness, 40 workers", f"{name} layer", [one[name] for one in found],
            published, _READ,
        )
        for name, published in _PUBLISHED_LAYERS.items()
    ]  # fmt: skip
    book.progress(f"K1: {cells[0].ours:.3g} at the top, {cells[1].ours:.3g} at the bottom")
    return cells


# ---------------------------------------------------------------------- K2: error by staleness

_DELAYS = (0, 20, 50)
_DELAY_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
_DELAY_EPOCHS, _DELAY_BATCH = 10.0, 8


def _delayed(book: TrialBook) -> list[PublishedCell]:
    """Late gradients with a warm-up of three epochs, each delay at its best rate."""
    seeds = tuple(range(book.seed, book.seed + SEEDS + 1))
    found = book.keep(f"K2, rates {_DELAY_RATES}, seeds {seeds}", lambda: _train_delayed(seeds))
    scores = {(delay, rate, seed): (loss, right) for delay, rate, seed, loss, right in found}
    cells: list[PublishedCell] = []
    for delay in _DELAYS:
        last = {rate: scores[delay, rate, seeds[-1]][0] for rate in _DELAY_RATES}
        rate = min(_DELAY_RATES, key=lambda r: last[r] if math.isfinite(last[r]) else math.inf)
        errors = [100 * (1 - scores[delay, rate, one][1]) for one in seeds[:-1]]
        column = f"staleness {delay}"
        cells.append(repeated_cell("K2: error %", column, errors))
        cells.append(PublishedCell("K2: at rate", column, None, rate))
        book.progress(f"K2, staleness {delay}: {cells[-2].ours:.3g} % at rate {rate:g}")
    return cells


def _train_delayed(seeds: tuple[int, ...]) -> list[tuple[int, float, int, float, float]]:
    """Delay, rate, seed, loss and accuracy of each training."""
    grid = Grid(
        ("sgd:momentum=0.9",), _DELAY_RATES, (_DELAY_BATCH,), _DELAYS, _DELAY_EPOCHS, seeds,
        warmup=3.0,
    )  # fmt: skip
    task = make_task("digits-mlp")
    (group,) = grid.groups()
    training = GroupTraining(Models.of(task, torch.device("cpu"), seeds), group, grid)
    while not training.is_over:
        training.advance()
    scores = training.scores()
    rows = zip(group.points, scores.losses, scores.accuracies, strict=True)
    return [(p.delay, p.learning_rate, p.seed, loss, right) for p, loss, right in rows]


# ---------------------------------------------------------------------- K5 to K7

_WORKERS = (8, 16, 32)
_BACKUPS = {8: 1, 16: 1, 32: 2}
_RATES = (0.03, 0.1, 0.3, 1.0)
_EPOCHS, _BATCH, _TARGET = 6.0, 4, 0.9


def _trial(method: str, workers: int) -> Trial:
    cluster = Cluster(
        name="stragglers", workers=workers, compute=STRAGGLING,
        network=Wires(bandwidth=1e15, latency=0.0),
    )  # fmt: skip
    choices = {"epochs": _EPOCHS, "batch": _BATCH, "optimiser": "sgd", "evaluations": 30}
    return Trial("digits-mlp", method, cluster, choices)


def _pair(book: TrialBook) -> list[PublishedCell]:
    """Synchronous training with backup workers beside asynchronous training."""
    cells: list[PublishedCell] = []
    seconds = reached(_TARGET, "virtual_seconds")
    base = 0.0
    for workers in _WORKERS:
        where = f"{workers} workers"
        backup = _trial(f"backup_workers:backups={_BACKUPS[workers]},decay=0", workers)
        late = _trial("downpour", workers)
        runs = {
            "sync": tuned(backup, _RATES, book, loss_of_test),
            "async": tuned(late, _RATES, book, loss_of_test),
        }
        for name, found in runs.items():
            cells.append(found.cell(f"K5: error %, {name}", where, error))
            cells.append(found.cell(f"K5: s to {100 * _TARGET:g} %, {name}", where, seconds))
            cells.append(found.cell(f"K7: loss, {name}", where, loss_of_test))
            cells.append(PublishedCell(f"{name} at rate", where, None, found.rate))
        base = base or runs["sync"].rate / workers
        scaled = at_rate(backup, base * workers, book)
        cells.append(scaled.cell("K6: accuracy %, rate in proportion", where, accuracy))
        book.progress(
            f"{where}: {error_of(runs['sync'].runs)} sync, {error_of(runs['async'].runs)}"
        )
    return cells


def accuracy(run: Trained) -> float:
    """On the test set, in %."""
    return 100.0 - error(run)


def error_of(runs: Sequence[Trained]) -> str:
    """For the line of progress."""
    return f"{mean(error(run) for run in runs):.3g} % wrong"


# ---------------------------------------------------------------------- the table


def _all(book: TrialBook) -> list[PublishedCell]:
    return [*_layers(book), *_delayed(book), *_pair(book)]


def verdict(cells: list[PublishedCell]) -> str:
    """Judge each statement by the means, and say where intervals leave it open."""
    found = {(cell.row, cell.column): cell for cell in cells}

    def ordered(statement: str, pairs: Sequence[tuple[PublishedCell, PublishedCell]]) -> str:
        """That the first of each pair is the smaller one."""
        holds = [low.ours < high.ours for low, high in pairs]
        clear = [
            low.ours + (low.half_width or 0.0) < high.ours - (high.half_width or 0.0)
            for low, high in pairs
        ]
        word = AGREES if all(holds) else DIFFERS
        texts = [f"{low.ours:.3g} and {high.ours:.3g}" for low, high in pairs]
        return (
            f"{statement}: {word} ({'; '.join(texts)}; the intervals are apart in {sum(clear)} of "
            f"{len(clear)})"
        )

    def at(row: str, workers: int) -> PublishedCell:
        return found[row, f"{workers} workers"]

    k2 = [found["K2: error %", f"staleness {delay}"] for delay in _DELAYS]
    k6 = [at("K6: accuracy %, rate in proportion", workers) for workers in _WORKERS]
    to = f"K5: s to {100 * _TARGET:g} %"
    pairs = {
        "K5: synchronous training is more accurate": [
            (at("K5: error %, sync", w), at("K5: error %, async", w)) for w in _WORKERS
        ],
        "K5: and faster with many workers": [
            (at(f"{to}, sync", _WORKERS[-1]), at(f"{to}, async", _WORKERS[-1]))
        ],
        "K5: but slower with few": [
            (at(f"{to}, async", _WORKERS[0]), at(f"{to}, sync", _WORKERS[0]))
        ],
        "K7: asynchronous training does not reach the loss of synchronous training": [
            (at("K7: loss, sync", w), at("K7: loss, async", w)) for w in _WORKERS
        ],
    }
    return "\n".join([
        ordered("K2: the error grows with staleness", [(k2[0], k2[1]), (k2[1], k2[2])]),
        *(ordered(statement, one) for statement, one in pairs.items()),
        ordered("K6: more workers at a rate in proportion are more accurate",
                list(pairwise(k6))),
    ])  # fmt: skip


TABLE = PublishedTable(
    name="backup-workers-accuracy",
    title="Stale against synchronous: what 'Revisiting Distributed Synchronous SGD' says of it",
    source="Chen, Pan, Monga, Bengio & Jozefowicz 2016, Revisiting Distributed Synchronous SGD",
    unit="",
    settings=(
        f"K1: {_MACHINES} asynchronous workers read all parameters when a step begins, the "
        f"forward pass takes a third of it, and each of {_LAYERS} equal layers is updated when its "
        "gradient is there; steps vary by 10 %; nothing is fitted. K2: digits-mlp, "
        f"{_DELAY_EPOCHS:g} epochs in batches of {_DELAY_BATCH}, momentum 0.9, gradients exactly "
        "so many steps late, a warm-up of 3 epochs, the best of the rates "
        f"{', '.join(map(str, _DELAY_RATES))} (there: a convolutional network on MNIST). K5 to "
        f"K7: digits-mlp, {_BATCH} images a worker and step, {_EPOCHS:g} epochs, no momentum, step "
        "times with the tail of the table backup-workers, a network that costs nothing; "
        "synchronous: 1, 1 and 2 backups of 8, 16 and 32 workers, without the moving average; "
        f"asynchronous: downpour; each at the best of the rates {', '.join(map(str, _RATES))} "
        "(there: Inception on ImageNet, 53 to 212 workers, and PixelCNN). K6: the best rate of 8 "
        "workers, in proportion to the workers (there: 25, 50 and 100 machines). Rates by loss on "
        "a seed that does not count; mean of three seeds with 95 % intervals. K3 and K4 are the "
        "table backup-workers."
    ),
    cells=2 + 2 * len(_DELAYS) + 9 * len(_WORKERS),
    trials=_all,
    verdict=verdict,
)
