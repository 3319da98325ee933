"""A loop of an elastic run, in which one worker dies, and which ends when that one is back.

    gossamer run --elastic 1:3 -n 3 tests/programs/elastic_loop.py METHOD VICTIM

VICTIM is the rank that dies in the middle of its first life, or `nobody` where workers arrive,
whose ranks follow. With `timed` instead of ranks the loop lasts 40 seconds, with `ends` it is over
when the victim is gone. Every worker prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import torch
from torch import nn

import gossamer

FEW = 30
PATIENCE_S = 60.0
TIMED_S = 40.0
PACE_S = 0.003


class Seen(gossamer.Callback):
    """Who has gone and come, as this worker heard of it."""

    def __init__(self) -> None:
        self.events: list[list[object]] = []

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        self.events.append([worker, is_alive])

    def have_come(self, ranks: set[int]) -> bool:
        return ranks <= {worker for worker, is_alive in self.events if is_alive}


def main() -> None:
    method, victim, *others = sys.argv[1:]
    is_timed, ends = others == ["timed"], others == ["ends"]
    awaited = set[int]() if is_timed or ends else {int(rank) for rank in (others or [victim])}
    life = int(os.environ["GOSSAMER_LIFE"])
    torch.manual_seed(int(os.environ["GOSSAMER_RANK"]) + 10 * life)
    model = nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    target, seen = torch.eye(32, 64), Seen()
    steps = left = longest = 0.0
    with gossamer.join(model, optimizer, method, callbacks=[seen]) as worker:
        first = float((model.weight.detach() - target).square().mean())
        until = time.monotonic() + (TIMED_S if is_timed else PATIENCE_S)
        while (is_timed or left < FEW) and not (ends and seen.events) and time.monotonic() < until:
            optimizer.zero_grad()
            x = torch.randn(16, 64)
            (model(x) - x @ target.T).square().mean().backward()
            time.sleep(PACE_S)
            began = time.monotonic()
            worker.step()
            longest = max(longest, time.monotonic() - began)
            steps += 1
            if steps == FEW and life == 0 and str(worker.rank) == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            left += seen.have_come(awaited - {worker.rank}) and steps > FEW
        size = worker.size
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    error = float((model.weight.detach() - target).square().mean())
    print(json.dumps({
        "rank": worker.rank, "life": life, "steps": steps, "size": size, "events": seen.events,
        "longest": longest, "digest": digest, "first": first, "error": error,
        "in_time": left >= FEW,
    }), flush=True)  # fmt: skip


main()
