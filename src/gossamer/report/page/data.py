"""The data of a page: the JSON object embedded in it, which the page's own script draws.

All numbers are finite or None. A part that a run does not have is None or empty, and the page
leaves it out or says why it is missing.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Curve(TypedDict):
    """A mean line and its range over seeds; one seed has no range."""

    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


SCORES = ("metric", "accuracy", "loss", "training_loss", "consensus_distance", "noise_scale")
Curves = dict[str, Curve | None]
"""A curve for each of `SCORES`, against time or against epochs; `metric` is the task's own."""


class ArrivalData(TypedDict):
    """The time to the target, with its 95 % interval if every seed arrives."""

    mean: float | None
    low: float | None
    high: float | None
    reached: int
    seeds: int
    runs: list[float | None]
    """The time of each seed; None if the seed does not arrive."""
    times: float | None
    """How many times as long as the first method it takes."""
    is_close: bool
    """Whether the tests cannot tell it from the first method."""


class Shares(TypedDict):
    """How the workers spent their time, as fractions: the mean over workers and seeds."""

    computing: float
    waiting: float
    other: float


class WorkerTime(TypedDict):
    """How one worker spent its seconds."""

    computing: float
    waiting: dict[str, float]
    """Seconds by cause."""
    other: float
    total: float


# `from` is a keyword of Python, so this type cannot be written as a class.
StripData = TypedDict(
    "StripData",
    {"from": float, "to": float, "segments": list[list[Any]], "workers": int, "servers": int},
)
"""The first moments of a run; a segment is [worker, start, end, kind, detail]."""


class LineageData(TypedDict):
    """Who descends from whom in a population, in the first seed's run."""

    lives: list[list[Any]]
    """[worker, from, to, worker of the first ancestor, words]"""
    copies: list[list[Any]]
    """[when, worker that was copied, worker that copied it, worker of the first ancestor]"""
    workers: int


class Card(TypedDict):
    """Bytes that one network card carries per gradient step of the whole run."""

    name: str
    sent: float | None
    received: float | None


class TopologyData(TypedDict):
    """The communication graph; an edge is a pair of indices into the nodes."""

    name: str
    note: str
    nodes: list[str]
    edges: list[list[int]]


FIGURES = (
    "metric", "accuracy", "loss", "seconds", "waiting_fraction", "mean_staleness", "max_staleness",
    "mean_global_staleness", "bytes_per_step", "consensus_distance", "exchanges_per_step",
    "noise_scale", "compression_ratio", "coding_seconds_per_step", "residual_norm",
    "displacement_cosine", "bubble_fraction", "steps", "wall_seconds",
)  # fmt: skip
Figures = dict[str, float | None]
"""A value at the end for each of `FIGURES`: the mean over the seeds."""


class MethodData(TypedDict):
    """One method at the learning rate chosen for it."""

    label: str
    learning_rate: float | None
    seeds: int
    output: str
    """Which model was evaluated."""
    status: str
    """finished, diverged, interrupted, failed, unfinished, running, ..."""
    curves: dict[str, Curves]
    """The keys are `time` and `epochs`."""
    arrival: ArrivalData | None
    look: int
    """The index into the lists of colours, dashes and markers."""
    shares: Shares | None
    goodput: dict[str, float] | None
    """Where the time of all workers went, by kind, as shares that add up to 1; simulated runs only.
    """
    workers: list[WorkerTime]
    """The workers of the first seed."""
    strip: StripData | None
    lineage: LineageData | None
    staleness: dict[str, int]
    cards: list[Card]
    topology: TopologyData | None
    figures: Figures


class ExpenseData(TypedDict):
    """What a method spends on a cluster with prices: means over the seeds, None where unknown."""

    method: str
    seconds: float | None
    """The time to the target."""
    to_target: dict[str, float | None]
    """Dollars and joules until then; only what the cluster has prices for."""
    in_all: dict[str, float | None]
    """The same for the whole run; None in a search, whose runs end at the target."""
    on_front: bool
    """Whether no other method beats it in both time and money."""


class GridRow(TypedDict):
    """The results of one method over the grid of learning rates."""

    method: str
    seconds: list[float | None]
    """When the target was reached; None if it was not, or if the rate was not tried."""
    values: list[float | None]
    """The score at the end."""
    chosen: int


class GridData(TypedDict):
    """The learning rates tried for each method, on a seed that is not ranked."""

    rates: list[float]
    rows: list[GridRow]


class Machine(TypedDict):
    """One machine in the drawing of the cluster."""

    name: str
    workers: list[int]
    place: str
    """Its site and its rack, as far as the cluster has any."""
    slow: float
    """How many times slower than usual it computes."""
    slow_link: float
    dies: bool
    notes: list[str]


class ClusterData(TypedDict):
    """The drawing of the cluster; a text that is unknown, as for real workers, is empty."""

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
    """One setting of the runs."""

    name: str
    value: str


class PictureData(TypedDict):
    """A picture inside the page."""

    title: str
    alt: str
    png: str
    """The file in base64."""


class TableData(TypedDict):
    """A further table."""

    title: str
    columns: list[str]
    rows: list[list[str | float | None]]


class HeatPanel(TypedDict):
    """The part of a heat map for one delay."""

    delay: float
    edge: float | None
    """The rate at which theory expects training to break."""
    cells: list[list[Any]]
    """[rate, batch, score, has failed, has finished]; rate and batch are indices into the lists."""


class HeatMap(TypedDict):
    """The scores of one optimiser over learning rate, batch size and delay."""

    optimiser: str
    key: str
    """The score: accuracy or loss."""
    rates: list[float]
    batches: list[float]
    panels: list[HeatPanel]


class AdviceData(TypedDict):
    """The recommendation of `gossamer advise`, and what would change it."""

    reasons: list[str]
    next_step: str
    command: str
    """The command that trains with the first method; empty if nothing is recommended."""
    changes: list[str]
    scenes: TableData | None
    """Time to the target on changed clusters."""


class PageData(TypedDict):
    """The whole page."""

    title: str
    subtitle: str
    kind: str
    """compare, simulate, train, lab, advise or report."""
    verdict: str
    """One sentence."""
    command: str
    """The command lines that made the runs."""
    version: str
    is_growing: bool
    """Whether the run is still under way, so that the page polls for new data."""
    score: str
    """The score by which methods are judged: accuracy, loss or the name of the task's metric."""
    lower_is_better: bool
    """Whether smaller values of that score are better."""
    target: float | None
    rule: str
    """The rule by which a target counts as reached."""
    can_tell: bool
    """Whether there are enough seeds to name a winner."""
    time: str
    """virtual seconds or seconds."""
    test_samples: int | None
    """How many test samples an accuracy is measured on."""
    advice: AdviceData | None
    methods: list[MethodData]
    expenses: list[ExpenseData]
    """What the methods spend, the fastest first; empty where the cluster has no prices."""
    economy: str
    """Who is the cheapest, in one sentence; empty without prices or a target."""
    grid: GridData | None
    cluster: ClusterData | None
    settings: list[Setting]
    heat_maps: list[HeatMap]
    pictures: list[PictureData]
    tables: list[TableData]
    notices: list[str]
    missing: list[str]
