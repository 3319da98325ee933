"""The three forms of one training run under the launchers that their first lines name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import popen
from tiers import wide

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "ddp"
README = ROOT / "README.md"
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
GOSSAMER = [sys.executable, "-m", "gossamer", "run", "-n", "2"]
MPIRUN = [shutil.which("mpirun", path=f"{BIN}:{os.environ.get('PATH', '')}") or "mpirun"]
MPIRUN += ["--oversubscribe", "-n", "2", sys.executable]
PYTHON = [sys.executable]


ABORTED = "terminate called without an active exception"
"""What torch's own DDP says when it aborts at the end of its process, its result printed: once in
a dozen or two runs of two processes on a busy machine, with a barrier before the end too."""


def accuracies(command: list[str]) -> list[float]:
    """What the workers print; all of them are gone afterwards. A script in which torch alone is at
    work has three tries, if it aborts like that."""
    status, out, err = end_of(command)
    for _ in range(2 if command[-1].endswith("ddp.py") else 0):
        if status == 0 or ABORTED not in err:
            break
        status, out, err = end_of(command)
    assert status == 0, err[-3000:]
    return [float(number) for number in re.findall(r"accuracy ([\d.]+) %", out)]


def end_of(command: list[str]) -> tuple[int, str, str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    process = popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, out, err


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*PYTHON, "plain.py"], id="python-plain", marks=wide),
        pytest.param([*PYTHON, "coupled.py"], id="python-coupled"),
        pytest.param([*TORCHRUN, "ddp.py"], id="torchrun-ddp", marks=wide),
        pytest.param([*TORCHRUN, "coupled.py"], id="torchrun-coupled", marks=wide),
        pytest.param([*GOSSAMER, "coupled.py"], id="gossamer-coupled", marks=wide),
        pytest.param(
            [*GOSSAMER, "--method", "pull_gossip", "coupled.py"], id="gossamer-pull_gossip",
            marks=wide,
        ),
        pytest.param(
            [*MPIRUN, "coupled.py"], id="mpirun-coupled",
            marks=[
                wide,
                pytest.mark.skipif(shutil.which(MPIRUN[0]) is None, reason="no mpirun here"),
            ],
        ),
    ],
)  # fmt: skip
def test_the_example_trains_and_one_worker_says_so(command: list[str]) -> None:
    """One line, and an accuracy as good as plain training's."""
    *launcher, name = command
    (accuracy,) = accuracies([*launcher, str(FOLDER / name)])
    assert accuracy > 92.0


def test_the_readme_shows_the_lines_in_which_the_forms_differ() -> None:
    """Every line of code in the comparison stands in the example's file."""
    text = README.read_text(encoding="utf-8")
    section = text.partition("## From DDP in a few lines")[2].partition("\n## ")[0]
    blocks = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    assert blocks
    old, new = (
        (FOLDER / name).read_text(encoding="utf-8").splitlines()
        for name in ("ddp.py", "coupled.py")
    )
    for line in (line for block in blocks for line in block.splitlines() if line.strip()):
        assert line[1:] in (old if line[0] == "-" else new), line
