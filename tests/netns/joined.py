"""A user's loop for the tests on several hosts: `joined.py METHOD STEPS FOLDER [FATE]`.

Every worker prints one line: its rank, its host, who lives at the end, and the loss of the output
model before and after. FATE is the rank of a worker that is killed half way, or `fails`: the last
worker raises an error there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

from gossamer.real.join.joined_worker import join


def main(method: str, steps: int, folder: Path, fate: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    targets = (inputs @ torch.randn(64, 8)).argmax(1)
    # About half a megabyte, so that a message is many packets and an announced body.
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = nn.CrossEntropyLoss()
    before = measure(model(inputs), targets).item()
    with join(model, optimizer, method, seed=1, steps=steps) as worker:
        generator = torch.Generator().manual_seed(worker.rank)
        for step in range(steps):
            if step == steps // 2:
                (folder / f"half-{worker.rank}").touch()
                if str(worker.rank) == fate:
                    os.kill(os.getpid(), signal.SIGKILL)
                if worker.rank == worker.size - 1 and fate == "fails":
                    raise RuntimeError("the user's loop failed")
            chosen = torch.randint(256, (32,), generator=generator)
            optimizer.zero_grad()
            measure(model(inputs[chosen]), targets[chosen]).backward()
            worker.step()
            time.sleep(float(os.environ.get("PACE_S", "0")))
        assert worker.coupling is not None
        rank, session = worker.rank, worker.coupling.session
    after = measure(model(inputs), targets).item()
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    print(
        f"worker {rank} of {worker.size} on {socket.gethostname()} {session.transport.name}"
        f" live={','.join(map(str, sorted(session.router.live)))}"
        f" loss={before:.3f}>{after:.3f} sum={total:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] if sys.argv[4:] else "")
