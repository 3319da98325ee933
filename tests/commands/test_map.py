"""The map: every command of it can be given, and docs/map.md is what the table says."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from command_line import gossamer
from gossamer.commands.cli import app
from gossamer.config.cluster import load_cluster
from gossamer.config.settings import make_settings
from gossamer.methods import METHODS, parse_method
from gossamer.plan.advise.changes import asked_values
from gossamer.studies.map import MapRow, map_page, map_rows
from gossamer.studies.reproductions import TABLES
from tiers import first_of_each, only

PAGE = Path(__file__).parents[2] / "docs" / "map.md"
COMMANDS = [row.command for row in map_rows() if row.command]
EACH = list(dict.fromkeys(one for row in map_rows() for one in row.commands))
QUICK = ("simulate", "compare", "train", "lab", "soup", "distill", "cost", "advise")


@cache
def _tree() -> Any:
    return get_command(app)


def parsed(command: str) -> tuple[list[str], dict[str, Any]]:
    """The names of a command and its options, as the command line reads them."""
    words = shlex.split(command)
    assert words[0] == "gossamer"
    found: Any = _tree()
    names, rest = [], words[1:]
    while hasattr(found, "commands"):
        names.append(rest[0])
        found, rest = found.commands[rest[0]], rest[1:]
    return names, found.make_context(names[-1], rest).params


def test_the_page_is_the_table() -> None:
    """`gossamer map --markdown > docs/map.md` makes it again."""
    assert PAGE.read_text(encoding="utf-8") == map_page(map_rows())


@pytest.mark.parametrize("command", EACH)
def test_every_command_of_the_map_is_understood(command: str) -> None:
    """Its words, options, methods, tasks, clusters and tables exist and go together."""
    names, options = parsed(command)
    if names == ["reproduce"]:
        assert options["table"] in TABLES
    asked = [options.get("method")] if names[0] in ("simulate", "train", "distill") else []
    asked += (options.get("methods") or "").split() if names[0] in ("compare", "lab") else []
    for method in filter(None, asked):
        task, cluster = options.get("task") or "digits-mlp", options.get("cluster") or "equal-8"
        more = {key: options[key] for key in ("schedule", "optimiser", "swa", "split")
                if options.get(key) is not None}  # fmt: skip
        place = load_cluster(cluster).changed(workers=options.get("workers"))
        settings = make_settings(task, method, place, **more)
        settings.method_options()
    if options.get("search"):
        base = make_settings("digits-mlp", "all_reduce", "equal-8")
        assert asked_values(options["search"], base)


def test_every_method_and_table_has_its_place() -> None:
    """None was forgotten."""
    shown = {
        parse_method(method).name for command in EACH for method in _methods_of(parsed(command)[1])
    }
    assert shown == set(METHODS)
    tables = {parsed(command)[1]["table"] for command in EACH if " reproduce " in command}
    assert tables == set(TABLES)


def _methods_of(options: dict[str, Any]) -> list[str]:
    given = options.get("method") or []
    single = [given] if isinstance(given, str) else list(given)
    return [*single, *(options.get("methods") or "").split()]


def test_what_is_left_out_says_why() -> None:
    """A row has a command or a reason, never both and never neither."""
    for row in map_rows():
        assert bool(row.command) != bool(row.why_not), row.what


def test_a_word_chooses_rows() -> None:
    """And a word that stands nowhere is one sentence."""
    said = gossamer("map", "codistillation", "--json")
    assert said.status == 0
    assert [row["what"] for row in said.json["map"]] == ["Codistillation (Anil et al. 2018)"]
    assert "Sandblaster" in gossamer("map", "sandblaster").out
    assert "nothing in the map" in gossamer("map", "nonsense").err


def _short(command: str) -> list[str]:
    """The same command with few samples, so that running it takes seconds."""
    words = shlex.split(command)[1:]
    kind = words[0]
    if kind in ("simulate", "compare", "train", "distill"):
        words += ["--epochs", "3" if "--schedule" in words else "0.5"]
        words += ["--evaluations", "1"] if kind != "distill" else []
    if kind == "compare":
        words += ["--lr", "0.1", "--seeds", "1"]
    if words[:2] == ["lab", "path"]:
        words += ["--epochs", "0.5"]
    if words[:2] == ["lab", "staleness"]:
        words += ["--updates", "500"]
    if words[:2] == ["lab", "stragglers"]:
        words += ["--seeds", "1", "--epochs", "0.5", "--steps", "40", "--lr", "0.1"]
    if words[:2] == ["lab", "stages"]:
        words += ["--steps", "20", "--warmup", "20", "--pipelines", "2bw"]
    if words[:2] == ["lab", "bandwidth"]:
        words += ["--epochs", "1", "--lr", "0.1", "--methods", "all_reduce local_sgd"]
        words += ["--target", "0.3"]
    if words[:2] == ["lab", "delay"]:
        words += ["--epochs", "0.5"]
    if kind == "advise":
        words += ["--budget", "4s", "--epochs", "1"]
    return words


def _kind(row: MapRow) -> str:
    return row.command.split()[1] if row.command else ""


RUN = [row for row in map_rows() if _kind(row) in QUICK]


@pytest.mark.parametrize(
    "command",
    only(
        [row.command for row in first_of_each(RUN, _kind) if _kind(row) == "simulate"],
        [row.command for row in RUN],
    ),
)
def test_every_command_of_the_map_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shortened, in an empty folder; those of published tables are run by the tests of these."""
    monkeypatch.chdir(tmp_path)
    for one in command.split(" && "):
        said = gossamer(*_short(one))
        assert said.status == 0, said.err
