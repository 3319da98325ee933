"""One worker of three leaves its loop before the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch

import gossamer
from join_cases import assert_close, batch, digest, loss_of, net, train

LEAVER = 1
FEW, ALL = 3, 12


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def case_of_leaving_early(rank: int) -> dict[str, object]:
    """With one step fewer than the others, or many."""
    model = net(rank)
    with gossamer.join(model, optimizer_of(model), steps=ALL) as worker:
        train(worker, FEW if rank == LEAVER else ALL)
    return {"digest": digest(model)}


def case_of_means_without_a_leaver(rank: int) -> dict[str, object]:
    """Every step takes the mean of those who make it."""
    model, alone = net(rank), net(0)
    with gossamer.join(model, optimizer_of(model)) as worker:
        train(worker, FEW if rank == LEAVER else ALL)
    other = optimizer_of(alone)
    for step in range(ALL):
        members = [member for member in range(3) if step < FEW or member != LEAVER]
        parts = [batch(member, step) for member in members]
        other.zero_grad()
        loss_of(alone, *(torch.cat(both) for both in zip(*parts, strict=True))).backward()
        other.step()
    assert_close(model, alone)
    return {"digest": digest(model)}


def case_of_means_by_messages(rank: int) -> dict[str, object]:
    os.environ["GOSSAMER_REDUCTION"] = "messages"
    return case_of_means_without_a_leaver(rank)


def _wait_for(file: Path) -> None:
    until = time.monotonic() + 100
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)


def case_of_asking_a_leaver(rank: int) -> dict[str, object]:
    """It says so where others ask whom it waits for; they wait until it has been asked."""
    asked = Path(os.environ["JOIN_FOLDER"]) / "asked"
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.touch())
    model = net(rank)
    with gossamer.join(model, optimizer_of(model)) as worker:
        train(worker, FEW)

        def ask() -> None:
            while rank not in worker.coupling.session.router.members.left:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGUSR1)

        if rank == LEAVER:
            threading.Thread(target=ask, daemon=True).start()
        else:
            _wait_for(asked)
            train(worker, 1, FEW)
    return {"digest": digest(model)}


def case_of_a_failure_that_is_caught(rank: int) -> dict[str, object]:
    """The loop of one raises, and its process lives on until the others are done."""
    place = Path(os.environ["JOIN_FOLDER"])
    model = net(rank)
    try:
        with gossamer.join(model, optimizer_of(model)) as worker:
            train(worker, FEW)
            if rank == LEAVER:
                raise ValueError("no more")
            train(worker, ALL - FEW, FEW)
    except ValueError:
        _wait_for(place / "done 0")
        _wait_for(place / "done 2")
        return {}
    (place / f"done {rank}").touch()
    return {"digest": digest(model)}
