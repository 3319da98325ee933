"""How a user's loop ends: by an error, by Ctrl-C, or to go on later from a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch

import gossamer
from join_cases import digest, net, train


def case_of_a_failing_loop(rank: int) -> dict[str, object]:
    """Worker 1's loop raises; its model stays readable."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer) as worker:
        train(worker, 2)
        if rank == 1:
            raise ValueError("worker 1 has had enough")
        train(worker, 6, 2)
        until = time.monotonic() + 100
        while 1 in worker.coupling.session.router.live and time.monotonic() < until:
            time.sleep(0.01)
        assert 1 not in worker.coupling.session.router.live
        train(worker, 2, 8)
    return {"digest": digest(model)}


def case_of_ctrl_c(rank: int) -> dict[str, object]:
    """Worker 0 is interrupted while it waits in step() for worker 1, which is in no hurry."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with gossamer.join(model, optimizer) as worker:
            train(worker, 1)
            if rank == 1:
                # Worker 0 would no longer wait for somebody who has left before it.
                until = time.monotonic() + 100
                while 0 in worker.coupling.session.router.live and time.monotonic() < until:
                    time.sleep(0.01)
                signal.raise_signal(signal.SIGINT)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            train(worker, 1, 1)
        raise AssertionError("nobody interrupted")
    except KeyboardInterrupt:
        pass
    return {"finite": all(bool(p.isfinite().all()) for p in model.parameters())}


def case_of_leaving(rank: int) -> dict[str, object]:
    """Averages are under way when the loop ends."""
    model = net(rank)
    with gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.05)) as worker:
        train(worker, 40)
    return {"digest": digest(model)}


# ---------------------------------------------------------------------- checkpoints


def _file(rank: int) -> Path:
    return Path(os.environ["JOIN_FOLDER"]) / f"checkpoint-{rank}.pt"


def case_of_saving(rank: int, steps: int = 3) -> dict[str, object]:
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.join(model, optimizer) as worker:
        train(worker, steps)
        state = (model.state_dict(), optimizer.state_dict(), worker.state_dict())
        torch.save(state, _file(rank))
        assert _file(rank).stat().st_size < 30_000  # the model, not the memory that it lies in
    return {"digest": digest(model)}


def case_of_no_interruption(rank: int) -> dict[str, object]:
    return case_of_saving(rank, 6)


def case_of_loading(rank: int) -> dict[str, object]:
    model = net(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for_model, for_optimizer, for_worker = torch.load(_file(rank), weights_only=True)
    model.load_state_dict(for_model)
    optimizer.load_state_dict(for_optimizer)
    worker = gossamer.join(model, optimizer)
    worker.load_state_dict(for_worker)
    with worker:
        train(worker, 3, 3)
    return {"digest": digest(model)}
