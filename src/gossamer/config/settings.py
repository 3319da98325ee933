"""All choices that decide a run, in virtual time or on real workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from gossamer.config.cluster import Cluster, cluster_from, load_cluster
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.groups import Groups, even_groups, groups_of
from gossamer.methods import MethodSpec, parse_method
from gossamer.optim.optimisers import Optimiser, Sgd, make_optimiser
from gossamer.optim.schedules import Schedule, make_schedule
from gossamer.own_code import absolute
from gossamer.pipeline.stages import StageCut, cut_model
from gossamer.precision import PRECISIONS, default_precision, has_tf32
from gossamer.quantities import counted
from gossamer.replica import cut, trainable
from gossamer.specs import check_range
from gossamer.tasks import Task, make_task, shares
from gossamer.tasks.evaluator import buffer_policy
from gossamer.tasks.own_task import try_out

ENGINES = {
    "vector": "all outstanding gradients in one batched call (the default)",
    "loop": "one worker after the other: the reference, bit for bit plain PyTorch",
    "none": "no gradients at all, zeros at once: for questions about time only",
}

_KINDS = (
    (
        "a whole number",
        Integral,
        ("seed", "batch", "threads", "evaluations", "width", "model_bytes"),
    ),
    ("a number", Real, ("epochs", "learning_rate", "clip", "swa")),
    ("a text", str, ("optimiser", "schedule", "split", "engine", "device", "precision", "buffers")),
)


@dataclass(frozen=True)
class Settings:
    """What a user may choose; None means: as the task suggests."""

    task: Task
    method: MethodSpec
    cluster: Cluster
    seed: int = 0
    epochs: float | None = None
    batch: int | None = None
    learning_rate: float | None = None
    optimiser: str | None = None
    schedule: str = "constant"
    clip: float | None = None
    split: str = "shuffled"
    engine: str = "vector"
    device: str = "cpu"
    precision: str | None = None
    """Gradients are computed in fp32, tf32 or bf16. None: tf32 on a GPU that has it, else fp32."""
    threads: int = 1
    """The threads of torch on the CPU. Another number may change the last bits of a result."""
    compiled: bool | None = None
    """None: on a GPU, when the run is long enough to pay for compiling."""
    buffers: str = "recomputed"
    evaluations: int = 20
    """How often the models are evaluated during the run."""
    swa: float | None = None
    """From this share of the run on, the output is the mean of the output models of all evaluations
    so far (stochastic weight averaging); None: the last one alone."""
    width: int | None = None
    """How many gradients are computed at once at most; None: as many as fit into memory."""
    model_bytes: int | None = None
    """Charge the network for a model of this size instead of the task's own."""

    def resolved(self) -> Settings:
        """The settings with every value filled in and checked."""
        self._check_kinds()
        task = self.task
        optimiser = task.optimiser if self.optimiser is None else self.optimiser
        filled = dataclasses.replace(
            self,
            epochs=task.epochs if self.epochs is None else self.epochs,
            batch=task.batch if self.batch is None else self.batch,
            optimiser=optimiser,
        )
        if self.learning_rate is None:
            own_rate = filled.rule.own_rate or middle_rate(task)
            filled = dataclasses.replace(filled, learning_rate=own_rate)
        filled._check()
        if filled.precision is None:
            default = default_precision(torch.device(filled.device))
            filled = dataclasses.replace(filled, precision=default)
        return filled

    @cached_property
    def rule(self) -> Optimiser:
        """The optimiser that was asked for."""
        return make_optimiser(self.optimiser or "")

    def _check_kinds(self) -> None:
        """Refuse a value of the wrong kind here, where its name can be told."""
        for what, kind, names in _KINDS:
            for name in names:
                value: object = getattr(self, name)
                if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                    raise ConfigurationError(f"{name} must be {what}, got {value!r}")

    def _check(self) -> None:
        for name in (
            "epochs", "batch", "learning_rate", "threads", "clip", "width", "model_bytes",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"{name} must be a finite number above 0, got {value}")
        check_range("evaluations", self.evaluations, 1)
        if self.swa is not None:
            check_range("swa", self.swa, 0.0, 1.0)
            if self.method.method.output == "ensemble":
                raise ConfigurationError(
                    f"swa averages the output model, and {self.method} has as many as workers; "
                    "average them by `gossamer soup`, or choose another method"
                )
        if self.engine not in ENGINES:
            raise unknown_name("engine", self.engine, ENGINES)
        buffer_policy(self.buffers)
        _check_device(self.device)
        _check_precision(self.precision, self.device)
        if self.batch is not None and self.batch > len(self.task.train):
            raise ConfigurationError(
                f"a batch of {self.batch} is larger than the {len(self.task.train)} samples of "
                f"{self.task.name}; choose a smaller one"
            )
        self._check_shape()
        if self.cluster.has_newcomers:
            self.method.check_newcomers()
        self._check_servers()
        # Whatever would fail when the run is built fails here, before anything is written.
        self.method.check_kind(isinstance(self.rule, Sgd), self.rule.name)
        self._check_growth()
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigurationError(f"seed must have at most 63 bits, got {self.seed}")
        shares(self.task.train.labels, self.replicas, self.split, self.seed)
        if self.method.balance and self.split != "shuffled":
            raise ConfigurationError(
                f"balance=speed deals the samples of one shared order, got the split {self.split}, "
                "in which each worker has its own; use the split shuffled"
            )
        if self.method.servers > 1:
            with torch.random.fork_rng(devices=[]):
                model = self.task.make_model()
            cut([parameter.numel() for _, parameter in trainable(model)], self.method.servers)
        self.method_options()

    def _check_servers(self) -> None:
        """Refuse the death of a server that is not there, or that would only end the run."""
        method = self.method
        dead = [fault for fault in self.cluster.faults if fault.kind == "kill-server"]
        servers = method.servers if method.method.has_server else 0
        for number, fault in enumerate(dead):
            if fault.worker >= servers:
                has = f"{counted(servers, 'server')}, numbered from 0" if servers else "no server"
                raise ConfigurationError(f"the fault '{fault}' cannot happen: {method} has {has}")
            if not method.standby or any(one.worker == fault.worker for one in dead[:number]):
                standby = "one standby only" if method.standby else "no standby"
                raise ConfigurationError(
                    f"the fault '{fault}' would end the run, because server {fault.worker} of "
                    f"{method} has {standby}; "
                    + ("leave it out" if method.standby else "add standby=sync to the method")
                )

    def _check_shape(self) -> None:
        shape, workers = self.method.shape, self.cluster.workers
        if workers % shape.machines:
            raise ConfigurationError(
                f"{self.method}: a replica needs {shape.machines} workers, which do not divide the "
                f"{workers} of the cluster; choose stages and tensor that do"
            )
        if self.microbatches > 1 and shape.machines == 1 and self.method.balance:
            raise ConfigurationError(
                f"{self.method}: batches in proportion to speed cannot be divided into "
                f"{self.microbatches} equal micro-batches; leave out balance or microbatches"
            )
        if shape.machines > 1:
            shape.schedule(self.batch or 1)
            self.stage_cut()

    def _check_growth(self) -> None:
        if not self.made_schedule.is_growing:
            return
        what = {
            "balance=speed, which deals batches itself": self.method.balance,
            "groups, whose members owe each other equal batches": bool(self.method.groups),
            "stages, which divide equal batches": self.method.shape.machines > 1,
        }
        for reason, is_so in what.items():
            if is_so:
                raise ConfigurationError(f"the schedule growth does not go with {reason}")

    @cached_property
    def made_schedule(self) -> Schedule:
        """The schedule of this run."""
        return make_schedule(self.schedule, epochs=self.epochs or 0.0, workers=self.replicas)

    @property
    def microbatches(self) -> int:
        """Into how many equal parts the batch of a gradient is divided, one after the other. A
        replica on one machine takes it whole unless its method is told otherwise."""
        shape = self.method.shape
        if shape.machines == 1 and not shape.microbatches:
            return 1
        return shape.microbatches_of(self.batch or 1)

    def stage_cut(self) -> StageCut:
        """Which parts of the model each machine of a replica has."""
        shape = self.method.shape
        return stage_cut_of(self.task, shape.stages * shape.per_machine, shape.cuts)

    def notices(self) -> list[str]:
        """What a user must be told about these settings."""
        momentum = self.rule.momentum if isinstance(self.rule, Sgd) else 0.0
        is_synchronous = self.method.method.is_synchronous(self.method_options())
        notice = self.method.notice(momentum, is_synchronous=is_synchronous)
        return [] if notice is None else [notice]

    def method_options(self) -> dict[str, Any]:
        """All options of the method in this run; with groups, between the groups."""
        return dict(self._method_options)

    @cached_property
    def _method_options(self) -> dict[str, Any]:
        groups = split_groups(self.method.groups, self.cluster)
        return self.method.resolve(len(groups) or self.replicas, self.steps_per_worker)

    @property
    def replicas(self) -> int:
        """How many replicas there are, each on one worker of the cluster or on several: the workers
        that the method knows."""
        return self.cluster.workers // self.method.shape.machines

    @property
    def samples(self) -> int:
        """How many samples all workers together will process."""
        return max(1, round((self.epochs or 0) * len(self.task.train)))

    @property
    def steps_per_worker(self) -> int:
        ordinary = -(-self.samples // ((self.batch or 1) * self.replicas))
        share = self.made_schedule.step_share
        return max(1, ordinary if share == 1.0 else round(ordinary * share))

    def as_dict(self) -> dict[str, Any]:
        """For the run folder: plain values, and the options of the method that follow from them."""
        return self.to_json() | {
            "task": self.task.spec or self.task.name,
            "method": str(self.method),
            "method_options": self.method_options(),
            "test_samples": len(self.task.test),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON can hold: the task by its spec and by where its data are. What the
        user brings is named by a path that holds in every folder of this host."""
        shallow = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return shallow | {
            "task": absolute(self.task.spec or self.task.name),
            "method": absolute(str(self.method)),
            "cluster": self.cluster.as_dict(),
            "data": None if self.task.data is None else str(self.task.data),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any], data: Path | None = None) -> Settings:
        """The inverse; `data` is where the files of the task are on this host, if elsewhere."""
        chosen: dict[str, Any] = {**values, "cluster": cluster_from(values["cluster"])}
        chosen["data"] = data or chosen["data"]
        return make_settings(**chosen)


def split_groups(groups: int | str, cluster: Cluster) -> Groups:
    """Groups of consecutive ranks, this many or one per machine; empty without groups."""
    if groups == "host":
        return groups_of(cluster.workers, cluster.workers_per_machine)
    return even_groups(cluster.workers, groups) if isinstance(groups, int) and groups else ()


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"unknown device {name!r}; choose cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {name!r} is not supported; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"no CUDA device was found for {name!r}; use the device cpu")


def _check_precision(precision: str | None, device: str) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if precision == "tf32" and not has_tf32(torch.device(device)):
        raise ConfigurationError(
            f"the device {device} has no tf32, which is a format of newer GPUs; choose the "
            "precision fp32 or bf16"
        )


def middle_rate(task: Task) -> float:
    """The middle of the task's small grid."""
    return task.learning_rates[len(task.learning_rates) // 2]


def loaded_task(task: str | Task, data: Path | str | None = None) -> Task:
    """The task itself, or the one of that name; `data` is where its files are."""
    if isinstance(task, Task):
        # One that was made by name has been tried before.
        if task.place and not task.spec:
            try_out(task)
        return task
    return make_task(task, data=None if data is None else Path(data))


def make_settings(
    task: str | Task,
    method: str | MethodSpec,
    cluster: str | Path | Cluster,
    *,
    data: Path | str | None = None,
    **choices: Any,
) -> Settings:
    """Settings from names; unknown names and keys are refused with the nearest right one."""
    known = {field.name for field in dataclasses.fields(Settings)}
    for key in choices:
        if key not in known:
            raise unknown_name("setting", key, known)
    made = loaded_task(task, data)
    return Settings(made, parse_method(method), load_cluster(cluster), **choices).resolved()


def stage_cut_of(task: Task, chunks: int, given: Sequence[int] = ()) -> StageCut:
    """A task's model, cut by the work of its parts or at `given` ones."""
    with torch.random.fork_rng(devices=[]):
        model = task.make_model()
    inputs = task.train.first(2).inputs
    if not isinstance(inputs, torch.Tensor):
        raise ConfigurationError(
            f"the model of {task.name} cannot be cut into stages, because it takes its inputs by "
            "name and a chain takes one tensor"
        )
    return cut_model(model, inputs, chunks, given)
