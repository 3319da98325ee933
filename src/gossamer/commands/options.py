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
import time
from collections.abc import Callable, Sequence
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
from gossamer.real.launch.hosts import Hosts
from gossamer.sim.checkpoint.file import CHECKPOINT
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.tasks import Task

Answer = TypeVar("Answer")
Number = TypeVar("Number", int, float)
Texts = list[str] | None


def shown(help: str, *names: str, parser: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """Say how help shows an option, whose name is that of its parameter unless names are given."""
    return typer.Option(*names, help=help, parser=parser, **more)


def option(
    default: Any, help: str = "", *names: str, parser: Callable[[str], Any] | None = None,
    **more: Any,
) -> Any:  # fmt: skip
    """Make a field of a group that typer shows as an option."""
    mark = shown(help, *names, parser=parser, **more)
    return dataclasses.field(default=default, metadata={"option": mark})


@dataclass(frozen=True)
class Without:
    """Names, in `Annotated` beside a group, the options that a command does not have."""

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
    str, shown("NAME or NAME:KEY=VALUE,...; `gossamer methods`; your own is FILE.py:NAME.")
]
MethodOrOwnOption = Annotated[
    str | None,
    shown("NAME or NAME:KEY=VALUE,...; `gossamer methods`. Default: ad_psgd, or the script's."),
]
ScriptArgument = Annotated[
    str | None,
    typer.Argument(metavar="SCRIPT", help="A Python script that calls gossamer.join."),
]
ArgumentsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="Behind --: all that belongs to the script."),
]
ComputeOption = Annotated[
    str,
    shown(
        "How long a script's step computes: cluster (as the cluster says), measured, or 12ms.",
        metavar="TIME",
    ),
]
OneMethodOption = Annotated[
    list[str] | None,
    shown(
        "One method, also of your own (my.py:name:KEY=VALUE,...); may be repeated.",
        metavar="METHOD",
    ),
]
RateOption = Annotated[float | None, shown("Learning rate; default: the task's.")]
MethodsOption = Annotated[str, shown("Methods separated by spaces: NAME or NAME:KEY=VALUE,...")]
TaskOption = Annotated[
    str,
    shown("What to train: `gossamer tasks` lists them; your own is FILE.py:NAME or MODULE:NAME."),
]
ClusterOption = Annotated[str, shown("A preset (`gossamer clusters`) or a TOML file.")]
SeedOption = Annotated[int, shown("Any whole number; everything random follows from it.")]
SeedsOption = Annotated[int, shown("Repeat with this many seeds; report mean and 95 % interval.")]
EpochsOption = Annotated[float | None, shown("Passes over the data, of all workers together.")]
BatchOption = Annotated[int | None, shown("Samples per worker and step.")]
GridOption = Annotated[str | None, shown("The grid for every method, such as 0.01,0.03,0.1.")]
TargetOption = Annotated[
    float | None,
    shown("Accuracy (0.95, or 95 for 95 %) or loss to reach and hold; default: near the best."),
]
ThreadsOption = Annotated[int, shown("Threads of torch on the CPU.")]
JobsOption = Annotated[
    int | None,
    shown("So many runs at a time, in processes; default: all cores up to 2, else one fewer."),
]
ModelBytesOption = Annotated[
    int | None,
    shown(
        "Charge the network for a model of this size: 100e6, 10MB, 1.5GB.",
        metavar="SIZE",
        parser=lambda text: size_in_bytes(text, "--model-bytes"),
    ),
]
DataOption = Annotated[Path | None, shown("Where the files of the task are.")]
RunsOption = Annotated[Path, shown("Where run folders go; `none` keeps nothing.")]
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
    shown(
        "Slow the network card of this worker down by FACTOR: 0=10.",
        metavar="WORKER=FACTOR[@START+LENGTH]",
    ),
]
KillOption = Annotated[
    list[str] | None, shown("Let this worker die at TIME: 3@2.5s.", metavar="WORKER@TIME")
]
PauseOption = Annotated[
    list[str] | None,
    shown("Let this worker stand still for LENGTH: 2@1s+0.5s.", metavar="WORKER@START+LENGTH"),
]
DropOption = Annotated[
    list[str] | None,
    shown(
        "Probability that a message is lost, and sent again later: 0.05.",
        metavar="PROBABILITY[@START+LENGTH]",
    ),
]
DelayOption = Annotated[
    list[str] | None,
    shown("Delay added to every message: 20ms@1s+2s.", metavar="TIME[@START+LENGTH]"),
]
AlwaysSlowOption = Annotated[
    list[str] | None, shown("Slow this worker down by FACTOR: 0=4.", metavar="WORKER=FACTOR")
]
ProcessesOption = Annotated[
    int | None,
    shown(
        "A process each on this host: 2, or as many as torchrun or mpirun has started.",
        "-n",
        "--workers",
    ),
]
AnyTransportOption = Annotated[
    str | None, shown("shm, torch or, under mpirun and srun, mpi; by default what suits.")
]
DeadlineOption = Annotated[
    float | None,
    shown(
        "After this time print who waits for what, and exit with code 3: 90s, 5m.",
        metavar="TIME",
        parser=lambda text: seconds(text, "--deadline"),
    ),
]


