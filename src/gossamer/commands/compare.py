"""`gossamer compare`: the same model, several methods, one imperfect cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.commands import options as given
from gossamer.commands.comparison import Comparison
from gossamer.commands.execute import recorded
from gossamer.commands.live import LiveOption, live_page
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError
from gossamer.runs.arrival import evaluations as frequency
from gossamer.runs.folder import RunFolder
from gossamer.tasks import Task

DEFAULT_METHODS = "all_reduce downpour easgd d_psgd ad_psgd push_sum local_sgd diloco"


def compare(
    methods: given.MethodsOption = DEFAULT_METHODS,
    task: given.TaskOption = "digits-mlp",
    cluster: given.ClusterOption = "one-slow-of-8",
    workers: given.WorkersOption = None,
    slow: given.SlowOption = None,
    slow_link: given.SlowLinkOption = None,
    kill: given.KillOption = None,
    pause: given.PauseOption = None,
    drop: given.DropOption = None,
    delay: given.DelayOption = None,
    partition: given.PartitionOption = None,
    seed: given.SeedOption = 0,
    seeds: given.LooksOption = "3",
    epochs: given.EpochsOption = None,
    samples: given.SamplesOption = None,
    batch: given.BatchOption = None,
    lr: given.GridOption = None,
    target: given.TargetOption = None,
    evaluations: given.EvaluationsOption = None,
    optimiser: given.OptimiserOption = None,
    schedule: given.ScheduleOption = "constant",
    clip: given.ClipOption = None,
    split: given.SplitOption = "shuffled",
    engine: given.EngineOption = "vector",
    device: given.DeviceOption = "cpu",
    threads: given.ThreadsOption = 1,
    compiled: given.CompileOption = None,
    buffers: given.BuffersOption = "recomputed",
    model_bytes: given.ModelBytesOption = None,
    data: given.DataOption = None,
    runs: given.RunsOption = Path("runs"),
    live: LiveOption = None,
    as_json: given.JsonOption = False,
) -> None:
    """Compare several ways of training on one cluster.

    In virtual time, with true gradients. Every method gets the same small grid of learning rates on
    a seed of its own, and is ranked with further seeds at the rate that reached the target first.
    A target is reached when the score, averaged over the epochs within 15 % of a moment, is first
    there, and the run ends there too.
    """
    looks = given.looks_from(seeds)
    described = given.cluster_of(
        cluster, workers, slow=slow, slow_link=slow_link, kill=kill, pause=pause, drop=drop,
        delay=delay, partition=partition,
    )  # fmt: skip
    if engine == "none":
        raise ConfigurationError("compare needs gradients; use --engine vector or loop")
    loaded = given.load_task(task, data)
    length = given.epochs_from(epochs, samples, loaded)
    asked = frequency(length or loaded.epochs) if evaluations is None else evaluations
    base: dict[str, Any] = {
        "seed": seed, "epochs": length, "batch": batch, "evaluations": asked,
        "optimiser": optimiser, "schedule": schedule, "clip": clip, "split": split,
        "engine": engine, "device": device, "threads": threads, "compiled": compiled,
        "buffers": buffers, "model_bytes": model_bytes,
    }  # fmt: skip
    settings = _grid(loaded, methods, described, given.rates_from(lr), base)
    goal = given.target_from(target, has_accuracy=loaded.correct is not None)
    comparison = Comparison(settings, looks, goal)
    with live_page(live, keeps_folder=given.keeps_folder(runs)) as page:
        folder = None
        if given.keeps_folder(runs):
            folder = RunFolder.create(runs, f"compare-{given.slug(loaded.name)}")
        with recorded(folder):
            comparison.run(folder, page)
        comparison.report(folder, as_json)
    if comparison.interrupted:
        raise KeyboardInterrupt


def _grid(
    task: Task, methods: str, machines: Cluster, rates: Sequence[float], base: dict[str, Any]
) -> list[Settings]:
    """Every method at every rate, all of them checked."""
    return [
        make_settings(task, method, machines, learning_rate=rate, **base)
        for method in _split_methods(methods)
        for rate in rates or task.learning_rates
    ]


def _split_methods(text: str) -> list[str]:
    names = text.split()
    if not names:
        raise ConfigurationError("--methods names no method; see `gossamer methods`")
    if len(names) == 1 and "," in text and ":" not in text:
        names = text.split(",")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--methods names a method twice: {text!r}")
    return names
