"""`worker.save` and `worker.restore`: a loop goes on where it was, with any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.methods import parse_method
from gossamer.real.join.checkpoints.loop_checkpoints import LoopCheckpoints
from gossamer.real.join.joined_worker import JoinedWorker, coupled
from gossamer.real.join.loader import Positions
from gossamer.real.transports.local import LocalTransport

EPOCHS = 4


class Loop:
    """A loop with a schedule and dropout, coupled or plain."""

    def __init__(self, method: str | None, seed: int = 0) -> None:
        Positions._orders = 0  # as in a process of its own, where its loader is the first
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if method is None:
            self.worker: JoinedWorker = gossamer.join(model, optimizer)
        else:
            self.worker = coupled(LocalTransport(), model, optimizer, parse_method(method))
        data = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
        self.loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True)

    def run(self, folder: Path, until: int) -> int:
        worker = self.worker
        begin = worker.restore(folder, schedule=self.schedule)
        with worker:
            for epoch in range(begin, until):
                for (batch,) in worker.shard(self.loader):
                    worker.own_optimizer.zero_grad()
                    worker.model(batch).square().mean().backward()
                    worker.step()
                self.schedule.step()
                worker.save(folder, epoch + 1, schedule=self.schedule)
        return begin

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.worker.model.parameters()])


@pytest.mark.parametrize("method", [None, "all_reduce", "diloco:period=4", "sync_server"])
def test_a_loop_in_two_pieces_ends_with_the_bits_of_one(method: str | None, tmp_path: Path) -> None:
    whole = Loop(method)
    assert whole.run(tmp_path / "whole", EPOCHS) == 0
    Loop(method).run(tmp_path / "parts", 2)
    again = Loop(method, seed=1)
    assert again.run(tmp_path / "parts", EPOCHS) == 2
    assert torch.equal(again.weights, whole.weights)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    Loop("all_reduce").run(tmp_path, EPOCHS)
    assert LoopCheckpoints(tmp_path).complete() == {EPOCHS - 1: 1, EPOCHS: 1}
    assert sorted(one.name for one in tmp_path.rglob("*.pt")) == ["0-of-1.pt"] * 2


def test_a_checkpoint_counts_when_all_workers_have_written(tmp_path: Path) -> None:
    """And what is left of one that does not is deleted, before it completes a later one."""
    Loop("all_reduce").run(tmp_path, 2)
    (tmp_path / "3").mkdir()
    for name in ("0-of-2.pt", ".1-of-2.pt.ab12", "1-of-2.txt"):
        (tmp_path / "3" / name).write_bytes(b"half")
    loop = Loop("all_reduce")
    assert loop.worker.restore(tmp_path, schedule=loop.schedule) == 2
    assert not (tmp_path / "3" / "0-of-2.pt").exists()


def test_another_number_of_workers_begins_with_the_mean(tmp_path: Path) -> None:
    """Two files that were written by one worker each stand for a checkpoint of two."""
    models: list[torch.Tensor] = []
    for rank in range(2):
        loop = Loop("all_reduce", seed=rank)
        loop.run(tmp_path / str(rank), 1)
        models.append(loop.weights)
        place = tmp_path / "both" / "1"
        place.mkdir(parents=True, exist_ok=True)
        (tmp_path / str(rank) / "1" / "0-of-1.pt").rename(place / f"{rank}-of-2.pt")
    again = Loop("all_reduce")
    assert again.worker.restore(tmp_path / "both", schedule=again.schedule) == 1
    assert torch.allclose(again.weights, torch.stack(models).mean(0))
    again.run(tmp_path / "both", 3)
    assert LoopCheckpoints(tmp_path / "both").complete() == {1: 2, 2: 1, 3: 1}


def test_models_that_are_never_averaged_need_as_many_workers(tmp_path: Path) -> None:
    Loop("ensemble").run(tmp_path, 1)
    (tmp_path / "1" / "0-of-1.pt").rename(tmp_path / "1" / "0-of-2.pt")
    (tmp_path / "1" / "1-of-2.pt").write_bytes((tmp_path / "1" / "0-of-2.pt").read_bytes())
    loop = Loop("ensemble")
    with pytest.raises(ConfigurationError, match="start 2 workers"):
        loop.worker.restore(tmp_path, schedule=loop.schedule)


@pytest.mark.parametrize(
    ("given", "words"), [({}, "has schedule"), ({"scaler": None}, "scaler, schedule too")]
)
def test_what_was_saved_must_be_restored(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    Loop("all_reduce").run(tmp_path, 1)
    with pytest.raises(ConfigurationError, match=words):
        Loop("all_reduce").worker.restore(tmp_path, **given)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    Loop("all_reduce").run(tmp_path, 1)
    (tmp_path / "1" / "0-of-1.pt").write_bytes(b"nothing")
    loop = Loop("all_reduce")
    with pytest.raises(ConfigurationError, match=r"0-of-1\.pt cannot be read"):
        loop.worker.restore(tmp_path, schedule=loop.schedule)


def test_a_number_below_one_is_refused(tmp_path: Path) -> None:
    loop = Loop("all_reduce")
    with loop.worker, pytest.raises(ConfigurationError, match="number"):
        loop.worker.save(tmp_path, 0)
