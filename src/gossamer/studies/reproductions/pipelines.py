"""The schedules of pipelines: their bubbles and their activations, played beside closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.pipeline.schedule import chunks_per_machine, make_schedule_of
from gossamer.sim.pipelines.makespan import makespan
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

_READ = "closed form, as published for the schedule"
_COUNTED = "counted in PyTorch's own table of the schedule"


@dataclass(frozen=True)
class BubbleForm:
    """For p machines, m micro-batches and v chunks a machine: the units of the bubble, and the most
    activations of the first machine."""

    idle: Callable[[int, int, int], int]
    held: Callable[[int, int, int], int]
    evidence: str


FORMS: dict[str, BubbleForm] = {
    "gpipe": BubbleForm(lambda p, m, v: 3 * (p - 1), lambda p, m, v: m, _READ),
    "1f1b": BubbleForm(lambda p, m, v: 3 * (p - 1), lambda p, m, v: p, _READ),
    "interleaved": BubbleForm(
        lambda p, m, v: 3 * (p - 1), lambda p, m, v: 2 * (p - 1) + (v - 1) * p + 1, _READ
    ),
    "looped_bfs": BubbleForm(lambda p, m, v: 3 * (p - 1), lambda p, m, v: v * m, _READ),
    "zero_bubble": BubbleForm(lambda p, m, v: p - 1, lambda p, m, v: 2 * p, _COUNTED),
    "zbv": BubbleForm(lambda p, m, v: p - 1, lambda p, m, v: 2 * p, _COUNTED),
    "dualpipev": BubbleForm(lambda p, m, v: 2 * (p - 1), lambda p, m, v: 2 * p + 1, _COUNTED),
}
SIZES = (
    ("gpipe", 4, 8), ("gpipe", 8, 16), ("1f1b", 4, 8), ("1f1b", 8, 16), ("interleaved", 4, 8),
    ("interleaved", 8, 16), ("looped_bfs", 4, 8), ("zero_bubble", 4, 8), ("zbv", 4, 16),
    ("zbv", 8, 16), ("dualpipev", 4, 8),
)  # fmt: skip


def _pipelines(seed: int, progress: Progress) -> list[PublishedCell]:
    cells: list[PublishedCell] = []
    for name, machines, many in SIZES:
        chunks = chunks_per_machine(name)
        form, found = FORMS[name], makespan(make_schedule_of(name, machines, many))
        work = 3 * many * chunks
        row = f"{name}, {machines} machines, {many} micro-batches"
        units = work + form.idle(machines, many, chunks)
        held = form.held(machines, many, chunks)
        for column, published, ours in (
            ("makespan", units, found.units),
            ("work", work, max(found.busy)),
            ("activations", held, found.most_held[0]),
        ):
            cells.append(PublishedCell(row, column, published, ours, form.evidence))
            progress(f"{row}: {column} {ours}")
    return cells


TABLE = PublishedTable(
    name="pipelines",
    title="Seven schedules of pipelines: makespan, work of a machine, activations of the first",
    source="Huang et al. 2019; Narayanan et al. 2019, 2021; Lamy-Poirier 2023; Qi et al. 2024; "
    "DeepSeek-AI 2024",
    unit="",
    settings=(
        "A forward pass of a chunk takes one unit, and so does each half of its backward pass; "
        "links take no time; until the last machine has ended. Activations are counted in chunks "
        "of a micro-batch. The overlapped pairs of DualPipeV are played one pass after the other. "
        '"Zero bubble" is p - 1 units, because a step ends when all parameters have changed.'
    ),
    cells=3 * len(SIZES),
    compute=_pipelines,
)
