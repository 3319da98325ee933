"""The options that several commands share, alone and in groups, and how they become settings.

A command takes a group as one parameter, whose default holds the defaults of the options:
`where: ClusterOptions = ClusterOptions(cluster="equal-8")`. `with_groups` shows typer the fields of
the group as options of the command, in the place of that parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from gossamer.commands.console import results_elsewhere
from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.faults import parse_faults
from gossamer.errors import ConfigurationError
from gossamer.quantities import bytes_per_second, seconds, size_in_bytes
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.runs.ranking import LOOKS
from gossamer.tasks import Task

Answer = TypeVar("Answer")
Texts = list[str] | None


def option(default: Any, *names: str, **more: Any) -> Any:
    """A field of a group that is an option of typer's."""
    return dataclasses.field(default=default, metadata={"option": typer.Option(*names, **more)})


@dataclass(frozen=True)
class Without:
    """Written beside a group, in `Annotated`: the options that this command does not have."""

    names: tuple[str, ...]


def with_groups(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Give a command the options of its groups; it still gets each group as one value."""
    hints = get_type_hints(command, include_extras=True)
    seen: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint, default = hints[parameter.name], parameter.default
        if not dataclasses.is_dataclass(default):
            seen.append(parameter.replace(annotation=hint))
            continue
        left_out = {name for mark in getattr(hint, "__metadata__", ()) for name in mark.names}
        kinds = get_type_hints(type(default), include_extras=True)
        own = [field for field in dataclasses.fields(default) if field.name not in left_out]
        for field in own:
            kind, mark = kinds[field.name], field.metadata.get("option")
            shown = kind if mark is None else Annotated[kind, mark]
            value = getattr(default, field.name)
            seen.append(parameter.replace(name=field.name, default=value, annotation=shown))
        groups[parameter.name] = (default, [field.name for field in own])

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> Answer:
        for group, (default, names) in groups.items():
            own = {name: options.pop(name) for name in names}
            options[group] = dataclasses.replace(default, **own)
        return command(*arguments, **options)

    cast(Any, wrapped).__signature__ = inspect.Signature(seen)
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    return wrapped


# ---------------------------------------------------------------------- single options

MethodOption = Annotated[
    str, typer.Option("--method", help="NAME or NAME:KEY=VALUE,...; `gossamer methods`.")
]
MethodOrOwnOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="NAME or NAME:KEY=VALUE,...; `gossamer methods`. Default: ad_psgd, or the script's.",
    ),
]
ScriptArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SCRIPT]", help="A Python script that calls gossamer.join."),
]
ArgumentsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGUMENTS]", help="All behind -- belongs to the script."),
]
ComputeOption = Annotated[
    str,
    typer.Option(
        "--compute",
        metavar="TIME",
        help="Of a script's step: cluster (what the cluster says), measured, or a time: 12ms.",
    ),
]
RateOption = Annotated[
    float | None, typer.Option("--lr", help="Learning rate; default: the task's.")
]
MethodsOption = Annotated[
    str, typer.Option("--methods", help="Methods separated by spaces: NAME or NAME:KEY=VALUE,...")
]
TaskOption = Annotated[
    str, typer.Option("--task", help="What to train; `gossamer tasks` lists them.")
]
ClusterOption = Annotated[
    str, typer.Option("--cluster", help="A preset (`gossamer clusters`) or a TOML file.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Any whole number; everything random follows from it.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", help="Repeat with this many seeds; report mean and 95 % interval.")
]
EpochsOption = Annotated[
    float | None, typer.Option("--epochs", help="Passes over the data, of all workers together.")
]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Samples per worker and step.")]
GridOption = Annotated[
    str | None, typer.Option("--lr", help="The grid for every method, such as 0.01,0.03,0.1.")
]
TargetOption = Annotated[
    float | None,
    typer.Option(
        "--target",
        help="Accuracy (0.95, or 95 for 95 %) or loss to reach and hold; default: near the best.",
    ),
]
TrainingDeviceOption = Annotated[
    str | None, typer.Option("--device", help="To train on: cpu (the default) or cuda.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", help="Threads of torch on the CPU.")]
ModelBytesOption = Annotated[
    int | None,
    typer.Option(
        "--model-bytes",
        metavar="SIZE",
        parser=lambda text: size_in_bytes(text, "--model-bytes"),
        help="Charge the network for a model of this size: 100e6, 10MB, 1.5GB.",
    ),
]
DataOption = Annotated[Path | None, typer.Option("--data", help="Where the files of the task are.")]
RunsOption = Annotated[
    Path, typer.Option("--runs", help="Where run folders go; `none` keeps nothing.")
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=results_elsewhere,
        help="Print one JSON object, and nothing else, on standard output; tables go to standard "
        "error.",
    ),
]
SlowLinkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slow-link",
        metavar="WORKER=FACTOR[@START+LENGTH]",
        help="Slow the network card of this worker down by FACTOR: 0=10.",
    ),
]
KillOption = Annotated[
    list[str] | None,
    typer.Option("--kill", metavar="WORKER@TIME", help="Let this worker die at TIME: 3@2.5s."),
]
PauseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pause",
        metavar="WORKER@START+LENGTH",
        help="Let this worker stand still for LENGTH: 2@1s+0.5s.",
    ),
]
DelayOption = Annotated[
    list[str] | None,
    typer.Option(
        "--delay",
        metavar="TIME[@START+LENGTH]",
        help="Delay added to every message: 20ms@1s+2s.",
    ),
]
AlwaysSlowOption = Annotated[
    list[str] | None,
    typer.Option("--slow", metavar="WORKER=FACTOR", help="Slow this worker down by FACTOR: 0=4."),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--workers",
        help="A process each on this host: 2, or as many as torchrun or mpirun has started.",
    ),
]
AnyTransportOption = Annotated[
    str | None,
    typer.Option(
        "--transport", help="shm, torch or, under mpirun and srun, mpi; by default what suits."
    ),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="TIME",
        parser=lambda text: seconds(text, "--deadline"),
        help="After this time print who waits for what, and exit with code 3: 90s, 5m.",
    ),
]


# ---------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster is simulated, and what goes wrong on it."""

    cluster: ClusterOption = "equal-8"
    workers: int | None = option(
        None, "--workers", help="How many workers, instead of the cluster's number."
    )
    slow: Texts = option(
        None,
        "--slow",
        metavar="WORKER=FACTOR[@START+LENGTH]",
        help="Slow this worker down by FACTOR: 0=10, or from START on: 0=10@2s; may be repeated.",
    )
    slow_link: SlowLinkOption = None
    kill: KillOption = None
    pause: PauseOption = None
    drop: Texts = option(
        None,
        "--drop",
        metavar="PROBABILITY[@START+LENGTH]",
        help="Probability that a message is lost, and sent again later: 0.05.",
    )
    delay: DelayOption = None
    partition: Texts = option(
        None,
        "--partition",
        metavar="SIDE|SIDE[@START+LENGTH]",
        help="Nothing crosses between the sides: '0,1|2-7@1s+2s'.",
    )

    def described(self) -> Cluster:
        """The cluster with what the command line changes in it."""
        described = ("cluster", "workers")
        texts = {name: value for name, value in vars(self).items() if name not in described}
        faults = parse_faults(**texts)
        return load_cluster(self.cluster).changed(workers=self.workers, faults=faults)


@dataclass(frozen=True)
class LengthOptions:
    """How long a run is, and in which portions."""

    epochs: EpochsOption = None
    samples: int | None = option(None, "--samples", help="The same, as a number of samples.")
    batch: BatchOption = None

    def epochs_of(self, task: Task) -> float | None:
        """The passes over the data that were asked for; None where nothing was."""
        if self.samples is None:
            return self.epochs
        if self.epochs is not None:
            raise ConfigurationError("give --epochs or --samples, not both")
        if self.samples < 1:
            raise ConfigurationError(f"--samples must be at least 1, got {self.samples}")
        return self.samples / len(task.train)


@dataclass(frozen=True)
class RunOptions:
    """How a run learns, and what computes it."""

    optimiser: str | None = option(
        None,
        "--optimiser",
        "--optimizer",
        help="Such as sgd:momentum=0.9,weight_decay=1e-4 or adamw.",
    )
    schedule: str = option(
        "constant", "--schedule", help="constant, step:at=81/122, cosine, linear; warmup=5,scale=8."
    )
    clip: float | None = option(
        None,
        "--clip",
        help="Largest norm of what an update applies: a gradient, or a mean of several.",
    )
    split: str = option(
        "shuffled", "--split", help="shuffled, sharded, dirichlet:alpha=0.3 or by_class."
    )
    engine: str = option(
        "vector", "--engine", help="vector, loop (the reference) or none (time only)."
    )
    device: str = option("cpu", "--device", help="cpu or cuda.")
    threads: ThreadsOption = 1
    compiled: bool | None = option(
        None, "--compile/--no-compile", help="torch.compile; by default where it pays back."
    )
    buffers: str = option(
        "recomputed",
        "--buffers",
        help="BatchNorm statistics of the output: recomputed, recomputed:BATCHES, averaged, local.",
    )
    model_bytes: ModelBytesOption = None
    data: DataOption = None

    def settings(self) -> dict[str, Any]:
        """The options by the names that `make_settings` knows; the data belong to the task."""
        return {name: value for name, value in vars(self).items() if name != "data"}


@dataclass(frozen=True)
class KeepOptions:
    """Where a run is kept, and how it is shown."""

    runs: RunsOption = Path("runs")
    live: int | None = option(
        None,
        "--live",
        metavar="PORT",
        help="Show the growing report at http://127.0.0.1:PORT, on this machine only; 0: any port.",
    )
    as_json: JsonOption = False


def _patience(text: str) -> float:
    return seconds(text, "--patience")


@dataclass(frozen=True)
class HostOptions:
    """Which hosts take part in a run, and how they find each other."""

    nnodes: int = option(1, "--nnodes", help="How many hosts take part.")
    node_rank: int = option(0, "--node-rank", help="Which of them this is.")
    rendezvous: str | None = option(
        None, "--rendezvous", metavar="HOST:PORT", help="Where they meet: node 0's."
    )
    patience: float = option(
        60.0,
        "--patience",
        metavar="TIME",
        parser=_patience,
        help="How long hosts wait for each other: 90s, 5m.",
    )
    secret_file: Path | None = option(
        None,
        "--secret-file",
        help="By what several hosts know each other; else in GOSSAMER_SECRET.",
    )


@dataclass(frozen=True)
class RealFaultOptions:
    """What goes wrong on real workers and their links."""

    slow: AlwaysSlowOption = None
    pause: PauseOption = None
    kill: KillOption = None
    bandwidth: str | None = option(
        None,
        "--bandwidth",
        metavar="BANDWIDTH",
        help="Every worker's card carries no more: 100Mbit.",
    )
    latency: str | None = option(
        None, "--latency", metavar="TIME", help="Every message takes at least so long: 1ms."
    )
    slow_link: SlowLinkOption = None
    delay: DelayOption = None
    drop: Texts = option(None, "--drop", hidden=True)
    partition: Texts = option(None, "--partition", hidden=True)

    def plan(self) -> FaultPlan:
        """What the launcher and the workers are told of it; what they cannot do is refused."""
        links = {"bandwidth", "latency"}
        texts = {name: value for name, value in vars(self).items() if name not in links}
        return FaultPlan(
            parse_faults(**texts),
            math.inf if self.bandwidth is None else bytes_per_second(self.bandwidth, "--bandwidth"),
            0.0 if self.latency is None else seconds(self.latency, "--latency"),
        )


# ---------------------------------------------------------------------- what a value means


def rates_from(text: str | None) -> tuple[float, ...]:
    """The learning rates of a grid, each once; none where nothing was said."""
    if text is None:
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"--lr must be numbers separated by commas, got {text!r}"
        ) from None
    return tuple(dict.fromkeys(rates))


def looks_from(text: str) -> tuple[int, ...]:
    """The numbers of seeds after which a comparison looks whether a winner is clear."""
    if text == "auto":
        return LOOKS
    try:
        seeds = int(text)
    except ValueError:
        raise ConfigurationError(f"--seeds must be a whole number or auto, got {text!r}") from None
    check_seeds(seeds)
    return (seeds,)


def target_from(target: float | None, *, has_accuracy: bool) -> float | None:
    """What a run must reach; accuracies are shares, and a number above 1 is one in per cent."""
    if target is None:
        return None
    if has_accuracy and 1 < target <= 100:
        return target / 100
    if not math.isfinite(target) or target <= 0 or (has_accuracy and target > 1):
        expected = (
            "an accuracy above 0 and at most 1 (or in per cent, at most 100)"
            if has_accuracy
            else "a loss above 0"
        )
        raise ConfigurationError(f"--target must be {expected}, got {target:g}")
    return target


def check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ConfigurationError(f"--seeds must be at least 1, got {seeds}")
