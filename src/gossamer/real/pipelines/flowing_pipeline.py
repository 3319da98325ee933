"""Pipelines that are never emptied: while a batch goes back, later ones come forward.

Stage s of K, in the steady state, for micro-batch b:

    forward pass of micro-batch b + K - 1 - s, with the weights that its step is to use there
    backward pass of micro-batch b, with the weights of its own forward pass

So the graph of each forward pass is the stash of its weights. `pipedream` uses the weights that the
stage has when a batch comes, `vertical_sync` those of one moment in all stages, `2bw` those of one
step before. `ampnet` and `pipemare` keep no old weights: of a forward pass they keep what came into
each part of the stage, and the backward pass computes the parts again with newer weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.pipeline.stage_module import StageCall
from gossamer.real.pipelines.stage_links import StageLinks

Weights = Mapping[str, Tensor]


class StageStep(NamedTuple):
    """A step that is known to come."""

    number: int
    inputs: tuple[Any, ...]
    """Of each micro-batch, as they enter the model."""
    targets: tuple[Any, ...]


class Stashed(NamedTuple):
    """A forward pass whose backward pass is to come."""

    given: Tensor
    made: Tensor
    """What the next stage has got, or the loss."""
    weights: Weights


class FlowingPipeline:
    """One stage of a pipeline with weight stashing."""

    def __init__(
        self, stage: StageCall, lag: int, microbatches: int, links: StageLinks,
        loss: Callable[[Any, Any], Tensor], before: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """`lag` is how many steps old the weights of this stage are at its gradients; `before` is
        called before the forward pass of a step's micro-batch."""
        self._stage, self._lag, self._microbatches = stage, lag, microbatches
        self._links, self._loss, self._before = links, loss, before
        self._behind = links.stages - 1 - links.stage
        self._versions: dict[int, Weights] = {}
        self._stash: dict[int, Stashed] = {}
        self._next = 0
        """The micro-batch, counted over all steps, whose forward pass comes next."""
        self.most_stashed = 1
        """The most versions of the weights that were kept at one time."""

    @property
    def versions(self) -> int:
        """How many versions of the weights are kept now."""
        held = [*self._versions.values(), *(one.weights for one in self._stash.values())]
        return len({id(one) for one in held})

    def step(self, weights: Weights, steps: list[StageStep]) -> tuple[list[Tensor], Tensor | None]:
        """The mean gradient of the first of these steps, and its loss in the last stage. `weights`
        are those after all steps before it."""
        now, size = steps[0].number, self._microbatches
        self._versions[now] = weights
        for old in [number for number in self._versions if number < now - self._lag]:
            del self._versions[old]
        known = {step.number: step for step in steps}
        total: list[Tensor] = []
        losses: list[Tensor] = []
        for number in range(now * size, (now + 1) * size):
            while self._next <= number + self._behind and self._next // size in known:
                self._forward(known[self._next // size])
            gradients, made = self._backward(number)
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
            losses.append(made)
        if size > 1:
            total = [one / size for one in total]
        is_last = not self._behind
        return total, torch.stack(losses).mean() if is_last else None

    def _forward(self, step: StageStep) -> None:
        number, links = self._next, self._links
        self._next += 1
        within = number % self._microbatches
        weights = self._versions[max(min(self._versions), step.number - self._lag)]
        given = step.inputs[within]
        if links.stage:
            given = links.wait(links.receive(links.stage - 1, ("forward", number)))
            given.requires_grad_(given.is_floating_point())
        self._before(step.number, within)
        made = self._stage.given(weights, given)
        if self._behind:
            links.send(links.stage + 1, made.detach(), ("forward", number))
        else:
            made = self._loss(made, step.targets[within])
        self._stash[number] = Stashed(given, made, weights)
        self.most_stashed = max(self.most_stashed, self.versions)

    def _backward(self, number: int) -> tuple[list[Tensor], Tensor]:
        links, behind = self._links, None
        if self._behind:
            behind = links.wait(links.receive(links.stage + 1, ("backward", number)))
        given, made, weights = self._stash.pop(number)
        wanted = [*weights.values(), *([given] if links.stage else [])]
        found = list(
            torch.autograd.grad(made, wanted, behind, allow_unused=True, materialize_grads=True)
        )
        if links.stage:
            links.send(links.stage - 1, found.pop(), ("backward", number))
        return found, made.detach()


class Passed(NamedTuple):
    """A forward pass of which no graph is kept."""

    step: int
    values: Sequence[Tensor]
    """What came into each part of the stage."""


class UnstashedPipeline(FlowingPipeline):
    """A stage, not the last, of a pipeline whose backward passes meet newer weights than its
    forward passes did."""

    def __init__(
        self, whole: nn.Module, parts: Sequence[StageCall], lag: int, links: StageLinks,
        loss: Callable[[Any, Any], Tensor], before: Callable[[int, int], None], *,
        is_corrected: bool, progress: Callable[[int], float],
    ) -> None:  # fmt: skip
        """`parts` are those of the stage, one by one. PipeMare is corrected: it estimates the
        weights of the forward pass from how the weights have moved of late, and divides early
        gradients; `progress` says how far the run is at a step."""
        super().__init__(parts[0], lag, 1, links, loss, before)
        self._whole, self._parts = whole, parts
        self._is_corrected, self._progress = is_corrected, progress
        self._passed: dict[int, Passed] = {}
        self._drift: dict[str, Tensor] = {}

    def step(self, weights: Weights, steps: list[StageStep]) -> tuple[list[Tensor], Tensor | None]:
        number = steps[0].number
        self._now = self._corrected(weights, number) if self._is_corrected else weights
        gradients, loss = super().step(weights, steps)
        if self._is_corrected:
            damping = (self._lag + 1) ** (1 - min(1.0, 4 * self._progress(number)))
            gradients = [one / damping for one in gradients]
        return gradients, loss

    def _corrected(self, weights: Weights, number: int) -> Weights:
        before, kept = self._versions.get(number - 1), 0.5 ** (1 / self._lag)
        with torch.no_grad():
            for name, weight in weights.items():
                old = self._drift.get(name, torch.zeros_like(weight))
                moved = old if before is None else weight - before[name]
                self._drift[name] = old if before is None else kept * old + (1 - kept) * moved
        return {
            name: (weight - self._lag * self._drift[name]).detach().requires_grad_()
            for name, weight in weights.items()
        }

    @torch.no_grad()
    def _forward(self, step: StageStep) -> None:
        number, links = self._next, self._links
        self._next += 1
        weights = self._versions[max(min(self._versions), step.number - self._lag)]
        value = step.inputs[0]
        if links.stage:
            value = links.wait(links.receive(links.stage - 1, ("forward", number)))
        self._before(step.number, 0)
        values: list[Tensor] = []
        for part in self._parts:
            values.append(value)
            value = part.given(weights, value)
        links.send(links.stage + 1, value, ("forward", number))
        self._passed[number] = Passed(step.number, values)

    def _backward(self, number: int) -> tuple[list[Tensor], Tensor]:
        links = self._links
        back = links.wait(links.receive(links.stage + 1, ("backward", number)))
        step, values = self._passed.pop(number)
        self._before(step, 0)
        # Statistics were taken by the forward pass.
        buffers = {name: one.clone() for name, one in self._whole.named_buffers()}
        weights = self._now
        total = [torch.zeros_like(one) for one in weights.values()]
        for part, value in zip(reversed(self._parts), reversed(values), strict=True):
            value = value.detach()
            is_trained = value.is_floating_point()
            if is_trained:
                value.requires_grad_()
            made = part.given({**weights, **buffers}, value)
            wanted = [*weights.values(), *([value] if is_trained else [])]
            found = list(
                torch.autograd.grad(made, wanted, back, allow_unused=True, materialize_grads=True)
            )
            back = found.pop() if is_trained else back
            total = [a + b for a, b in zip(total, found, strict=True)]
        if links.stage:
            links.send(links.stage - 1, back, ("backward", number))
        return total, torch.zeros(())
