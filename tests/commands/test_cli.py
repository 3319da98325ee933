"""Every command does what it says, on the console and as JSON, also at the edges."""

from __future__ import annotations

import math
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from command_line import Said, gossamer, strict
from gossamer import simulate
from gossamer.commands import listing, train
from gossamer.commands.console import show_stale
from gossamer.config.cluster import clusters
from gossamer.config.faults import Fault
from gossamer.methods import METHODS
from gossamer.methods import spec as method_spec
from gossamer.observe.metrics import Metrics
from gossamer.observe.metrics import summary as summary_of
from gossamer.real.train.progress import RunListener, TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.runs.result import Result
from gossamer.studies.reproductions import TABLES
from gossamer.tasks import TASKS
from support import bowl, cluster_of, digits
from tiers import every, wide

PROMISED = {
    "digest", "virtual_seconds", "wall_seconds", "steps", "epochs", "loss", "accuracy",
    "consensus_distance", "mean_staleness", "bytes_per_step", "waiting_fraction",
}  # fmt: skip
COMMANDS = ("compare", "simulate", "methods", "tasks", "clusters", "reproduce")
every_method = pytest.mark.parametrize("name", METHODS)


def simulated(*arguments: str) -> Said:
    """`gossamer simulate`, keeping nothing; it must succeed."""
    said = gossamer("simulate", *arguments, "--runs", "none", "--json")
    assert said.status == 0, said.err
    return said


# ---------------------------------------------------------------------- simulate


def test_the_same_seed_prints_the_same_digest() -> None:
    """And another seed another one; the last line is one JSON object with what is promised."""

    def run(seed: int) -> dict[str, Any]:
        return simulated(
            "--method", "ad_psgd", "--task", "digits-mlp", "--workers", "16", "--slow", "0=10",
            "--seed", str(seed), "--epochs", "1",
        ).json  # fmt: skip

    first, second, other = run(7), run(7), run(8)
    assert first["digest"] == second["digest"] != other["digest"]
    assert first["parameters_digest"] == second["parameters_digest"]
    assert set(first) >= PROMISED
    assert first["workers"] == 16
    assert first["ended"] == "finished"
    assert first["diverged"] is False


def test_several_seeds_give_a_mean_and_an_interval(tmp_path: Path) -> None:
    """The mean of the runs that lie in the folder, inside its interval; every digest is told."""
    said = gossamer(
        "simulate", "--epochs", "0.5", "--seeds", "3", "--seed", "4", "--json",
        "--runs", str(tmp_path),
    )  # fmt: skip
    merged = said.json
    own = [strict(path.read_text()) for path in sorted(tmp_path.glob("*/seed-*/summary.json"))]
    assert [one["seed"] for one in own] == merged["seeds"] == [4, 5, 6]
    assert [one["digest"] for one in own] == merged["digests"]
    for key in ("loss", "accuracy", "virtual_seconds", "bytes_per_step"):
        low, high = merged["interval"][key]
        assert merged[key] == pytest.approx(sum(one[key] for one in own) / 3)
        assert low < merged[key] < high
    assert f"{100 * merged['accuracy']:.1f} %" in said.err
    assert " to " in said.err


def test_a_diverged_run_says_so_and_prints_null() -> None:
    """No NaN in the JSON, and no accuracy for a model whose output is not a number."""
    said = simulated("--lr", "1e30", "--epochs", "0.5")
    assert said.json["loss"] is said.json["accuracy"] is said.json["consensus_distance"] is None
    assert said.json["diverged"] is True
    assert "the run diverged" in said.err
    assert "NaN" not in said.out


def test_a_loss_that_explodes_without_overflowing_has_diverged_too() -> None:
    """A hundred times what it began with; at a sane rate the same run has not."""
    wild, sane = (
        simulated("--task", "quadratic", "--lr", rate, "--epochs", "1").json
        for rate in ("30", "0.1")
    )
    assert math.isfinite(wild["loss"])
    assert wild["diverged"] is True
    assert sane["diverged"] is False


def test_a_task_without_accuracy_shows_its_loss() -> None:
    """The quadratic has none: null in the JSON, and no line about it."""
    said = simulated("--task", "quadratic", "--epochs", "0.5")
    assert said.json["accuracy"] is None
    assert math.isfinite(said.json["loss"])
    assert "accuracy" not in said.err


