"""How a loop of one's own ends when somebody is lost without whom it cannot go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import command

LOOP = """
import os, signal, sys
import torch
import gossamer

def die_if(moment):
    if os.environ["GOSSAMER_RANK"] == "0" and sys.argv[1] == moment:
        os.kill(os.getpid(), signal.SIGKILL)

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
die_if("early")
with gossamer.join(model, optimizer) as worker:
    for step in range(1_000_000):
        if step == 20:
            die_if("late")
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        worker.step()
"""


@pytest.mark.parametrize(
    ("moment", "method", "expected"),
    [
        (
            "late", "downpour",
            "server 0 is lost with the process of worker 0, which kept it; no method goes on "
            "without its server",
        ),
        (
            "early", "ad_psgd",
            "worker 0 is lost: was killed by SIGKILL, before all workers had met",
        ),
    ],
)  # fmt: skip
def test_a_loss_that_ends_a_loop_is_one_sentence(
    tmp_path: Path, moment: str, method: str, expected: str
) -> None:
    """It names the server and whose process it was, and there are no frames around it. Said when
    it happens, and again at the end of the run."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    with command("-n", "2", "--method", method, str(script), moment) as process:
        _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    of_worker = [line for line in said.splitlines() if line.startswith("[1]")]
    assert of_worker == [f"[1] gossamer: {expected}"] * 2, said


STOPPED = """
import atexit, os, pathlib, signal, sys, threading, time
import torch
import gossamer

rank, notes = os.environ["GOSSAMER_RANK"], pathlib.Path(sys.argv[1])

def tell():
    waiting = [one.name for one in threading.enumerate() if "receives" in one.name]
    print("still receiving:", waiting, flush=True)
    os.kill(int(notes.read_text()), signal.SIGCONT)

if rank == "1":
    notes.write_text(str(os.getpid()))
else:
    atexit.register(tell)  # the first to be registered is the last to be called
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossamer.join(model, optimizer) as worker:
    for step in range(1_000):
        if step == 20 and rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 20:
            time.sleep(0.2)
            raise ValueError("on purpose")
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        worker.step()
"""


@pytest.mark.wide
def test_a_program_that_fails_waits_for_no_answer_when_it_ends(tmp_path: Path) -> None:
    """A thread that Gloo wakes while the interpreter takes itself apart would abort the process."""
    script = tmp_path / "loop.py"
    script.write_text(STOPPED)
    with command(
        "-n", "2", "--transport", "torch", "--method", "pull_gossip", str(script),
        str(tmp_path / "pid"),
    ) as process:  # fmt: skip
        said, failed = process.communicate(timeout=300)
    assert "still receiving: []" in said, said + failed
    assert "worker 0 ended with exit code 1" in failed
