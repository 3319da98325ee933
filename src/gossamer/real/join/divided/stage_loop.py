"""A user's loop in a process that trains one stage of the model.

All processes of a replica run the same loop over the same batches. `worker.through_stages` sends a
batch through the stages by PyTorch's own runtime and leaves the gradient of this process's stage in
its parameters; then `worker.step()` couples the same stages of all replicas, as it couples whole
models elsewhere. The parameters of the other stages stand still here until the output is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.observe.callbacks import Callback
from gossamer.observe.run_observer import RunObserver
from gossamer.pipeline.stage_module import StageModule, stage_modules
from gossamer.pipeline.stages import cut_model
from gossamer.real.join.divided.islands import joined_island
from gossamer.real.join.joined_worker import JoinedWorker
from gossamer.real.join.loader import shard_of
from gossamer.real.join.loop_session import LoopSession
from gossamer.real.join.servers import momentum_left_out
from gossamer.real.join.several_optimizers import SeveralModels
from gossamer.real.output_model import Untrained
from gossamer.real.pipelines.emptied_pipeline import EmptiedPipeline, borders_of
from gossamer.real.pipelines.island_session import IslandSession
from gossamer.real.pipelines.stage_links import StageLinks
from gossamer.real.transports.transport import Store, Transport
from gossamer.replica import trainable

T = TypeVar("T")
Loss = Callable[[Any, Any], Tensor]


def joined_part(
    transport: Transport, model: nn.Module, optimizer: torch.optim.Optimizer, spec: MethodSpec,
    mesh: Any, example: Any, *, seed: int, steps: int, callbacks: Sequence[Callback],
) -> JoinedWorker:  # fmt: skip
    """The worker of a loop whose replicas are several processes each: islands over a mesh, or the
    stages of a pipeline."""
    if mesh is not None:
        return joined_island(
            transport, model, optimizer, spec, mesh, seed=seed, steps=steps, callbacks=callbacks
        )
    _check(spec, transport.size, model, example)
    divided = DividedModel(model, spec, example, transport.rank)
    _keep_own(optimizer, divided.own)
    observer = RunObserver(transport.size, [transport.rank], callbacks=callbacks)
    coupling = LoopSession(
        transport, spec, divided.own, optimizer, observer, seed=seed, steps=steps,
        statistics_batches=0, processes=spec.shape.machines,
    )  # fmt: skip
    coupling.stages = divided.stages
    is_synchronous = coupling.session.is_synchronous
    notices = momentum_left_out(spec, optimizer, is_synchronous=is_synchronous)
    worker = StageLoopWorker(divided.own, optimizer, spec, coupling, seed, observer, notices)
    worker.divided = divided
    return worker


def _check(spec: MethodSpec, size: int, model: nn.Module, example: Any) -> None:
    shape, reason = spec.shape, None
    if shape.tensor > 1:
        reason = "PyTorch splits layers; give the mesh to gossamer.join, and leave out tensor="
    elif shape.is_asynchronous:
        reason = (
            "a loop gives one batch at a time, and a pipeline that is never emptied takes later "
            "ones early; use gossamer train, or a pipeline such as 1f1b"
        )
    elif spec.method.has_server:
        reason = "the stages of a loop have no servers; use gossamer train, or a method without"
    elif size % shape.machines:
        reason = f"{shape.machines} stages do not divide the {size} workers"
    elif isinstance(model, SeveralModels):
        reason = "stages are those of one model, got several; put them into one module"
    elif not isinstance(example, Tensor):
        reason = (
            "the model is cut by the work and the outputs of its parts, which are measured; give "
            "gossamer.join a batch as it enters the model, as example=inputs"
        )
    if reason is not None:
        raise ConfigurationError(f"{spec} in a loop of your own: {reason}")
    assert isinstance(example, Tensor)
    shape.microbatches_of(len(example))


def _keep_own(optimizer: torch.optim.Optimizer, own: nn.Module) -> None:
    """The optimiser of this process steps on its own stage only."""
    held = set(own.parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in held]


class DividedModel:
    """The whole model of the user, and which part of it each stage trains."""

    def __init__(self, whole: nn.Module, spec: MethodSpec, example: Tensor, rank: int) -> None:
        shape = self.shape = spec.shape
        self.whole, self.example = whole, example
        chunks = shape.stages * shape.per_machine
        cut = cut_model(whole, example[:2], chunks, shape.cuts)
        self.modules: Sequence[StageModule] = stage_modules(whole, cut)
        self.stages = [
            nn.ModuleList(m for m, at in zip(self.modules, shape.places, strict=True) if at == one)
            for one in range(shape.stages)
        ]
        self.own = self.stages[rank % shape.stages]
        self.chunks = {
            number: module
            for number, module in enumerate(self.modules)
            if shape.places[number] == rank % shape.stages
        }

    @torch.no_grad()
    def put(self, stage: int, value: Tensor, buffers: Untrained) -> None:
        """What another process has made of its stage."""
        parameters = [parameter for _, parameter in trainable(self.stages[stage])]
        pieces = value.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))
        buffers.load(self.stages[stage])


@dataclass
class ReplicaShare:
    """Who shares a loader out: replicas, which get equally many batches."""

    rank: int
    size: int
    store: Store
    group: tuple[int, ...] = ()
    is_synchronous: bool = True


class StageLoopWorker(JoinedWorker):
    """What a user's loop works with in a process that trains one stage."""

    divided: DividedModel
    _pipeline: EmptiedPipeline | None = None
    _loss: Loss | None = None

    @property
    def _session(self) -> IslandSession:
        assert self.coupling is not None
        return cast(IslandSession, self.coupling.session)

    def open(self) -> StageLoopWorker:
        super().open()
        assert self.coupling is not None
        divided, session = self.divided, self._session
        self._links = StageLinks(self.coupling.worker, session.driver, session.grouping)
        shape, example = divided.shape, divided.example
        microbatches = shape.microbatches_of(len(example))
        part = example[: len(example) // microbatches]
        borders = borders_of(divided.whole, divided.modules, part)
        self._pipeline = EmptiedPipeline(
            shape, microbatches, divided.chunks, borders, self._links, self._loss_of
        )
        self.coupling.before_end = self._fill
        self._passes_made = 0
        return self

    def _loss_of(self, output: Any, targets: Any) -> Tensor:
        assert self._loss is not None
        return self._loss(output, targets)

    def through_stages(self, inputs: Any, targets: Any, loss: Loss) -> Tensor:
        example = self.divided.example
        if not isinstance(inputs, Tensor) or inputs.shape != example.shape:
            got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ConfigurationError(
                f"worker.through_stages() takes batches like the example of gossamer.join, "
                f"{tuple(example.shape)}, got {got}; leave out a last batch that is smaller "
                "(drop_last=True)"
            )
        self._open_for("through_stages")
        if self._is_accumulating:
            raise ConfigurationError(
                "worker.through_stages() gives a whole gradient and cannot add up several inside "
                "worker.accumulate(); choose more micro-batches with microbatches="
            )
        assert self.coupling is not None
        assert self._pipeline is not None
        self._loss, links = loss, self._links
        waited = links.waited_s
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.coupling.last_words():
            with self.accumulate():  # the micro-batches add up; `step()` takes their mean
                found = self._pipeline.step(inputs, targets)
            found = self._told(found)
        self.coupling.has_waited(links.waited_s - waited)
        return found

    def _told(self, loss: Tensor | None) -> Tensor:
        """The stage that has the loss tells it to the others."""
        links, last = self._links, self.divided.shape.places[-1]
        tag = ("loss", self._passes_made)
        self._passes_made += 1
        if links.stage != last:
            return links.wait(links.receive(last, tag))
        assert loss is not None
        for stage in set(range(links.stages)) - {last}:
            links.send(stage, loss, tag)
        return loss

    def shard(self, loader: Iterable[T]) -> Iterable[T]:
        """This replica's part of a loader's batches. All its processes get the same ones, and all
        replicas equally many."""
        place = self._session.grouping
        share = ReplicaShare(place.number, place.ends, self._session.store)
        return shard_of(loader, share, self.seed, self._passes)

    # ------------------------------------------------------------------ the output

    @contextlib.contextmanager
    def consensus(self) -> Generator[nn.Module]:
        with super().consensus():
            if self.is_open:
                self._fill()
            yield self.divided.whole

    def _fill(self) -> None:
        """Put the output of the other stages into the whole model."""
        assert self.coupling is not None
        place, output = self._session.grouping, self.coupling.output
        for stage in self._others():
            is_own = self._session.method.output == "ensemble"
            found = output.of([place.group[stage]] if is_own else place.same_stage(stage))
            self.divided.put(stage, found.value, Untrained(found.buffers, found.counters))

    def _others(self) -> Iterator[int]:
        return (stage for stage in range(self.divided.shape.stages) if stage != self._links.stage)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._pipeline is not None:
                self._pipeline.close()
                self._pipeline = None

    def __exit__(self, kind: object, error: BaseException | None, *rest: object) -> None:
        super().__exit__(kind, error, *rest)
        if self._pipeline is not None:
            self._pipeline.close()