def test_what_was_not_measured_is_null_and_an_empty_cell() -> None:
    """Models that never meet exchange nothing; the paper's count is AD-PSGD's; no cell says 0 for
    either, in virtual time or of a real worker's books."""
    short = ("--task", "digits-logistic", "--epochs", "1", "--runs", "none")
    alone = gossamer("simulate", "--method", "ensemble", *short, "--json")
    assert alone.json["exchanges_per_step"] is alone.json["mean_global_staleness"] is None
    assert alone.json["mean_age"] is alone.json["max_clock_gap"] is None
    shown = gossamer("simulate", "--method", "ensemble", *short)
    assert "exchanges" not in shown.out
    assert "global" not in shown.out
    assert show_stale({"mean_staleness": None}) == ""
    assert show_stale({"mean_staleness": 1.26}) == "1.3"
    assert show_stale({"mean_staleness": 0.0, "mean_global_staleness": 6.94}) == "0.0 (6.9)"
    summary = summary_of(Metrics(3), 0)
    keys = ("mean_staleness", "max_staleness", "exchanges_per_step")
    assert [summary[key] for key in keys] == [None] * 3


def test_questions_about_time_need_no_gradients() -> None:
    """`--engine none` prints times and bytes and no loss."""
    summary = simulated("--engine", "none", "--epochs", "1", "--model-bytes", "1000000").json
    assert summary["bytes_per_step"] == pytest.approx(1e6, rel=0.1)
    assert summary.get("loss") is None


def test_when_all_workers_die_a_sentence_says_so() -> None:
    """Not a crash: what was done until then is shown; but the run did not finish."""
    kills = [part for rank in range(3) for part in ("--kill", f"{rank}@0.05s")]
    said = gossamer(
        "simulate", "--runs", "none", "--json", "--workers", "3", "--epochs", "1", *kills
    )
    assert said.status == 1
    assert said.err.splitlines()[-1] == "the run ended: all workers died"
    assert said.json["ended"] == "all workers died"
    assert said.json["living"] == 0
    assert re.search(r"all workers died: \d+ of 1437 samples were processed", said.err)


