"""The schedules of pipelines: their bubbles and their activations, played beside closed forms."""

from __future__ import annotations

from gossamer.pipeline.bubbles import FORMS, ChunkPasses, step_seconds
from gossamer.pipeline.schedule import chunks_per_machine, make_schedule_of, places_of
from gossamer.sim.pipelines.makespan import makespan
from gossamer.studies.reproductions.table import Progress, PublishedCell, PublishedTable

_READ = "closed form, as published for the schedule"
_OURS = "our closed form, by Little's law where links are slow"
_COUNTED = "counted in PyTorch's own table of the schedule"


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
        units = work + form.idle(machines)
        held = form.held_at(machines, many, chunks, 0)
        evidence = _COUNTED if form.is_counted else _READ
        for column, published, ours in (
            ("makespan", units, found.units),
            ("work", work, max(found.busy)),
            ("activations", held, found.most_held[0]),
        ):
            cells.append(PublishedCell(row, column, published, ours, evidence))
            progress(f"{row}: {column} {ours}")
        cells.append(_with_links(name, machines, many, row))
        progress(f"{row}: links")
    return cells


def _with_links(name: str, machines: int, many: int, row: str) -> PublishedCell:
    """The play beside our own closed form where links take a fifth of a forward pass."""
    chunks, unit, link = chunks_per_machine(name), 10, 2
    ahead = [unit] * (machines * chunks)
    back = [2 * unit] * len(ahead)
    closed = step_seconds(
        name, many, ChunkPasses(ahead, back, places_of(name, machines, chunks), link)
    )
    played = makespan(make_schedule_of(name, machines, many), ahead, link, back).units
    return PublishedCell(row, "with links", closed / unit, played / unit, _OURS)


TABLE = PublishedTable(
    name="pipelines",
    title="Seven schedules of pipelines: makespan, work, activations of the first, links",
    source="Huang et al. 2019; Narayanan et al. 2019, 2021; Lamy-Poirier 2023; Qi et al. 2024; "
    "DeepSeek-AI 2024",
    unit="",
    settings=(
        "A forward pass of a chunk takes one unit, and so does each half of its backward pass; "
        "links take no time; until the last machine has ended. Activations are counted in chunks "
        "of a micro-batch. The overlapped pairs of DualPipeV are played one pass after the other. "
        '"Zero bubble" is p - 1 units, because a step ends when all parameters have changed. '
        "The last column has links of a fifth of a forward pass, beside the closed form that "
        "`gossamer cost --parallel` takes; it is no published number."
    ),
    cells=4 * len(SIZES),
    compute=_pipelines,
)
