"""Loops whose batches follow the speeds of the workers; `test_balanced_loops.py` compares them.

Speeds are told instead of measured, so that the shares are the same on every machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.real.join.balance import BalancedPositions
from gossamer.real.join.joined_worker import JoinedWorker
from join_cases import loss_of, net

SLOWNESS = (4.0, 1.0, 1.5, 1.0)
BATCH = 8
SAMPLES = 190
RATE = 0.05


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), inputs, inputs[:, :2] * 3 - 1)


def tell_speeds() -> None:
    """A step of a sample takes a second of the fastest worker."""

    def measured(self: BalancedPositions, number: int, samples: int, seconds: float) -> None:
        assert seconds > 0
        self._times.add(number, samples, samples * SLOWNESS[self.coupled.rank])

    BalancedPositions.measured = measured  # type: ignore[method-assign]


class Trained:
    """What a loop saw, by step: the samples of its batch, and how they were shared out."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.shares: list[list[int]] = []

    def loop(self, worker: JoinedWorker, loader: Any, *, epochs: int = 1, most: int = 999) -> None:
        for _ in range(epochs):
            for numbers, inputs, targets in loader:
                if len(self.seen) == most:
                    return
                self.note(loader, numbers)
                worker.optimizer.zero_grad()
                loss_of(worker.model, inputs, targets).backward()
                worker.step()

    def note(self, loader: Any, numbers: Tensor) -> None:
        self.seen.append(numbers.tolist())
        self.shares.append([loader.shares.get(rank, 0) for rank in range(4)])

    def told(self, worker: JoinedWorker) -> dict[str, Any]:
        values = torch.cat([p.detach().reshape(-1) for p in worker.model.parameters()])
        return {"seen": self.seen, "shares": self.shares, "parameters": values.tolist()}


def joined(rank: int) -> JoinedWorker:
    tell_speeds()
    model = net(rank)
    return gossamer.join(model, torch.optim.SGD(model.parameters(), lr=RATE))


def case_of_balance(
    rank: int, ahead: int = 0, last: bool = False, most: int = 999
) -> dict[str, Any]:
    """Three passes; what the loader has read ahead when a pass is left counts for nothing."""
    trained = Trained()
    with joined(rank) as worker:
        ahead = ahead if rank != 1 else 0  # not everybody's loader reads ahead
        loader = DataLoader(data(), BATCH, shuffle=True, drop_last=not last, num_workers=ahead)
        own = worker.shard(loader)
        assert len(own) == len(loader) // worker.size
        assert own.batch_size == BATCH  # type: ignore[attr-defined]
        trained.loop(worker, own, most=most)
        trained.loop(worker, own, epochs=2)
    return trained.told(worker)


def case_of_balance_read_ahead(rank: int) -> dict[str, Any]:
    return case_of_balance(rank, ahead=2, most=7)


def case_of_balance_with_a_small_last_batch(rank: int) -> dict[str, Any]:
    return case_of_balance(rank, last=True)


def case_of_balance_and_leaving(rank: int) -> dict[str, Any]:
    """Worker 2 leaves in the second pass."""
    trained = Trained()
    with joined(rank) as worker:
        own = worker.shard(DataLoader(data(), BATCH, shuffle=True))
        if rank == 2:
            trained.loop(worker, own, epochs=2, most=12)
        else:
            trained.loop(worker, own, epochs=4)
    return trained.told(worker)


def case_of_balance_accumulated(rank: int) -> dict[str, Any]:
    """A step for every two batches."""
    trained = Trained()
    with joined(rank) as worker:
        own = worker.shard(DataLoader(data(), BATCH, shuffle=True))
        for _ in range(3):
            for number, (numbers, inputs, targets) in enumerate(own):
                trained.note(own, numbers)
                loss = loss_of(worker.model, inputs, targets) / 2
                if number % 2 == 0:
                    with worker.accumulate():
                        loss.backward()
                        worker.step()
                else:
                    loss.backward()
                    worker.step()
                    worker.optimizer.zero_grad()
    return trained.told(worker)


def case_of_balance_saved(rank: int) -> dict[str, Any]:
    """Two passes, saved, two more; and those two again from what was saved."""
    path = Path(os.environ["JOIN_FOLDER"]) / f"balance-{rank}.pt"
    loader = DataLoader(data(), BATCH, shuffle=True)
    first, second = Trained(), Trained()
    with joined(rank) as worker:
        first.loop(worker, worker.shard(loader), epochs=2)
        torch.save([worker.state_dict(), worker.model.state_dict()], path)
        second.loop(worker, worker.shard(loader), epochs=2)
    return second.told(worker)


def case_of_balance_loaded(rank: int) -> dict[str, Any]:
    state, model = torch.load(Path(os.environ["JOIN_FOLDER"]) / f"balance-{rank}.pt")
    worker, again = joined(rank), Trained()
    worker.model.load_state_dict(model)
    worker.load_state_dict(state)
    with worker:
        again.loop(worker, worker.shard(DataLoader(data(), BATCH, shuffle=True)), epochs=2)
    return again.told(worker)


def case_of_balance_refused(rank: int) -> dict[str, Any]:
    with joined(rank) as worker:
        for loader, what in (
            ([torch.zeros(2)] * 9, "this list does not say which samples"),
            (DataLoader(data(), batch_size=None), "this DataLoader does not say which samples"),
        ):
            with pytest.raises(gossamer.errors.ConfigurationError, match=what):
                worker.shard(loader)  # type: ignore[arg-type]
        _, inputs, targets = data()[:BATCH]
        loss_of(worker.model, inputs, targets).backward()
        with pytest.raises(gossamer.errors.ConfigurationError, match="had none of them; loop over"):
            worker.step()
        trained = Trained()
        trained.loop(worker, worker.shard(DataLoader(data(), BATCH)))
    return trained.told(worker)
