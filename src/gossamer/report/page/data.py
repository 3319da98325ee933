"""What a page shows, as the object of JSON that is embedded in it: the one contract between those
who gather a run's figures and those who draw them.

All numbers are finite or None. A part that a run does not have is None or empty, and the page
leaves it out or says why it is not there.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Curve(TypedDict):
    """A line and its band over seeds; one seed has no band."""

    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


class Curves(TypedDict):
    """What was measured on the way, against one of the two axes."""

    metric: Curve | None
    """A metric of the task's own, by which it is judged."""
    accuracy: Curve | None
    loss: Curve | None
    training_loss: Curve | None
    consensus_distance: Curve | None


class CurveViews(TypedDict):
    """The two views in which methods differ."""

    time: Curves
    epochs: Curves


class ArrivalData(TypedDict):
    """The time to the target: mean and 95 % interval if every seed arrives."""

    mean: float | None
    low: float | None
    high: float | None
    reached: int
    seeds: int
    runs: list[float | None]
    """Of each seed; None where it does not arrive."""
    times: float | None
    """So many times as long as the first takes."""
    is_close: bool
    """Whether it cannot be told from the first."""


class Shares(TypedDict):
    """Where the time went: parts of it, mean over workers and seeds."""

    computing: float
    waiting: float
    other: float


class WorkerTime(TypedDict):
    """Where one worker's seconds went."""

    computing: float
    waiting: dict[str, float]
    """By cause."""
    other: float
    total: float


# `from` is a word of the language, so this one cannot be written as a class.
StripData = TypedDict(
    "StripData",
    {"from": float, "to": float, "segments": list[list[Any]], "servers": int},
)
"""Part of a run as stripes: [worker, start, end, kind, detail] each."""


class Card(TypedDict):
    """Bytes that one network card carries per gradient step of the whole run."""

    name: str
    sent: float | None
    received: float | None


class TopologyData(TypedDict):
    """Who exchanges with whom; edges are pairs of indices of nodes."""

    name: str
    note: str
    nodes: list[str]
    edges: list[list[int]]


class Figures(TypedDict):
    """The figures of a method at the end, means over its seeds."""

    metric: float | None
    accuracy: float | None
    loss: float | None
    seconds: float | None
    waiting_fraction: float | None
    mean_staleness: float | None
    max_staleness: float | None
    mean_global_staleness: float | None
    bytes_per_step: float | None
    consensus_distance: float | None
    exchanges_per_step: float | None
    steps: float | None
    wall_seconds: float | None


class MethodData(TypedDict):
    """One method at the learning rate at which it is shown."""

    label: str
    learning_rate: float | None
    seeds: int
    output: str
    """Which model the scores speak of."""
    status: str
    """finished, diverged, interrupted, failed, unfinished, running, ..."""
    curves: CurveViews
    arrival: ArrivalData | None
    look: int
    """Its place in the lists of colours, dashes and marks."""
    shares: Shares | None
    workers: list[WorkerTime]
    """Of the first seed."""
    strip: StripData | None
    staleness: dict[str, int]
    cards: list[Card]
    topology: TopologyData | None
    figures: Figures


class GridRow(TypedDict):
    """A method over the grid of learning rates."""

    method: str
    seconds: list[float | None]
    """When the target was reached; None where it was not, or the rate was not tried."""
    values: list[float | None]
    """The score at the end."""
    chosen: int


class GridData(TypedDict):
    """The learning rates that each method was tried at, on a seed of its own."""

    rates: list[float]
    rows: list[GridRow]


class Machine(TypedDict):
    """A machine as it is drawn."""

    name: str
    workers: list[int]
    rack: int
    slow: float
    """How many times slower it computes; 1 if it does not."""
    slow_link: float
    dies: bool
    notes: list[str]


class ClusterData(TypedDict):
    """The cluster as it is drawn; what is not known of a real one is an empty text."""

    name: str
    title: str
    workers: int
    machines: list[Machine]
    servers: int
    bandwidth: str
    latency: str
    step: str
    notes: list[str]


class Setting(TypedDict):
    """One thing that decided the run."""

    name: str
    value: str


class PictureData(TypedDict):
    """A picture inside the page."""

    title: str
    alt: str
    png: str
    """In base64."""


class TableData(TypedDict):
    """A further table."""

    title: str
    columns: list[str]
    rows: list[list[str | float | None]]


class HeatPanel(TypedDict):
    """One delay of a heat map."""

    delay: float
    edge: float | None
    """The rate at which theory expects training to break."""
    cells: list[list[Any]]
    """[rate, batch, score, has failed, has finished] each, the first two by place in the lists."""


class HeatMap(TypedDict):
    """Scores over learning rate, batch size and delay, of one optimiser."""

    optimiser: str
    key: str
    """What is scored: accuracy or loss."""
    rates: list[float]
    batches: list[float]
    panels: list[HeatPanel]


class AdviceData(TypedDict):
    """What a search recommends, and what would change it."""

    reasons: list[str]
    next_step: str
    command: str
    """Trains with the first of the ranking; empty where nothing can be recommended."""
    changes: list[str]
    scenes: TableData | None
    """Time to the target on changed clusters."""


class PageData(TypedDict):
    """All of it."""

    title: str
    subtitle: str
    kind: str
    """compare, simulate, train, lab, advise or report."""
    verdict: str
    """One sentence."""
    command: str
    """What to type to get the same again."""
    version: str
    is_growing: bool
    """Whether the run still goes on, so that the page asks for more."""
    score: str
    """What methods are judged by: accuracy, loss or the name of the task's own metric."""
    lower_is_better: bool
    """Of that score."""
    target: float | None
    rule: str
    """When a target counts as reached."""
    can_tell: bool
    """Whether there are seeds enough to tell methods apart."""
    time: str
    """virtual seconds or seconds."""
    test_samples: int | None
    """So many test samples an accuracy is a share of."""
    advice: AdviceData | None
    methods: list[MethodData]
    grid: GridData | None
    cluster: ClusterData | None
    settings: list[Setting]
    heat_maps: list[HeatMap]
    pictures: list[PictureData]
    tables: list[TableData]
    notices: list[str]
    missing: list[str]