# ---------------------------------------------------------------------- groups


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster is simulated, and what goes wrong on it."""

    cluster: ClusterOption = "equal-8"
    workers: int | None = option(None, "How many workers, instead of the cluster's number.")
    slow: Texts = option(
        None,
        "Slow this worker down by FACTOR: 0=10, or from START on: 0=10@2s; may be repeated.",
        metavar="WORKER=FACTOR[@START+LENGTH]",
    )
    slow_link: SlowLinkOption = None
    kill: KillOption = None
    come_back: Texts = option(
        None, "Let this worker, which has died, come back: 3@4s.", "--return", metavar="WORKER@TIME"
    )
    arrive: Texts = option(
        None, "Let this worker take part from TIME on only: 5@2s.", metavar="WORKER@TIME"
    )
    kill_server: Texts = option(
        None, "Let this server die, which needs standby=: 0@2s.", metavar="SERVER@TIME"
    )
    pause: PauseOption = None
    drop: DropOption = None
    delay: DelayOption = None
    partition: Texts = option(
        None,
        "Nothing crosses between the sides: '0,1|2-7@1s+2s'.",
        metavar="SIDE|SIDE[@START+LENGTH]",
    )

    def described(self) -> Cluster:
        """Load the cluster and apply what the command line changes."""
        texts = {n: value for n, value in vars(self).items() if n not in ("cluster", "workers")}
        texts["return"] = texts.pop("come_back")
        faults = parse_faults(**texts)
        return load_cluster(self.cluster).changed(workers=self.workers, faults=faults)


@dataclass(frozen=True)
class LengthOptions:
    """How long a run is, and how large its batches are."""

    epochs: EpochsOption = None
    samples: int | None = option(None, "The same, as a number of samples.")
    batch: BatchOption = None

    def epochs_of(self, task: Task) -> float | None:
        """The passes over the data that the user asked for; None where no option says so."""
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
        None, "Such as sgd:momentum=0.9,weight_decay=1e-4 or adamw.", "--optimiser", "--optimizer"
    )
    schedule: str = option(
        "constant", "constant, step:at=81/122, cosine, linear; warmup=5,scale=8."
    )
    clip: float | None = option(
        None, "Largest norm of what an update applies: a gradient, or a mean of several."
    )
    split: str = option("shuffled", "shuffled, sharded, dirichlet:alpha=0.3 or by_class.")
    engine: str = option("vector", "vector, loop (the reference) or none (time only).")
    device: str = option("cpu", "cpu or cuda.")
    precision: str | None = option(
        None, "Of gradients: fp32, tf32 or bf16; by default tf32 on GPUs that have it, else fp32."
    )
    threads: ThreadsOption = 1
    compiled: bool | None = option(
        None, "torch.compile; by default where it pays back.", "--compile/--no-compile"
    )
    buffers: str = option(
        "recomputed",
        "BatchNorm statistics of the output: recomputed, recomputed:BATCHES, averaged, local.",
    )
    swa: float | None = option(
        None, "From this share of the run on, the output is the mean of its evaluations: 0.75."
    )
    width: int | None = option(
        None, "How many gradients are computed at once; default: as many as fit into memory."
    )
    model_bytes: ModelBytesOption = None
    data: DataOption = None

    def settings(self) -> dict[str, Any]:
        """The options by their names in `make_settings`, without the data, which the task needs."""
        return {name: value for name, value in vars(self).items() if name != "data"}


@dataclass(frozen=True)
class KeepOptions:
    """Where a run is kept, and how it is shown."""

    runs: RunsOption = Path("runs")
    live: int | None = option(
        None,
        "Show the growing report at http://127.0.0.1:PORT, on this machine only; 0: any port.",
        metavar="PORT",
    )
    as_json: JsonOption = False


@dataclass(frozen=True)
class PieceOptions:
    """How a long run is made in pieces."""

    minutes: float | None = option(
        None, "End after so many minutes of wall time with a checkpoint, and exit code 3."
    )
    checkpoint_every: float | None = option(
        None,
        "Keep a checkpoint in the run folder: 5m, 90s. Ctrl-C then writes one, too.",
        metavar="TIME",
        parser=lambda text: seconds(text, "--checkpoint-every"),
    )

    @property
    def are_asked(self) -> bool:
        return self.minutes is not None or self.checkpoint_every is not None

    def check(self, runs: Path, script: object) -> None:
        """Refuse what cannot be made in pieces, before anything is written."""
        for name in ("minutes", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigurationError(f"{name} must be a finite number above 0, got {value:g}")
        if self.are_asked and script is not None:
            raise ConfigurationError(
                "a script cannot be made in pieces, because its processes cannot be written to "
                "disk; leave out --minutes and --checkpoint-every, or describe its model as a task"
            )
        if self.are_asked and str(runs) == "none":
            raise ConfigurationError(
                "--minutes and --checkpoint-every need a run folder; leave out --runs none"
            )

    def pieces(self) -> Callable[[Path], RunPiece]:
        """The piece of each run of a command by its folder; all of them end at one moment."""
        ends_at = time.monotonic() + 60 * (self.minutes or math.inf)

        def piece(folder: Path) -> RunPiece:
            place = folder / CHECKPOINT
            left = max(1e-3, ends_at - time.monotonic())
            return RunPiece(place, self.checkpoint_every or math.inf, left, resumes=place.exists())

        return piece


@dataclass(frozen=True)
class HostOptions:
    """Which hosts take part in a run, and how they find each other."""

    nnodes: int = option(1, "How many hosts take part.")
    node_rank: int = option(0, "Which of them this is.")
    rendezvous: str | None = option(None, "Where they meet: node 0's.", metavar="HOST:PORT")
    patience: float = option(
        60.0,
        "How long hosts wait for each other: 90s, 5m.",
        metavar="TIME",
        parser=lambda text: seconds(text, "--patience"),
    )
    secret_file: Path | None = option(
        None, "By what several hosts know each other; else in GOSSAMER_SECRET."
    )

    def hosts(self) -> Hosts:
        return Hosts.parse(*dataclasses.astuple(self))


@dataclass(frozen=True)
class RealFaultOptions:
    """What goes wrong on real workers and their links."""

    slow: AlwaysSlowOption = None
    pause: PauseOption = None
    kill: KillOption = None
    bandwidth: str | None = option(
        None, "Every worker's card carries no more: 100Mbit.", metavar="BANDWIDTH"
    )
    latency: str | None = option(None, "Every message takes at least so long: 1ms.", metavar="TIME")
    slow_link: SlowLinkOption = None
    delay: DelayOption = None
    arrive: Texts = option(
        None, "Let this worker of an --elastic run come only then: 5@2s.", metavar="WORKER@TIME"
    )
    come_back: Texts = option(
        None, "Let this worker, which has died, come back: 3@4s.", "--return", metavar="WORKER@TIME"
    )
    drop: DropOption = None
    partition: Texts = option(
        None,
        "Nothing crosses between the sides until it heals: '0,1|2-7@1s+2s'.",
        metavar="SIDE|SIDE@START+LENGTH",
    )

    def plan(self) -> FaultPlan:
        """Make the plan for the launcher and the workers; refuse faults they cannot cause."""
        links = {"bandwidth", "latency"}
        texts = {name: value for name, value in vars(self).items() if name not in links}
        texts["return"] = texts.pop("come_back")
        return FaultPlan(
            parse_faults(**texts),
            math.inf if self.bandwidth is None else bytes_per_second(self.bandwidth, "--bandwidth"),
            0.0 if self.latency is None else seconds(self.latency, "--latency"),
        )


# ---------------------------------------------------------------------- what a value means


def methods_from(methods: str, single: Sequence[str] | None, usual: str) -> list[str]:
    """Read `--methods`, then every `--method`; without the usual methods if any is named."""
    if not methods.split():
        raise ConfigurationError("--methods names no method; see `gossamer methods`")
    if single and methods == usual:
        methods = ""
    names = methods.split()
    if len(names) == 1 and "," in methods and ":" not in methods:
        names = methods.split(",")
    names += single or ()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"--methods names a method twice: {twice!r}")
    return names


def numbers_from(
    option: str, text: str | None, kind: Callable[[str], Number]
) -> tuple[Number, ...]:
    """Read numbers separated by commas; no numbers where the option is left out."""
    try:
        return () if text is None else tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigurationError(
            f"{option} must be {what} separated by commas, got {text!r}"
        ) from None


def rates_from(text: str | None) -> tuple[float, ...]:
    """Read the learning rates of a grid, each once; no rates where the option is left out."""
    return tuple(dict.fromkeys(numbers_from("--lr", text, float)))


def check_seeds(seeds: int) -> None:
    if seeds < 1:
        raise ConfigurationError(f"--seeds must be at least 1, got {seeds}")


def check_script_options(
    script: str, task: str, length: LengthOptions, rate: object, running: RunOptions,
    evaluations: int | None,
) -> None:  # fmt: skip
    """What a script decides by itself is not given to the command."""
    given: dict[str, tuple[object, object]] = {
        "--task": (task, "digits-mlp"), "--lr": (rate, None),
        "--evaluations": (evaluations in (None, 20), True),
    }  # fmt: skip
    for options, default in ((length, LengthOptions()), (running, RunOptions())):
        for name, value in vars(options).items():
            if name not in ("threads", "model_bytes"):
                given[f"--{name}"] = (value, getattr(default, name))
    for flag, (value, default) in given.items():
        if value != default:
            raise ConfigurationError(
                f"{flag} is for tasks, and {script} decides that by itself; leave it out, or give "
                "it to the script behind --"
            )


def check_no_script(compute: str) -> None:
    """What is for scripts only is refused with a task."""
    if compute != "cluster":
        raise ConfigurationError("--compute is for scripts; a task's compute time is the cluster's")
