"""Loops whose gradients are reduced in parts while backward goes on; see `test_buckets.py`."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.errors import ProtocolError
from gossamer.methods import METHODS
from gossamer.pending import gather
from gossamer.real.join import gradient, loop_session
from gossamer.replica import Replica
from gossamer.rules import join_buckets
from gossamer.worker import Worker
from join_cases import batch, digest, loss_of
from join_habits import refusal

STEPS = 12
PARTS = 3
Between = Callable[[gossamer.JoinedWorker, int], object]
"""What a loop does between backward and `step()`."""


class Forked(nn.Module):
    """Three layers in a row, of which a batch may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 2)
        self.is_short = False

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.first(inputs).tanh()
        return self.third(inner if self.is_short else self.second(inner).tanh())


def nothing(worker: gossamer.JoinedWorker, step: int) -> None:
    """As most loops do."""


def loop(
    rank: int, between: Between = nothing, *, backward: Callable[..., object] | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, steps: int = STEPS,
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train, and tell with how many parts on their way each step was entered."""
    gradient._BYTES = 60  # the bytes of a layer, about
    model = Forked()
    optimizer = make(model.parameters(), lr=0.1)
    sent: list[int] = []
    with gossamer.join(model, optimizer) as worker:
        assert worker.coupling is not None
        for step in range(steps):
            optimizer.zero_grad()
            if backward is None:
                loss_of(model, *batch(rank, step)).backward()
            else:
                backward(worker, step)
            between(worker, step)
            gradients = worker.coupling.gradients
            sent.append(gradients._sent if gradients._promised else 0)
            worker.step(scaler)
            if scaler is not None:
                scaler.update()
        exchanges = worker.coupling.session.metrics.exchanges
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    return {"digest": digest(model), "sent": sent, "exchanges": exchanges}


def case_of_parts(rank: int) -> dict[str, Any]:
    return loop(rank)


def case_of_parts_with_adam(rank: int) -> dict[str, Any]:
    return loop(rank, make=torch.optim.Adam)


def case_of_a_combined_clip(rank: int) -> dict[str, Any]:
    return loop(rank, lambda worker, step: worker.clip_grad_norm_(0.3, scope="global"))


def case_of_a_clip(rank: int) -> dict[str, Any]:
    return loop(rank, lambda worker, step: worker.clip_grad_norm_(0.3))


def case_of_one_who_clips_once(rank: int) -> dict[str, Any]:
    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        if (rank, step) == (1, 4):
            worker.clip_grad_norm_(0.3)

    return loop(rank, between)


def case_of_two_backward_passes(rank: int) -> dict[str, Any]:
    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        loss_of(worker.model, *batch(rank, 100 + step)).backward()

    return loop(rank, between)


def case_of_accumulating(rank: int) -> dict[str, Any]:
    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        with worker.accumulate():
            loss_of(worker.model, *batch(rank, 100 + step)).backward()
            worker.step()
        loss_of(worker.model, *batch(rank, step)).backward()

    return loop(rank, backward=backward)


def case_of_a_gradient_replaced(rank: int) -> dict[str, Any]:
    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        for parameter in worker.model.parameters():
            if step > 1 and parameter.grad is not None:
                parameter.grad = parameter.grad.sign()

    return loop(rank, between)


def case_of_a_batch_left_out(rank: int) -> dict[str, Any]:
    """One worker finds a batch bad after backward, and takes another."""

    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        if (rank, step) == (0, 3):
            worker.optimizer.zero_grad()
            loss_of(worker.model, *batch(rank, 100 + step)).backward()

    return loop(rank, between)


def case_of_a_layer_left_out(rank: int) -> dict[str, Any]:
    """By one worker, now and then: the parts behind it wait for the step."""

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        worker.model.is_short = rank == 1 and step % 3 == 0
        loss_of(worker.model, *batch(rank, step)).backward()

    return loop(rank, backward=backward)


def change_data(worker: gossamer.JoinedWorker, limit: float) -> None:
    for parameter in worker.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-limit, limit)


def case_of_data_changed(rank: int) -> dict[str, Any]:
    return loop(rank, lambda worker, step: change_data(worker, 0.01))


def case_of_data_changed_late(rank: int) -> dict[str, Any]:
    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        if step > 1:
            change_data(worker, 1e-4)

    return {"said": refusal(lambda: loop(rank, between, steps=40))}


def case_of_no_numbers(rank: int) -> dict[str, Any]:
    """A run that has diverged goes on, as it would with gradients in one piece."""

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        factor = float("nan") if step > 2 else 1.0
        (factor * loss_of(worker.model, *batch(rank, step))).backward()

    return loop(rank, backward=backward)


def case_of_a_change_before_sending(rank: int) -> dict[str, Any]:
    """What torch does not count is harmless where nothing was sent: the last layer has no gradient,
    and its part is the first."""

    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        if step > 1:
            change_data(worker, 1e-4)

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        inputs, _ = batch(rank, step)
        worker.model.second(worker.model.first(inputs)).square().mean().backward()

    return loop(rank, between, backward=backward)


def case_of_memory(rank: int) -> dict[str, Any]:
    """Whoever reduces at the end keeps nothing of what was sent in the step before."""
    seen: list[Any] = []

    def between(worker: gossamer.JoinedWorker, step: int) -> None:
        worker.clip_grad_norm_(0.3)
        assert not any(gradient() is not None for gradient in seen)
        seen[:] = [weakref.ref(parameter.grad) for parameter in worker.model.parameters()]

    return loop(rank, between)


def case_of_one_who_cannot(rank: int) -> dict[str, Any]:
    """Then nobody sends parts: all must do alike."""
    if rank == 1:
        loop_session.can_send_buckets = lambda binding, transport: False
    return loop(rank)


def case_of_going_on_stale(rank: int) -> dict[str, Any]:
    """With a mean on its way that is applied before that of the first gradient is awaited."""
    gradient._BYTES = 60
    model = Forked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = sum(parameter.numel() for parameter in model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    worker = gossamer.join(model, optimizer)
    worker.load_state_dict({
        "method": str(worker.method), "rank": rank, "size": worker.size, "passes": [],
        "step": 1, "weight": 1.0, "version": 1, "value": flat, "servers": {},
        "memory": {"0": torch.full((count,), 0.1 * (rank + 1))},
        "random": json.dumps(random.Random(0).getstate()),
    })  # fmt: skip
    with worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(rank, step)).backward()
            worker.clip_grad_norm_(0.3)
            worker.step()
    return {"digest": digest(model)}


def case_of_a_scaler(rank: int) -> dict[str, Any]:
    """Unscaling by 1 changes nothing, and by 2 it does; torch counts neither as a change."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=3)

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        scaler.scale(loss_of(worker.model, *batch(rank, step))).backward()

    return loop(rank, backward=backward, scaler=scaler)


def case_of_unscaling(rank: int) -> dict[str, Any]:
    """By the loop itself, which then makes a step of ordinary gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        scaler.scale(loss_of(worker.model, *batch(rank, step))).backward()
        scaler.unscale_(worker.optimizer)
        scaler.update()

    return loop(rank, backward=backward)


def case_of_an_end_after_backward(rank: int) -> dict[str, Any]:
    """The loop is left with parts on their way that no step follows."""
    gradient._BYTES = 60
    model = Forked()
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        for step in range(STEPS):
            worker.optimizer.zero_grad()
            loss_of(model, *batch(rank, step)).backward()
            if step < STEPS - 1:
                worker.step()
    return {"digest": digest(model)}


def case_of_a_death_in_backward(rank: int) -> dict[str, Any]:
    """Worker 1 is killed when its first part is on its way and its last is not made yet."""

    def backward(worker: gossamer.JoinedWorker, step: int) -> None:
        if (rank, step) == (1, 5):
            first = next(worker.model.parameters())
            first.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        loss_of(worker.model, *batch(rank, step)).backward()

    return loop(rank, backward=backward)


async def awaits_a_part(w: Worker, x: Replica) -> None:
    """Wrong: the mean of a part before the gradient."""
    for _ in w.steps():
        gradient = w.gradient(x)
        means = [await w.all_reduce(await bucket) for bucket in gradient.buckets()]
        await gradient
        x.descend_(join_buckets(means))


async def changes_a_part(w: Worker, x: Replica) -> None:
    """Wrong: what is made of a part is sent before the gradient stands."""
    for _ in w.steps():
        gradient = w.gradient(x)
        means = [w.all_reduce((await bucket) * 0.5) for bucket in gradient.buckets()]
        await gradient
        x.descend_(join_buckets(await gather(means)))


def said_of(method: Callable[..., Any], rank: int) -> dict[str, Any]:
    """What its author is told at the first step."""
    METHODS["all_reduce"] = dataclasses.replace(METHODS["all_reduce"], worker=method)
    try:
        loop(rank, steps=1)
    except ProtocolError as error:
        return {"said": str(error)}
    return {"said": ""}


def case_of_awaiting_a_part(rank: int) -> dict[str, Any]:
    return said_of(awaits_a_part, rank)


def case_of_changing_a_part(rank: int) -> dict[str, Any]:
    return said_of(changes_a_part, rank)
