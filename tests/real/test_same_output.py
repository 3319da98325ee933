"""Who leaves a coupled loop holds the model that everyone else holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gossamer.real.launch import Launch, Launcher

LOOP = """
import gossamer, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(50, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossamer.join(model, optimizer, "ad_psgd") as worker:
    own = torch.Generator().manual_seed(worker.rank)
    for _ in range(40):
        inputs = torch.randn(8, 50, generator=own)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.arange(8)).backward()
        worker.step()
total = sum(p.double().abs().sum().item() for p in model.parameters())
open(f"{sys.argv[1]}/{worker.rank}", "w").write(repr(total))
"""


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_everyone_leaves_with_the_same_model(tmp_path: Path, transport: str) -> None:
    """Averages that are under way when a loop ends are over before anybody reads the result."""
    program = tmp_path / "loop.py"
    program.write_text("import sys\n" + LOOP, encoding="utf-8")
    argv = [sys.executable, str(program), str(tmp_path)]
    launch = Launch(argv, 4, transport=transport, deadline_s=60.0)
    assert Launcher(launch).run() == 0
    assert len({(tmp_path / str(rank)).read_text() for rank in range(4)}) == 1
