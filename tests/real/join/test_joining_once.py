"""A process joins the others once, where what the launcher handed to it serves once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.errors import ConfigurationError
from gossamer.real.launch import environment
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.transports.local import LocalTransport
from gossamer.real.transports.shm import ShmTransport
from gossamer.real.transports.shm.memory import create_segments
from gossamer.real.transports.torch import TorchTransport
from launching import script

TWICE = """
import gossamer, torch
from torch import nn

def joined():
    model = nn.Linear(2, 1)
    return gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="all_reduce")

with joined() as worker:
    worker.model(torch.ones(1, 2)).sum().backward()
    worker.step()
files = [open(f"{here}/file-{rank}-{number}", "w+b") for number in range(8)]
try:
    joined()
except gossamer.errors.ConfigurationError as error:
    print("refused:", error)
print("bytes:", sum(os.path.getsize(file.name) for file in files))
"""


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_a_second_join_is_refused_and_no_file_of_the_script_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    """The script has opened files meanwhile, under the numbers that the shared memory had."""
    command = [part for part in script(tmp_path, TWICE) if part != "-S"]
    launch = Launch(
        command, 2, transport=transport, deadline_s=300.0, environment={"OMP_NUM_THREADS": "1"}
    )
    status = Launcher(launch).run()
    said = capsys.readouterr()
    assert status == 0, said.err
    for rank in range(2):
        lines = [line for line in said.out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines[0].startswith(
            f"[{rank}] refused: this process has joined the others before, and over {transport} "
            "it can do so once"
        )
        assert lines[1] == f"[{rank}] bytes: 0"


def test_only_a_transport_that_was_made_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who could not reach the others may try again; who did may not, by whatever transport."""
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_joined", [])

    def fails(variables: dict[str, str]) -> LocalTransport:
        raise OSError("nobody is there")

    monkeypatch.setattr(TorchTransport, "from_environment", fails)
    with pytest.raises(OSError, match="nobody"):
        environment.connect()
    monkeypatch.setattr(TorchTransport, "from_environment", lambda variables: LocalTransport())
    assert isinstance(environment.connect(), LocalTransport)
    with pytest.raises(ConfigurationError, match=r"over torch it can do so once; do all training"):
        environment.connect("torch")


def test_numbers_that_stand_for_other_files_now_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a child of a worker, which has the variables and not the memory."""
    segments = create_segments(1)
    kept = segments.fds[1]
    path = tmp_path / "precious"
    path.write_bytes(b"precious")
    with path.open("r+b") as file:
        closed = os.dup(kept)
        os.close(closed)
        for wrong in (file.fileno(), closed):
            numbers = {"RANK": 0, "SIZE": 1, "STORE": "127.0.0.1:1", "SHM_FDS": f"{wrong},{kept}"}
            for name, value in numbers.items():
                monkeypatch.setenv(f"GOSSAMER_{name}", str(value))
            with pytest.raises(ConfigurationError, match="is not open in this process"):
                ShmTransport.from_environment()
    segments.close()
    assert path.read_bytes() == b"precious"
