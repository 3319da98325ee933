"""Tables of Jain et al. 2018 on delayed gradients: LeNet-5 on MNIST over rate, batch and delay.

Each table is one grid of the laboratory. The study's network, initialisation and preprocessing are
not known in detail, so under-trained cells and the exact place of the cliff may differ; what a
table must show is which cells train, how well, and how the cliff moves with the delay.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from gossamer.quantities import counted
from gossamer.studies.lab.grid import Grid, Place, named_optimisers
from gossamer.studies.lab.heat_map import (
    Panel,
    caption_of,
    heat_maps,
    panel_of,
    results_picture,
    show_rate,
)
from gossamer.studies.lab.pictures import Caption
from gossamer.studies.lab.results import GridResults
from gossamer.studies.reproductions.table import Experiment, PublishedCell, PublishedTable

SOURCE = (
    "Jain, Srinivasan & Barekatain 2018, An Analysis of the Delayed Gradients Problem in "
    "Asynchronous SGD"
)
TASK = "mnist-lenet"
READ = "read in the paper"
FAILED = "read in the paper: fails, that is, stays at chance level (about 9 to 18 %)"
UNREAD = "no figure at hand"
CHANCE = 0.18
"""An accuracy up to this one counts as failed, published or ours."""

# A line for each delay, a field for each rate, a number for each batch, as in the paper's figures.
_SGD = {
    0: ".950 .877 .848 .290 .096 | .979 .968 .944 .667 .297 | .988 .983 .976 .962 .913 | "
       ".990 .988 .988 .983 .974 | .991 .992 .989 .989 .986 | .990 .989 .991 .989 .988 | "
       ".103 .981 .103 .988 .988",
    1: ".947 .888 .388 .369 .103 | .983 .970 .937 .794 .508 | .986 .985 .977 .959 .918 | "
       ".991 .987 .988 .983 .973 | .987 .987 .987 .987 .981 | .986 .986 .985 .113 .113 | fail",
    2: ".948 .903 .393 .316 .204 | .980 .971 .928 .835 .178 | .989 .984 .977 .959 .874 | "
       ".988 .990 .985 .981 .972 | .989 .988 .987 .984 .981 | .113 .973 .113 .113 .113 | fail",
    4: ".948 .884 .113 .217 .101 | .980 .972 .938 .824 .113 | .987 .983 .978 .958 .898 | "
       ".987 .990 .988 .976 .963 | .981 .113 .975 .982 .113 | fail | fail",
    6: ".947 .888 .332 .113 .104 | .983 .969 .931 .314 .309 | .989 .983 .971 .956 .866 | "
       ".990 .988 .986 .974 .922 | .113 .113 .948 .113 .113 | fail | fail",
    8: ".949 .825 .641 .116 .101 | .980 .968 .928 .799 .113 | .989 .983 .977 .942 .543 | "
       ".988 .985 .113 .904 .626 | fail | fail | fail",
}  # fmt: skip
_ADAM = {
    0: ".987 .984 .979 .972 .953 .930 .888 | .991 .988 .989 .988 .980 .971 .962 | "
       ".986 .989 .991 .989 .987 .985 .978 | .988 .990 .989 .985 .988 .989 .987",
    8: ".989 .985 .974 .947 .915 .826 .755 | .990 .991 .934 .977 .968 .895 .757 | "
       ".991 .985 .988 .983 .963 .914 .449 | fail fail fail fail .896 fail fail",
    16: ".987 .986 .973 .948 .834 .842 .581 | .988 .988 .976 .967 .798 .513 .594 | "
        ".918 .983 .113 .113 .772 .113 .255 | fail",
}  # fmt: skip
# The paper's figure is readable for seven of ten rates; the paper says that the largest fails.
_SGD_RATES = tuple(10.0 ** (half / 2) for half in range(-10, 0))
_SGD_READ_RATES = _SGD_RATES[2:]
_SGD_BATCHES = (64, 128, 256, 512, 1024)
_ADAM_RATES = tuple(10.0 ** (half / 2) for half in range(-8, -4))
_ADAM_BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
_FAR = {32: 0.9821, 128: 0.9819, 256: 0.9794}
_FAR_RATES = tuple(10.0 ** (half / 2) for half in range(-10, -6))
# The batch is small, as the study advises: an epoch then has more steps, in which delay counts.
_FAR_BATCH = 16
_QUICK_EPOCHS = 2.0

Published = Mapping[Place, float | None]
"""None where the paper says that the training fails."""


def _published(
    optimiser: str, table: Mapping[int, str], rates: Sequence[float], batches: Sequence[int]
) -> Published:
    found: dict[Place, float | None] = {}
    (name,) = named_optimisers((optimiser,))
    for delay, line in table.items():
        for rate, field in zip(rates, line.split("|"), strict=True):
            words = field.split()
            # The word stands for a whole field.
            words = words * len(batches) if words == ["fail"] else words
            for batch, word in zip(batches, words, strict=True):
                found[name, delay, batch, rate] = None if word == "fail" else float(word)
    return found


SGD_CELLS = _published(
    "sgd", {delay: f"{line} | fail" for delay, line in _SGD.items()}, _SGD_READ_RATES, _SGD_BATCHES
)
ADAM_CELLS = _published("adam", _ADAM, _ADAM_RATES, _ADAM_BATCHES)


def _fails(accuracy: float | None) -> bool:
    return accuracy is None or not accuracy > CHANCE


def _cells(results: GridResults, published: Published) -> list[PublishedCell]:
    """The cells that were trained to the end, in the order of the paper."""
    grid = results.grid
    found: list[PublishedCell] = []
    for order in product(grid.optimisers, grid.delays, grid.learning_rates, grid.batches):
        optimiser, delay, rate, batch = order
        place = (optimiser, delay, batch, rate)
        cell = results.cells.get(place)
        if cell is not None and cell.is_final:
            row = f"delay {delay}, rate {show_rate(rate)}"
            value = published.get(place)
            evidence = UNREAD if place not in published else FAILED if value is None else READ
            found.append(PublishedCell(row, f"batch {batch}", value, cell.value, evidence))
    return found


def _show(cell: PublishedCell) -> str:
    ours = "-" if math.isnan(cell.ours) else f"{100 * cell.ours:.1f}"
    if cell.published is None:
        return f"{ours} | fail" if cell.evidence == FAILED else ours
    return f"{ours} | {100 * cell.published:.1f}"


def verdict(cells: list[PublishedCell]) -> str:
    """Say which cells train in both, and how far the accuracies of those differ."""
    known = [cell for cell in cells if cell.published is not None or cell.evidence == FAILED]
    theirs_fail = [cell for cell in known if _fails(cell.published)]
    both_fail = sum(_fails(cell.ours) for cell in theirs_fail)
    trained = [cell for cell in known if not _fails(cell.published)]
    both = [cell for cell in trained if not _fails(cell.ours)]
    lines: list[str] = []
    if theirs_fail:
        lines.append(
            f"failing: {both_fail} of the {len(theirs_fail)} cells that fail in the paper fail "
            f"here; training: {len(both)} of the {len(trained)} that train there train here"
        )
    if both:
        apart = [100 * abs(cell.ours - (cell.published or 0.0)) for cell in both]
        well = [a for a, cell in zip(apart, both, strict=True) if (cell.published or 0.0) >= 0.95]
        lines.append(
            f"accuracy where both train: median difference {statistics.median(apart):.2f} points"
            + (
                f"; of the {len(well)} cells published at 95 % or more, {_within(well, 1.0)} lie "
                f"within 1 point and {_within(well, 3.0)} within 3"
                if well
                else ""
            )
        )
    return "\n".join(lines) or "no published cell has been trained to the end yet"


def _within(differences: Sequence[float], points: float) -> int:
    return sum(difference <= points for difference in differences)


def _picture(path: Path, results: GridResults, published: Published, title: str) -> None:
    grid = results.grid
    (optimiser,) = grid.optimisers
    theirs = [
        Panel(
            f"delay {delay}",
            {
                (rate, batch): math.nan if value is None else value
                for (_, own, batch, rate), value in published.items()
                if own == delay and rate in grid.learning_rates and batch in grid.batches
            },
        )
        for delay in grid.delays
    ]
    ours = [panel_of(results, optimiser, delay) for delay in grid.delays]
    subtitle = (
        f"accuracy in % on the test set; ours after {counted(grid.epochs, 'epoch')}, one seed"
    )
    words = Caption(title, subtitle, caption_of(results))
    heat_maps(path, {"published": theirs, "ours": ours}, results, words)


def _grid_maker(
    optimiser: str, epochs: float, full: _Axes, quick: _Axes
) -> Callable[[int, bool], Grid]:
    """Make the grid of a table from a seed: the whole grid, or a quick part of it."""

    def make(seed: int, is_quick: bool) -> Grid:
        length = _QUICK_EPOCHS if is_quick else epochs
        axes = quick if is_quick else full
        return Grid(named_optimisers((optimiser,)), *axes, epochs=length, seeds=(seed,))

    return make


_Axes = tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...]]
"""Learning rates, batches and delays."""


def _far_cells(results: GridResults) -> list[PublishedCell]:
    """The cells of every rate; the published figure, tuned by hand, stands beside the best."""
    found: list[PublishedCell] = []
    (optimiser,) = results.grid.optimisers
    for delay in results.grid.delays:
        done = [cell for cell in results.cells_of(optimiser, delay) if cell.is_final]
        done.sort(key=lambda cell: cell.place[3])
        row = f"delay {delay}"
        found += [
            PublishedCell(row, f"rate {show_rate(cell.place[3])}", None, cell.value, UNREAD)
            for cell in done
        ]
        best = max((cell.value for cell in done if not math.isnan(cell.value)), default=math.nan)
        if done:
            found.append(PublishedCell(row, "best of these", _FAR[delay], best, READ))
    return found


def _far_picture(path: Path, results: GridResults) -> None:
    words = Caption(
        "LeNet-5 on MNIST, Adam with very late gradients",
        f"accuracy in % on the test set after {counted(results.grid.epochs, 'epoch')}, one seed",
        caption_of(results),
    )
    results_picture(path, results, words)


_COMMON = (
    "LeNet-5 with ReLU and max pooling, PyTorch's initialisation, standardised pixels, one seed; "
    "step t applies the gradient of step t - delay, the first steps apply nothing; accuracy on "
    "the test set after the last epoch. "
)


def _table(
    name: str,
    title: str,
    settings: str,
    cells: int,
    grid: Callable[[int, bool], Grid],
    found: Callable[[GridResults], list[PublishedCell]],
    picture: Callable[[Path, GridResults], None],
) -> PublishedTable:
    return PublishedTable(
        name=f"delayed-gradients-{name}",
        title=title,
        source=SOURCE,
        unit="",
        settings=_COMMON + settings,
        cells=cells,
        experiment=Experiment(TASK, grid, found, _show, verdict, picture),
    )


SGD = _table(
    "sgd",
    "Delayed gradients, SGD with momentum 0.9: accuracy in % on MNIST",
    "30 epochs, momentum 0.9. For the rates 1e-5 and 3.16e-5 no figures are at hand: the paper "
    "calls them mostly under-trained.",
    len(_SGD_RATES) * len(_SGD_BATCHES) * len(_SGD),
    _grid_maker(
        "sgd",
        30.0,
        full=(_SGD_RATES, _SGD_BATCHES, tuple(_SGD)),
        quick=((10.0**-3, 10.0**-2, 10.0**-1.5), (64, 256), (0, 2, 8)),
    ),
    partial(_cells, published=SGD_CELLS),
    partial(
        _picture,
        published=SGD_CELLS,
        title="LeNet-5 on MNIST, SGD with momentum 0.9 and late gradients",
    ),
)

ADAM = _table(
    "adam",
    "Delayed gradients, Adam: accuracy in % on MNIST",
    "20 epochs; Adam with PyTorch's other defaults. Rates above 3.16e-3 and below 1e-4 are left "
    "out.",
    len(ADAM_CELLS),
    _grid_maker(
        "adam",
        20.0,
        full=(_ADAM_RATES, _ADAM_BATCHES, tuple(_ADAM)),
        quick=(_ADAM_RATES[1:], (64, 256), (0, 8, 16)),
    ),
    partial(_cells, published=ADAM_CELLS),
    partial(_picture, published=ADAM_CELLS, title="LeNet-5 on MNIST, Adam with late gradients"),
)

ADAM_FAR = _table(
    "adam-far",
    "Adam with gradients 32, 128 and 256 steps late: accuracy in % on MNIST",
    "20 epochs. The paper tuned by hand and gives neither rate nor batch; ours are batch "
    f"{_FAR_BATCH} and the rates {', '.join(map(show_rate, _FAR_RATES))}, the best of which "
    "stands beside the published figure.",
    len(_FAR) * (len(_FAR_RATES) + 1),
    _grid_maker(
        "adam",
        20.0,
        full=(_FAR_RATES, (_FAR_BATCH,), tuple(_FAR)),
        quick=(_FAR_RATES[1:3], (_FAR_BATCH,), (32, 256)),
    ),
    _far_cells,
    _far_picture,
)
