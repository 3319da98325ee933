"""Pipelines that are emptied at every step: PyTorch's own schedules and stages run them.

Its runtime wants a process group. The one here has as many members as the replica has processes,
and its messages are those of the worker, so that links, deaths and books are those of every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from gossamer.errors import ConfigurationError
from gossamer.pending import Pending
from gossamer.pipeline.shape import ReplicaShape
from gossamer.pipeline.stage_module import StageModule
from gossamer.real.pipelines.stage_links import StageLinks
from gossamer.worker import Message

_dist: Any = dist  # not all of what its documentation names is declared public
_ENGINES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS", "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV",
}  # fmt: skip
_BACKEND = "gossamer"
_links: list[StageLinks] = []
"""Those of the process group that is made next."""


class _Arrival(_dist._Work):
    """A message that PyTorch's runtime waits for."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    def wait(self, timeout: Any = None) -> bool:
        self._settle()
        return True


class _StageGroup(_dist.ProcessGroup):
    """Sends and receives, which is all that a pipeline needs of a process group."""

    def __init__(self, links: StageLinks) -> None:
        super().__init__(links.stage, links.stages)
        self._links = links

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Arrival:
        self._links.send(to, tensors[0].detach(), f"pipeline {tag}")
        return _Arrival(lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Arrival:
        # Posted now, because the runtime may wait for later messages first.
        message: Pending[Message] = self._links.receive(source, f"pipeline {tag}")
        room = tensors[0].detach()
        return _Arrival(lambda: cast(None, room.copy_(self._links.wait(message))))

    def getBackendName(self) -> str:
        return _BACKEND


def _made_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _StageGroup(_links[-1])


class EmptiedPipeline:
    """The chunks of this process, and the schedule that runs them."""

    def __init__(
        self, shape: ReplicaShape, microbatches: int, chunks: Mapping[int, nn.Module],
        borders: Sequence[Tensor], links: StageLinks, loss: Callable[[Any, Any], Tensor],
    ) -> None:  # fmt: skip
        """`borders` are a micro-batch as it enters the first chunk, and what each chunk makes of
        it; their values do not matter."""
        self._join(links)
        last = len(borders) - 2
        stages = [
            pipelining.PipelineStage(
                module, number, len(borders) - 1, torch.device("cpu"),
                input_args=_room(borders[number], is_trained=number > 0),
                output_args=_room(borders[number + 1], is_trained=True),
            )
            for number, module in chunks.items()
        ]  # fmt: skip
        self._is_first, self._is_last = 0 in chunks, last in chunks
        made: Any = getattr(schedules, _ENGINES[shape.pipeline])
        has_several = shape.per_machine > 1
        try:
            self._schedule = made(stages if has_several else stages[0], microbatches, loss_fn=loss)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"pipeline {shape.pipeline} cannot run {microbatches} micro-batches on "
                f"{shape.stages} stages: {error}; choose other microbatches"
            ) from None

    @staticmethod
    def _join(links: StageLinks) -> None:
        if dist.is_initialized():
            raise ConfigurationError(
                "this process has called torch.distributed.init_process_group, which the stages of "
                "a replica need for themselves; leave that call out"
            )
        _links.append(links)
        if _BACKEND not in _dist.Backend.backend_list:
            _dist.Backend.register_backend(_BACKEND, _made_group, devices=["cpu"])
        dist.init_process_group(
            _BACKEND, rank=links.stage, world_size=links.stages, store=_dist.HashStore()
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Leave the mean gradient of the micro-batches in the parameters. Returns the loss, where
        the last chunk is."""
        losses: list[Tensor] = []
        given = (inputs,) if self._is_first else ()
        wanted = {"target": targets, "losses": losses} if self._is_last else {}
        self._schedule.step(*given, **wanted)
        return torch.stack(losses).mean().detach() if losses else None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _room(example: Tensor, *, is_trained: bool) -> Tensor:
    return torch.empty_like(example).requires_grad_(is_trained and example.is_floating_point())


def borders_of(whole: nn.Module, modules: Sequence[StageModule], value: Any) -> list[Tensor]:
    """A micro-batch as it enters the model, and what each chunk makes of it."""
    found = [value]
    was_training = whole.training
    whole.eval()
    with torch.no_grad():
        for module in modules:
            value = module(value)
            if not isinstance(value, Tensor):
                raise ConfigurationError(
                    f"the stage that ends with {module.parts[-1].name} passes on a "
                    f"{type(value).__name__}, and stages of real workers pass on one tensor; cut "
                    "elsewhere with cut="
                )
            found.append(value)
    whole.train(was_training)
    return found
