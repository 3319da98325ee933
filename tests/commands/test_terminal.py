"""The command at a terminal and in a pipe: versions, Ctrl-C, JSON alone, tables that fit."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from command_line import gossamer
from gossamer import __version__
from gossamer.commands import console, listing
from gossamer.methods import METHODS


def test_h_is_help_and_version_names_the_versions() -> None:
    """As of every other command; bits depend on torch and Python, so their versions are told."""
    assert gossamer("-h").out == gossamer("--help").out
    assert gossamer("simulate", "-h").out == gossamer("simulate", "--help").out
    said = gossamer("--version")
    assert said.status == 0
    python = platform.python_version()
    assert said.out == f"gossamer {__version__} (torch {torch.__version__}, Python {python})\n"
    assert tomllib.loads(PROJECT.read_text())["project"]["version"] == __version__


PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
INTERRUPTED_IMPORT = """
import importlib, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
module, _, function = sys.argv.pop(1).partition(":")
getattr(importlib.import_module(module), function)()
"""


def test_ctrl_c_during_the_imports_is_one_word() -> None:
    """The first seconds belong to PyTorch's import; a traceback out of it helps nobody."""
    entry = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["gossamer"]
    said = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, entry, "methods"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["methods", "tasks", "clusters", "reproduce"])
def test_with_json_nothing_else_goes_to_standard_output(command: str) -> None:
    """`gossamer ... --json | jq` works: one object on one line; tables go to standard error."""
    said = gossamer(command, "--json")
    assert said.status == 0
    assert said.json
    assert said.err
    # The next command prints where it always did.
    assert gossamer(command).out


def test_python_m_gossamer_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever has not put the environment's programs on the path."""
    monkeypatch.setattr(sys, "argv", ["gossamer", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("gossamer", run_name="__main__")
    assert not end.value.code


def test_the_list_of_methods_can_be_one_method() -> None:
    """By name; a name that is none gets the nearest."""
    (row,) = gossamer("methods", "ad_psgd", "--json").json["methods"]
    assert row["name"] == "ad_psgd"
    assert "did you mean 'ad_psgd'?" in gossamer("methods", "ad_psg").err


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_loses_columns_and_no_names(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns on the right go, and are named; a sentence is broken between its words."""
    screen = Console(highlight=False, width=width, force_terminal=True, color_system=None)
    for module in (console, listing):
        monkeypatch.setattr(module, "out", screen)
    said = gossamer("methods").out
    assert "…" not in said
    rows = {line.split()[1] for line in said.splitlines() if line.startswith("│ ")}
    assert set(METHODS) <= rows
    assert width == 80 or "models sent per step" in " ".join(said.split())


def test_a_file_is_as_wide_as_its_tables() -> None:
    """Nobody can widen a pipe, so nothing is left out there."""
    wide = Table("method", *[f"column {number}" for number in range(12)])
    wide.add_row("a" * 60, *["0123456789"] * 12)
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        console.show_table(wide)
    assert "a" * 60 in buffer.getvalue()
    assert buffer.getvalue().count("0123456789") == 12


def test_training_says_at_once_that_it_starts_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their imports are done, which takes seconds, nothing else can be told."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["gossamer.real.train.train"], "Launcher", press)
    said = gossamer("train", "-n", "4", "--runs", str(tmp_path))
    assert said.status == 130
    assert said.err.startswith("starting 4 workers\n")


BEGIN = "import sys, gossamer_command; sys.argv = ['gossamer']; gossamer_command.main()"


def test_a_shell_can_complete_what_is_typed() -> None:
    """By `gossamer --install-completion`, which asks the command itself."""
    asked = {"_GOSSAMER_COMPLETE": "complete_bash", "COMP_WORDS": "gossamer sim", "COMP_CWORD": "1"}
    said = subprocess.run(
        [sys.executable, "-c", BEGIN],
        env={**os.environ, **asked}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert said.stdout.split() == ["simulate"]
