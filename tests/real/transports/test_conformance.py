"""The command that says of each law whether somebody's transport keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from fork_server import Program

SOURCE = Path(gossamer.__file__).parents[1]

MINE = """
from gossamer.real.transports.shm import ShmTransport

class MyTransport(ShmTransport):
    pass

class Deaf(ShmTransport):
    def read(self, end):
        return super().read(self.rank)
"""
READ, STOP = "a_read_sees_what_the_owner_wrote", "a stop ends a wait for a window"
SHM = "gossamer.real.transports.shm:ShmTransport"


def conformance(folder: Path, *arguments: str) -> tuple[int, str, str]:
    (folder / "mine.py").write_text(MINE)
    program = Program(
        [sys.executable, "-m", "gossamer.real.transports.conformance", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE}:{folder}"},
    )  # fmt: skip
    out, err = program.communicate(timeout=300)
    return program.returncode, out, err


def test_a_transport_that_keeps_the_laws_is_told_so(tmp_path: Path) -> None:
    """One line for each law that was asked for, and exit code 0."""
    status, out, err = conformance(tmp_path, "--transport", "mine:MyTransport", "-n4", READ, STOP)
    assert status == 0, out + err
    assert out.splitlines() == [
        "kept    a read sees what the owner wrote",
        "kept    a stop ends a wait for a window",
        "2 of 2 laws are kept",
    ]


def test_a_law_that_is_broken_is_named_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    """With the traceback of the process that found it; exit code 1."""
    status, out, err = conformance(tmp_path, "--transport", "mine:Deaf", READ, STOP)
    assert status == 1, out + err
    lines = out.splitlines()
    assert lines[0] == "BROKEN  a read sees what the owner wrote"
    assert "assert torch.equal(" in out
    assert lines[-2:] == ["kept    a stop ends a wait for a window", "1 of 2 laws are kept"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--transport", "nowhere"], "--transport must be MODULE:CLASS"),
        (["--transport", "mine:Yours"], "has no attribute 'Yours'"),
        (["--transport", SHM, "-n", "2"], "-n must be at least 3, got 2"),
        (["--transport", SHM, "a_raed_sees_what_the_owner"], "did you mean 'a_read_sees"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    status, out, err = conformance(tmp_path, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1
