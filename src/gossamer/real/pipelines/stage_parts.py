"""What each stage holds of a model, and whole models from what the stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.pipeline.stage_module import stage_modules
from gossamer.pipeline.stages import StageCut
from gossamer.real.output_model import Contribution
from gossamer.replica import Fragment
from gossamer.tasks.evaluator import Held
from gossamer.tasks.flat_model import FlatModel


class StageParts:
    """What each stage holds of the model: places in the flat vectors, and modules."""

    def __init__(self, model: FlatModel, cut: StageCut, places: Sequence[int]) -> None:
        """`places` says the stage of each chunk of the cut."""
        self.model, self.cut, self.places = model, cut, tuple(places)
        self.modules = stage_modules(model.module, cut)
        stages = max(places) + 1
        starts = [0, *accumulate(model.layout.sizes)][:-1]
        numbers: list[list[int]] = [[] for _ in range(stages)]
        for chunk, stage in enumerate(places):
            taken = {one.start for part in cut.chunks[chunk] for one in part.slices}
            numbers[stage] += [number for number, start in enumerate(starts) if start in taken]
        self._fragments = [Fragment.of_tensors(model.layout, own) for own in numbers]
        self.layouts = [one.layout for one in self._fragments]
        own = [
            {
                id(t)
                for chunk, at in enumerate(places)
                if at == stage
                for t in self.modules[chunk].buffers()
            }
            for stage in range(stages)
        ]
        held = [model.module.get_buffer(name) for name in model.buffer_layout.names]
        self._buffers = [[n for n, t in enumerate(held) if id(t) in mine] for mine in own]

    def of(self, whole: Tensor, stage: int) -> Tensor:
        """A stage's part of the flat vector."""
        return torch.cat([whole[place] for place in self._fragments[stage].places])

    def joined(
        self, workers: Sequence[Contribution], servers: Sequence[Contribution]
    ) -> Held:  # fmt: skip
        """The models of whole replicas, from what the stages of each hold, replica by replica."""
        stages = len(self.layouts)
        replicas = [workers[at : at + stages] for at in range(0, len(workers), stages)]
        values = torch.stack([self._whole([_scaled(o, one[0]) for o in one]) for one in replicas])
        buffers = torch.stack([self._whole_buffers([o.buffers for o in one]) for one in replicas])
        held: list[Tensor] = []
        if servers:
            every = [torch.cat([s.value for s in servers[at::stages]]) for at in range(stages)]
            held = [self._whole(every)]
        return Held(values, [one[0].weight for one in replicas], buffers, held)

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        whole = torch.empty(self.model.layout.total, dtype=parts[0].dtype)
        for fragment, part in zip(self._fragments, parts, strict=True):
            sizes = [place.stop - place.start for place in fragment.places]
            for place, piece in zip(fragment.places, part.split(sizes), strict=True):
                whole[place] = piece
        return whole

    def _whole_buffers(self, parts: Sequence[Tensor]) -> Tensor:
        whole = parts[0].clone()
        for own, part in zip(self._buffers, parts, strict=True):
            mine = list(self.model.buffer_layout.unpack(whole).values())
            theirs = list(self.model.buffer_layout.unpack(part).values())
            for number in own:
                mine[number].copy_(theirs[number])
        return whole


def _scaled(part: Contribution, first: Contribution) -> Tensor:
    """A stage's value with the push-sum weight of the first stage; most methods have none."""
    return part.value if part.weight == first.weight else part.value * (first.weight / part.weight)