@pytest.mark.parametrize("command", ["simulate", "compare", "train"])
def test_a_momentum_that_is_left_out_is_told_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With how to put it back; and then the line is gone."""

    def launch(request: TrainRequest, listener: RunListener) -> Result:
        # Of workers that had nothing to tell.
        return TrainingProgress(Path(), []).result(request.settings, 0)

    monkeypatch.setattr(train, "launch", launch)
    shared = ["--task", "quadratic", "--epochs", "0.1", "--runs", "none"]
    own = {
        "simulate": ["--workers", "2", "--method"],
        "compare": ["--workers", "2", "--seeds", "1", "--lr", "0.01", "--methods"],
        "train": ["-n", "1", "--method"],
    }
    line = re.compile(r"^notice: SGD's momentum of 0.9 is left out .* keep_momentum=true ", re.M)
    for method, count in (("downpour", 1), ("downpour:keep_momentum=true", 0)):
        said = gossamer(command, *shared, *own[command], method)
        assert said.status == 0, said.err
        assert len(line.findall(said.out)) == count


# ---------------------------------------------------------------------- every method at the edges


@every_method
@pytest.mark.parametrize("workers", [1, 2])
def test_runs_with_one_worker_and_with_two(name: str, workers: int) -> None:
    """There may be nobody to talk to, or nobody else."""
    result = simulate(bowl(), name, cluster_of(workers), epochs=0.2, engine="loop", evaluations=1)
    assert result.samples >= 0.2 * len(bowl().train) - 1
    assert math.isfinite(result.loss)


@every_method
def test_runs_with_batches_of_one_and_with_a_single_step(name: str) -> None:
    """An epoch may be so small that one step fills it."""
    single = simulate(bowl(), name, cluster_of(3), epochs=1e-9, engine="loop", evaluations=1)
    assert single.steps in (1, 3)
    tiny = simulate(bowl(), name, cluster_of(3), epochs=0.01, batch=1, engine="loop", evaluations=1)
    assert tiny.samples == tiny.steps >= 10
    assert math.isfinite(single.loss)
    assert math.isfinite(tiny.loss)


@every_method
@pytest.mark.parametrize("survivor", every(2, [0, 2]))
def test_goes_on_with_a_single_survivor(name: str, survivor: int) -> None:
    """All others die one after the other, and the run still processes its samples."""
    faults = [
        Fault("kill", at=0.02 * (rank + 1), worker=rank) for rank in range(4) if rank != survivor
    ]
    result = simulate(
        bowl(), name, cluster_of(4, faults=faults), epochs=0.8, engine="loop", evaluations=1,
        optimiser="sgd",
    )  # fmt: skip
    assert result.living == 1
    assert result.samples >= 0.8 * len(bowl().train) - 4 * bowl().batch
    assert math.isfinite(result.loss)


@every_method
def test_the_death_of_all_ends_the_run(name: str) -> None:
    """At the start, on the way, all at once: no error, no warning, nobody living."""
    for times in ((0.0, 0.0, 0.0), (0.05, 0.05, 0.05), (0.01, 0.04, 0.3)):
        faults = [Fault("kill", at=at, worker=rank) for rank, at in enumerate(times)]
        result = simulate(
            bowl(), name, cluster_of(3, faults=faults), epochs=5, engine="loop", evaluations=1
        )
        assert result.living == 0
        assert result.samples < 5 * len(bowl().train)


@every_method
def test_a_learning_rate_beyond_reason_diverges_without_an_error(name: str) -> None:
    """Not-a-number flows through every exchange and every metric."""
    result = simulate(
        digits(), name, cluster_of(3), epochs=0.2, learning_rate=1e30, engine="loop", evaluations=1
    )
    assert not math.isfinite(result.loss)
    assert not math.isfinite(result.accuracy)


# ---------------------------------------------------------------------- lists and tables


def test_lists_are_complete() -> None:
    """What the package has is what the commands list, as a table and as JSON."""
    for command, known in (("methods", METHODS), ("tasks", TASKS), ("clusters", clusters())):
        said = gossamer(command, "--json")
        assert said.status == 0
        assert [row["name"] for row in said.json[command]] == list(known)
        table = gossamer(command).out
        assert all(name in table for name in known)


def test_a_package_whose_method_cannot_be_imported_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("brought", "no_such_package:method", "gossamer.methods")
    for module in (listing, method_spec):
        monkeypatch.setattr(module, "entry_points", lambda group: {"brought": point})
    said = gossamer("methods", "--json")
    assert [row["name"] for row in said.json["methods"]] == list(METHODS)
    assert "left out: method brought (no_such_package:method): " in said.err


def test_methods_names_the_options_that_suit_the_run() -> None:
    """What a run takes instead of the default is said below it; elsewhere nothing is."""
    said = gossamer("methods").out
    for spec, suited in (
        ("ad_psgd:topology=complete", "topology"),
        ("backup_workers:backups=0", "backups, decay"),
        ("staleness_aware:overlap=false,n=1", "n, divide, damping"),
        ("bmuf:period=8", "period, block_momentum"),
        ("noloco:period=8", "period, outer_rate, outer_momentum"),
        ("sync_server:backups=0", ""),
        ("softsync:overlap=false,n=1", ""),
    ):
        below = said.partition(f"  {spec}")[2].splitlines()[1].strip()
        named = below.partition("left out, chosen to suit the run: ")[2]
        assert named == suited, spec


def test_reproduce_lists_its_tables() -> None:
    said = gossamer("reproduce", "--json")
    assert [table["name"] for table in said.json["tables"]] == list(TABLES)
    assert all(name in gossamer("reproduce").out for name in TABLES)


@wide
def test_the_slow_worker_table_is_reproduced() -> None:
    """All twelve cells lie within 10 % of the published ones."""
    said = gossamer("reproduce", "ad-psgd-slow-worker", "--json", "--runs", "none")
    assert said.json["table"] == "ad-psgd-slow-worker"
    assert len(said.json["cells"]) == 12
    for cell in said.json["cells"]:
        assert {"row", "column", "published", "ours"} <= set(cell)
        assert cell["ours"] == pytest.approx(cell["published"], rel=0.1), cell


# ---------------------------------------------------------------------- help


def test_no_command_is_a_question() -> None:
    """It is answered with the list of commands, each with a whole sentence."""
    said = gossamer()
    assert said.status == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S.*\.$", said.out, re.MULTILINE), command
    assert "..." not in said.out.partition("Commands:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_is_whole(command: str) -> None:
    """Every option has a text, nothing is cut off, and it fits a terminal of 80 columns."""
    said = gossamer(command, "--help")
    assert said.status == 0
    assert "…" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    options = re.split(r"\n  (?=-)", re.sub(r"\n\n[A-Z].*:(?=\n)", "", said.out))[1:]
    assert options
    for option in options:
        name, _, text = re.sub(r"\n\s+", "  ", option.strip()).partition("  ")
        assert name.startswith("--") or name == "-h, --help"
        assert text.strip(), f"{name} has no text"
    if command in ("simulate", "compare"):
        assert "[@START+LENGTH]" in said.out
        titles = re.findall(r"^([A-Z].*):$", said.out, re.MULTILINE)
        assert titles == ["Arguments", "Options", "Cluster and faults", "Training", "Output"]
