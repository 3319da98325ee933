"""How a replica is spread over machines: the options that every method takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.pipeline.schedule import (
    SYNCHRONOUS,
    PipelineSchedule,
    chunks_per_machine,
    make_schedule_of,
    places_of,
)
from gossamer.specs import convert

ASYNCHRONOUS = {
    "pipedream": "never emptied; a stage makes both passes of a batch with the weights that it had "
    "when the batch came (weight stashing, Narayanan et al. 2019)",
    "vertical_sync": "PipeDream in which all stages use the weights of one moment",
    "ampnet": "never emptied; the backward pass of a stage meets newer weights than its forward "
    "pass did (Gaunt et al. 2017)",
    "pipemare": "the same, with the weights of the forward pass estimated and early steps that are "
    "smaller where the delay is long (Yang et al. 2021)",
    "2bw": "never emptied; all stages use the weights of one step before (Narayanan et al. 2021)",
}
"""The pipelines that go on while the parameters change."""
_SPLIT = ("ampnet", "pipemare")
_WHOLE_BATCHES = ("pipedream", "vertical_sync", *_SPLIT)
PIPELINES = {**SYNCHRONOUS, **ASYNCHRONOUS}


@dataclass(frozen=True)
class ReplicaShape:
    """One replica's machines: consecutive stages, and in each stage machines that share layers."""

    stages: int = 1
    tensor: int = 1
    """Over how many machines each layer is split."""
    pipeline: str = "1f1b"
    microbatches: int = 0
    """Into how many a batch is divided; 0: about twice as many as there are stages."""
    chunks: int = 0
    """How many chunks of the model a machine holds; 0: as is usual for the pipeline."""
    cut: str = ""
    """The numbers of the parts with which the later chunks begin, as 2/4/7; empty: by work."""

    def __post_init__(self) -> None:
        for name in ("stages", "tensor"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("microbatches", "chunks"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pipeline not in PIPELINES:
            raise unknown_name("pipeline", self.pipeline, PIPELINES)
        if self.pipeline in _WHOLE_BATCHES and self.microbatches > 1:
            raise ConfigurationError(
                f"{self.pipeline} passes whole batches on, got microbatches={self.microbatches}; "
                "leave it out, or choose 2bw"
            )
        if self.cut and not all(one.isdecimal() for one in self.cut.split("/")):
            raise ConfigurationError(
                f"cut must be numbers of parts such as 2/4/7, got {self.cut!r}"
            )

    @property
    def machines(self) -> int:
        return self.stages * self.tensor

    @property
    def is_asynchronous(self) -> bool:
        return self.pipeline in ASYNCHRONOUS

    @property
    def per_machine(self) -> int:
        """The chunks of each machine."""
        return self.chunks or chunks_per_machine(self.pipeline)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(int(one) for one in self.cut.split("/")) if self.cut else ()

    def microbatches_of(self, batch: int) -> int:
        """Into how many equal parts a batch is divided."""
        if self.pipeline in _WHOLE_BATCHES:
            return 1
        most = min(batch, 2 * self.stages)
        found = self.microbatches or next(n for n in range(most, 0, -1) if batch % n == 0)
        if batch % found:
            raise ConfigurationError(
                f"a batch of {batch} samples cannot be divided into {found} equal micro-batches; "
                "choose microbatches that divide it"
            )
        if self.pipeline == "2bw" and found < self.stages:
            raise ConfigurationError(
                f"2bw needs at least as many micro-batches as the {self.stages} stages, got "
                f"{found} of a batch of {batch}; choose others, or another batch"
            )
        return found

    @property
    def steps_ahead(self) -> int:
        """How many later steps begin before one ends."""
        if not self.is_asynchronous:
            return 0
        return self.stages - 1 if self.pipeline in _WHOLE_BATCHES else 1

    @property
    def has_split_points(self) -> bool:
        """Whether a backward pass is made with other weights than the forward pass."""
        return self.pipeline in _SPLIT and self.stages > 1

    def lags(self) -> tuple[int, ...]:
        """How many steps old the parameters of each stage are when a gradient is taken there, or
        where the passes differ when its forward pass is made."""
        match self.pipeline:
            case "pipedream" | "ampnet" | "pipemare":
                return tuple(self.stages - 1 - stage for stage in range(self.stages))
            case "vertical_sync":
                return (self.stages - 1,) * self.stages
            case "2bw":
                return (int(self.stages > 1),) * self.stages
            case _:
                return (0,) * self.stages

    @property
    def versions(self) -> tuple[int, ...]:
        """How many versions of its weights each stage keeps."""
        match self.pipeline:
            case "pipedream":
                return tuple(self.stages - stage for stage in range(self.stages))
            case "vertical_sync":
                return (self.stages,) * self.stages
            case "2bw":
                return (min(2, self.stages),) * self.stages
            case _:
                return (1,) * self.stages

    @property
    def places(self) -> tuple[int, ...]:
        """The machine of each chunk."""
        return places_of(self.pipeline, self.stages, self.per_machine)

    def schedule(self, batch: int) -> PipelineSchedule:
        """The table of one step. That of a pipeline which is never emptied only says who needs
        what: it is 1F1B without an end."""
        name = "1f1b" if self.is_asynchronous else self.pipeline
        return make_schedule_of(name, self.stages, self.microbatches_of(batch), self.chunks)

    def options(self) -> dict[str, Any]:
        """What differs from a replica on one machine, as it is written in a spec."""
        return {
            one.name: value
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }


SHAPE_OPTIONS = tuple(one.name for one in fields(ReplicaShape))


def read_shape(name: str, given: Mapping[str, str]) -> ReplicaShape:
    """Read the shape from text; `name` is the method's."""
    kinds = {one.name: int if one.type == "int" else str for one in fields(ReplicaShape)}
    values: dict[str, Any] = {
        key: convert(text, kinds[key], f"{name}: {key}") for key, text in given.items()
    }
    return ReplicaShape(**values)
