"""The part of a model that one machine of a pipeline runs, as a module of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from gossamer.pipeline.chain import Part, chain_of
from gossamer.pipeline.stages import StageCut


class StageModule(nn.Module):
    """Some parts of a chain, one after the other. It holds the very modules of the whole model."""

    def __init__(self, whole: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        parameters = dict(whole.named_parameters())
        for name in (name for part in parts for name in part.owns):
            own = name.replace(".", "_")
            if name in parameters:
                self.register_parameter(own, parameters[name])
            else:
                self.add_module(own, whole.get_submodule(name))

    def forward(self, value: Any) -> Any:
        for part in self.parts:
            value = part.run(value)
        return value


class StageCall(nn.Module):
    """A stage as a function of weights: parts may use parameters of the whole model by its own
    names, so `functional_call` must replace them there."""

    def __init__(self, whole: nn.Module, stage: StageModule) -> None:
        super().__init__()
        self._whole = whole
        self._parts = stage.parts

    def given(self, weights: Mapping[str, Tensor], value: Any) -> Any:
        """What the stage makes of a value, with weights by their names in the whole model."""
        named = {f"_whole.{name}": tensor for name, tensor in weights.items()}
        return functional_call(self, named, (value,))

    def forward(self, value: Any) -> Any:
        for part in self._parts:
            value = part.run(value)
        return value


def stage_modules(whole: nn.Module, cut: StageCut) -> list[StageModule]:
    """One module for each chunk of a model that has been cut."""
    parts = iter(chain_of(whole))
    return [StageModule(whole, [next(parts) for _ in chunk]) for chunk in cut.chunks]
