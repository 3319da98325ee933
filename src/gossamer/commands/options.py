"""The options that several commands share, and how they become settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.console import results_elsewhere
from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.faults import KINDS, parse_fault
from gossamer.errors import ConfigurationError
from gossamer.quantities import size_in_bytes
from gossamer.runs.ranking import LOOKS
from gossamer.tasks import Task, make_task

MethodsOption = Annotated[
    str, typer.Option("--methods", help="Methods separated by spaces: NAME or NAME:KEY=VALUE,...")
]
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
EvaluationsOption = Annotated[
    int | None,
    typer.Option(
        "--evaluations",
        help="How often each run is measured; default: 5 an epoch, from 20 to 100 in all.",
    ),
]
TaskOption = Annotated[
    str, typer.Option("--task", help="What to train; `gossamer tasks` lists them.")
]
ClusterOption = Annotated[
    str, typer.Option("--cluster", help="A preset (`gossamer clusters`) or a TOML file.")
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="How many workers, instead of the cluster's number.")
]
SlowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="WORKER=FACTOR[@START+LENGTH]",
        help="Slow this worker down by FACTOR: 0=10, or from START on: 0=10@2s; may be repeated.",
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
DropOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drop",
        metavar="PROBABILITY[@START+LENGTH]",
        help="Probability that a message is lost, and sent again later: 0.05.",
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
PartitionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--partition",
        metavar="SIDE|SIDE[@START+LENGTH]",
        help="Nothing crosses between the sides: '0,1|2-7@1s+2s'.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="Any whole number; everything random follows from it.")
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", help="Repeat with this many seeds; report mean and 95 % interval.")
]
LooksOption = Annotated[
    str,
    typer.Option(
        "--seeds",
        help="How many seeds are ranked, besides the one that chooses the learning rates; auto: "
        "3, 6 or 12, until a winner is clear.",
    ),
]
EpochsOption = Annotated[
    float | None, typer.Option("--epochs", help="Passes over the data, of all workers together.")
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", help="The same, as a number of samples.")
]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Samples per worker and step.")]
OptimiserOption = Annotated[
    str | None,
    typer.Option(
        "--optimiser", "--optimizer", help="Such as sgd:momentum=0.9,weight_decay=1e-4 or adamw."
    ),
]
ScheduleOption = Annotated[
    str,
    typer.Option("--schedule", help="constant, step:at=81/122, cosine, linear; warmup=5,scale=8."),
]
ClipOption = Annotated[
    float | None,
    typer.Option(
        "--clip", help="Largest norm of what an update applies: a gradient, or a mean of several."
    ),
]
SplitOption = Annotated[
    str, typer.Option("--split", help="shuffled, sharded, dirichlet:alpha=0.3 or by_class.")
]
EngineOption = Annotated[
    str, typer.Option("--engine", help="vector, loop (the reference) or none (time only).")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
ThreadsOption = Annotated[int, typer.Option("--threads", help="Threads of torch on the CPU.")]
CompileOption = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="torch.compile; by default where it pays back."),
]
BuffersOption = Annotated[
    str,
    typer.Option(
        "--buffers",
        help="BatchNorm statistics of the output: recomputed, recomputed:BATCHES, averaged, local.",
    ),
]
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


@dataclass(frozen=True)
class Faults:
    """What the fault options of a command line said, by their names."""

    slow: Sequence[str] | None
    slow_link: Sequence[str] | None
    kill: Sequence[str] | None
    pause: Sequence[str] | None
    drop: Sequence[str] | None
    delay: Sequence[str] | None
    partition: Sequence[str] | None

    def cluster(self, name: str, workers: int | None) -> Cluster:
        """The named cluster with the overrides of the command line."""
        faults = [
            parse_fault(kind, text)
            for kind in KINDS
            for text in getattr(self, kind.replace("-", "_")) or ()
        ]
        return load_cluster(name).changed(workers=workers, faults=faults)


def load_task(spec: str, data: Path | None) -> Task:
    return make_task(spec, data=data)


def epochs_from(epochs: float | None, samples: int | None, task: Task) -> float | None:
    if samples is None:
        return epochs
    if epochs is not None:
        raise ConfigurationError("give --epochs or --samples, not both")
    if samples < 1:
        raise ConfigurationError(f"--samples must be at least 1, got {samples}")
    return samples / len(task.train)


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


def keeps_folder(runs: Path) -> bool:
    return str(runs) != "none"


def slug(text: str) -> str:
    """A method's spec as part of a file name, which may not be too long."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text[:80])
