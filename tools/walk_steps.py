"""Count the files of Gossamer that take part in one step of a run; `house_table.py` starts this.

    python tools/walk_steps.py simulate|shm|torch RESULT.json

The last two run under `gossamer run -n 2`; only worker 0 counts, and only in its training thread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

STEPS = 6


class Walk:
    """What `sys.setprofile` sees of the package: every call's file, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and f"{Path('src') / 'gossamer'}/" in name:
            self.files.append(name)

    def counts(self) -> dict[str, int]:
        changes = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return {"calls": len(self.files), "files": len(set(self.files)), "changes": changes}


def simulated() -> dict[str, int]:
    """Two gradients and one exchange: a run of two steps less a run of one."""
    import dataclasses

    from gossamer import load_cluster, make_task, simulate

    cluster = dataclasses.replace(load_cluster("equal-8"), workers=2)
    task = make_task("digits-mlp")

    def walked(samples: int) -> Walk:
        epochs = samples / len(task.train)
        with Walk() as walk:
            simulate(task, "ad_psgd", cluster, epochs=epochs, batch=16, evaluations=1)
        return walk

    walked(64)
    longer, shorter = walked(8 * 16), walked(6 * 16)
    found = {key: longer.counts()[key] - shorter.counts()[key] for key in ("calls", "changes")}
    with Walk() as walk:
        simulate(task, "ad_psgd", cluster, epochs=96 / len(task.train), batch=16, evaluations=1)
    return found | {"files": walk.counts()["files"]}


def joined(method: str) -> dict[str, int]:
    """One `worker.step()` of a loop in its steady state."""
    import torch
    from torch.nn import functional

    import gossamer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    walk = Walk()
    with gossamer.join(model, optimizer, method=method) as worker:
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = torch.randn(16, 8), torch.randint(4, (16,))
            functional.cross_entropy(model(inputs), targets).backward()
            if step == STEPS - 2:
                with walk:
                    worker.step()
            else:
                worker.step()
        rank = worker.rank
    return walk.counts() if rank == 0 else {}


def main() -> None:
    kind, path = sys.argv[1:]
    found = simulated() if kind == "simulate" else joined(_METHODS[kind])
    if found:
        Path(path).write_text(json.dumps(found))


_METHODS = {"shm": "all_reduce", "torch": "ad_psgd"}

if __name__ == "__main__":
    main()
