"""A run on disk: complete when it ends, readable whatever ends it."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from command_line import Said, gossamer, numbers_in, strict
from fork_server import Program
from gossamer import simulate
from gossamer.config.cluster import cluster_from
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.observe.timeline import Timeline
from gossamer.runs.folder import RunFolder, to_json
from support import digits
from tiers import wide

"""What the installed script does."""
SHORT = ("--epochs", "0.2", "--evaluations", "3")


def only_folder(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


def read(path: Path) -> Any:
    """A file of a run folder; every object says what it was made with."""
    found = strict(path.read_text())
    if isinstance(found, dict):
        made = found.pop("made_with")
        assert (made["schema"], made["torch"]) == (1, torch.__version__)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made["written"])
        assert {"gossamer", "python"} < set(made)
    return found


def rows_of(folder: Path) -> list[Any]:
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kept(runs: Path, *arguments: str) -> tuple[Said, Path]:
    """A command that keeps its folder, and the folder."""
    said = gossamer(*arguments, "--runs", str(runs))
    return said, only_folder(runs)


def classified(folder: Path) -> float:
    """The accuracy of the folder's model, loaded as anybody would load it."""
    model = digits().make_model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        found = model.eval()(digits().test.inputs).argmax(-1)
    return float((found == digits().test.targets).float().mean())


# ---------------------------------------------------------------------- finished runs


def test_a_finished_run_is_written_down_whole(tmp_path: Path) -> None:
    """Configuration, one line per evaluation, the printed summary and a timeline."""
    said, folder = kept(tmp_path, "simulate", *SHORT, "--slow", "0=10", "--json")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "metrics.jsonl", "model.safetensors", "report.html", "report.png",
        "strip.json", "summary.json", "trace.json",
    ]  # fmt: skip
    assert str(folder) in said.err
    summary = read(folder / "summary.json")
    assert said.json.items() <= summary.items()
    assert summary["ended"] == "finished"
    rows = rows_of(folder)
    assert len(rows) >= 4
    assert [row["virtual_seconds"] for row in rows] == sorted(r["virtual_seconds"] for r in rows)
    assert rows[-1]["loss"] == summary["loss"]
    assert classified(folder) == pytest.approx(summary["accuracy"])
    assert read(folder / "config.json")["cluster"]["faults"] == ["slow 0=10"]


def test_the_timeline_shows_every_worker_computing(tmp_path: Path) -> None:
    """A list of Chrome-trace events: names of the workers, and spans inside the run."""
    _, folder = kept(tmp_path, "simulate", *SHORT, "--method", "all_reduce", "--kill", "2@0.015s")
    events, end = read(folder / "trace.json"), read(folder / "summary.json")["virtual_seconds"]
    names = [event for event in events if event["ph"] == "M"]
    for kind, known in (
        ("process_name", {f"worker {rank}" for rank in range(8)}),
        ("thread_name", {"main", "messages 1"}),
    ):  # fmt: skip
        assert {event["args"]["name"] for event in names if event["name"] == kind} == known
    # Numbers, as the format has them; Perfetto shows the names.
    assert all(isinstance(event["tid"], int) for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans if span["name"] == "gradient"} == set(range(8))
    assert any(span["name"].startswith("waiting") for span in spans)
    assert all(0 <= span["ts"] <= span["ts"] + span["dur"] <= end * 1e6 + 1 for span in spans)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["kill 2@0.015s"]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("ad_psgd", {"average to worker", "average, back from worker"}),
        ("downpour", {"request to server", "reply from server"}),
        ("d_psgd", {"send to worker", "send from worker"}),
        ("all_reduce", {"all_reduce of 8 workers"}),
    ],
)
def test_the_timeline_shows_who_exchanged_with_whom(
    tmp_path: Path, method: str, names: set[str]
) -> None:
    """A message is a span of its sender and a mark of its receiver, joined by one arrow each; spans
    of one thread never overlap."""
    _, folder = kept(tmp_path, "simulate", *SHORT, "--method", method)
    events = read(folder / "trace.json")
    spans = [event for event in events if event["ph"] == "X"]
    shown = {span["name"] for span in spans}
    assert [name for name in names if not any(name in one for one in shown)] == []
    arrows = {
        phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"
    }
    assert arrows["s"].keys() == arrows["f"].keys()
    assert bool(arrows["s"]) == (method != "all_reduce")
    starts = {(span["pid"], span["tid"], span["ts"]): span["name"] for span in spans}
    for number, begun in arrows["s"].items():
        ended = arrows["f"][number]
        assert begun["ts"] <= ended["ts"]
        one, other = (starts[event["pid"], event["tid"], event["ts"]] for event in (begun, ended))
        assert one.startswith(f"{begun['name']} to ")
        assert other.startswith(f"{begun['name']} from ")
    tracks: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda one: (one["ts"], one["dur"])):
        track = span["pid"], span["tid"]
        assert tracks.get(track, 0.0) <= span["ts"] + 1e-6
        tracks[track] = span["ts"] + span["dur"]


def test_a_run_can_be_repeated_from_its_configuration(tmp_path: Path) -> None:
    """What config.json says is everything that decided the run: the same bits come out."""
    _, folder = kept(
        tmp_path, "simulate", *SHORT, "--method", "easgd:period=2", "--drop", "0.1@0.0123456789s",
        "--seed", "5", "--lr", "0.07",
    )  # fmt: skip
    config, summary = read(folder / "config.json"), read(folder / "summary.json")
    for derived in ("task", "method", "cluster", "method_options"):
        assert derived in config
    rest = {k: v for k, v in config.items() if k not in ("task", "method", "cluster")}
    rest.pop("method_options")
    assert rest.pop("test_samples") == 360
    assert rest.pop("forms")
    assert rest.pop("command_line").startswith("gossamer simulate ")
    again = simulate(config["task"], config["method"], cluster_from(config["cluster"]), **rest)
    assert again.digest == summary["digest"]
    assert again.parameters_digest == summary["parameters_digest"]


def test_a_comparison_keeps_every_run_and_a_picture(tmp_path: Path) -> None:
    """One folder for each method at each rate with the choosing seed, and at its best rate with
    each seed that counts, the table as JSON, and the first one's model of the first of them."""
    said, folder = kept(
        tmp_path, "compare", "--methods", "ad_psgd all_reduce", "--lr", "0.1,0.1,0.2",
        "--epochs", "0.2", "--seeds", "2", "--json",
    )  # fmt: skip
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    ranked = {row["method"]: row["learning_rate"] for row in said.json["ranking"]}
    tried = {(method, rate) for method, rates in said.json["grid"].items() for rate in rates}
    assert set(runs) == {f"{method}-lr{rate}-seed0" for method, rate in tried} | {
        f"{method}-lr{rate:g}-seed{seed}" for method, rate in ranked.items() for seed in (1, 2)
    }
    assert read(folder / "summary.json") == said.json
    assert len(read(folder / "config.json")["runs"]) == len(runs)
    assert (folder / "comparison.png").stat().st_size > 10_000
    for run in runs:
        assert read(folder / run / "summary.json")["ended"] == "finished"
    best = read(folder / "summary.json")["ranking"][0]
    first = folder / f"{best['method']}-lr{best['learning_rate']:g}-seed1"
    model = "model.safetensors"
    assert (folder / model).read_bytes() == (first / model).read_bytes()
    assert classified(folder) == pytest.approx(read(first / "summary.json")["accuracy"])


def test_a_reproduced_table_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was printed and a picture of it."""
    monkeypatch.setattr("gossamer.studies.reproductions.ad_psgd.EPOCH", 2_500)
    said, folder = kept(tmp_path, "reproduce", "ad-psgd-slow-worker", "--json")
    assert said.status == 0, said.err
    assert said.json.items() <= read(folder / "summary.json").items()
    assert (folder / "table.png").exists()


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    """A diverged run's files are strict JSON, line by line."""
    _, folder = kept(tmp_path, "simulate", *SHORT, "--lr", "1e30")
    assert rows_of(folder)[-1]["loss"] is None
    assert read(folder / "summary.json")["loss"] is None
    assert all(number == number for number in numbers_in(read(folder / "summary.json")))
    nested = {"a": [float("nan"), (1, float("inf"))], "b": {"c": -float("inf")}, "d": Path("x")}
    assert strict(to_json(nested)) == {"a": [None, [1, None]], "b": {"c": None}, "d": "x"}


def test_nothing_is_kept_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("simulate", "compare --methods ad_psgd --lr 0.1"):
        assert gossamer(*command.split(), "--epochs", "0.1", "--runs", "none").status == 0
    assert list(tmp_path.iterdir()) == []


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    """Also when both ask at once: the one that comes second gets a number."""
    folders = [RunFolder.create(tmp_path, "run") for _ in range(4)]
    assert len({folder.path for folder in folders}) == 4
    children = [folders[0].child("same").path.name for _ in range(3)]
    assert children == ["same", "same-2", "same-3"]


def test_a_long_method_gets_a_short_folder(tmp_path: Path) -> None:
    """Names of files end at 255 characters."""
    method = "downpour:server_optimiser=sgd:momentum=0.9" + "0" * 300
    said, folder = kept(tmp_path, "simulate", *SHORT, "--method", method)
    assert said.status == 0, said.err
    assert len(folder.name) < 128


# ---------------------------------------------------------------------- runs that are cut short


def interrupted(runs: Path, is_time: Callable[[], bool], *arguments: str) -> Said:
    """Ctrl-C, as the terminal sends it, once the moment has come."""
    process = Program(
        [sys.executable, "-m", "gossamer_command", *arguments, "--runs", str(runs)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        give_up = time.monotonic() + 100
        while not is_time():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "the run never got that far"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return Said(process.returncode, out, err)


def written(runs: Path) -> int:
    """How many runs have written a line of metrics."""
    return sum(1 for path in runs.rglob("metrics.jsonl") if path.read_text())


def test_ctrl_c_leaves_a_readable_simulation(tmp_path: Path) -> None:
    """Everything recorded so far, an end that is called interrupted, and status 130."""
    runs = tmp_path / "runs"
    said = interrupted(runs, lambda: written(runs) == 1, "simulate", "--epochs", "5000", "--json")
    assert said.status == 130
    assert said.out == ""
    assert said.err.endswith("interrupted\n")
    assert "Traceback" not in said.err
    assert "Aborted" not in said.err
    folder = only_folder(runs)
    assert read(folder / "summary.json")["ended"] == "interrupted"
    assert read(folder / "summary.json")["loss"] == rows_of(folder)[-1]["loss"]
    assert read(folder / "config.json")["epochs"] == 5000
    assert len(read(folder / "trace.json")) >= 8


@wide
def test_ctrl_c_shows_what_a_comparison_has_finished(tmp_path: Path) -> None:
    """The table of the finished methods, on the console and in the folder, and status 130; who
    runs first has not won."""
    runs = tmp_path / "runs"
    said = interrupted(
        runs, lambda: written(runs) == 2, "compare", "--methods", "all_reduce ad_psgd easgd",
        "--task", "quadratic", "--lr", "0.1", "--epochs", "80", "--jobs", "1", "--json",
    )  # fmt: skip
    assert said.status == 130, said.err
    assert "Traceback" not in said.err
    verdict = said.json["verdict"]
    assert verdict.startswith("Interrupted when 1 of 3 methods had run, so no winner is named: ")
    assert re.search(r"all_reduce took \S+ s\.$", verdict)
    assert f"\n{verdict}\n" in said.err
    assert [row["method"] for row in said.json["ranking"]] == ["all_reduce"]
    assert said.json["ended"] == "interrupted"
    folder = only_folder(runs)
    assert read(folder / "summary.json") == said.json
    ends = [read(path)["ended"] for path in sorted(folder.glob("*/summary.json"))]
    assert sorted(ends) == ["finished", "interrupted"]
    for run in folder.glob("*/"):
        assert rows_of(run)
        assert read(run / "config.json")["task"] == "quadratic"


@pytest.mark.parametrize("arguments", ["simulate --seeds 2", "compare --methods ad_psgd --lr 0.1"])
def test_a_command_interrupted_before_its_first_result_says_so_on_disk(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the whole command and that of the run both know how they ended."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.commands.console.Reporter.at", press)
    monkeypatch.setattr("gossamer.commands.view.dashboard.Dashboard.at", press)
    said, folder = kept(tmp_path, *arguments.split(), *SHORT[:2])
    assert said.status == 130
    assert read(folder / "summary.json") == {"ended": "interrupted"}
    assert "config.json" in {path.name for path in folder.iterdir()}
    (run,) = folder.glob("*/")
    assert read(run / "summary.json")["ended"] == "interrupted"
    assert len(rows_of(run)) == 1


def test_a_run_that_fails_keeps_what_it_recorded(tmp_path: Path) -> None:
    """With the reason where the end is told."""
    said, folder = kept(
        tmp_path, "simulate", "--method", "all_reduce", "--epochs", "1",
        "--partition", "0-3|4-7@0.05s",
    )  # fmt: skip
    assert said.status == 1
    assert "the run ended: worker" in said.err
    assert "unreachable" in read(folder / "summary.json")["ended"]
    assert rows_of(folder)
    assert read(folder / "trace.json")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "name",
    [
        ".config.json.part", "metrics.jsonl", "trace.json", ".strip.json.part",
        ".model.safetensors.part", ".summary.json.part", ".report.png.part",
    ],
)  # fmt: skip
def test_a_full_disk_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file hits it first; status 2, no traceback, no file half-written. What was
    computed is told before: only a disk that is full from the start costs no run."""

    def create(parent: Path, stem: str) -> RunFolder:
        folder = parent / stem
        folder.mkdir()
        folder.joinpath(name).symlink_to("/dev/full")
        return RunFolder(folder)

    monkeypatch.setattr(RunFolder, "create", staticmethod(create))
    monkeypatch.setattr("gossamer.files.secrets.token_hex", lambda size: "part")
    said, folder = kept(tmp_path, "simulate", *SHORT, "--json")
    assert said.status == 2
    if name != ".config.json.part":
        assert said.json["ended"] == "finished"
        assert f"digest                 {said.json['digest']}" in said.err
    advice = "; make room, or choose other --runs"
    assert said.err.splitlines()[-1].endswith(f"No space left on device{advice}")
    assert "Traceback" not in said.err
    for path in folder.glob("*.json"):
        if path.name != name:
            read(path)
    assert not [path for path in folder.glob(".*") if not path.is_symlink()]


def test_a_disk_that_fills_between_two_runs_does_not_cost_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is printed; then it is told which folder could not be made."""
    make = Path.mkdir

    def fail(path: Path, *arguments: Any, **named: Any) -> None:
        if "seed1" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", fail)
    said, folder = kept(
        tmp_path, "compare", "--methods", "ad_psgd", "--lr", "0.1,0.2", "--epochs", "0.2",
        "--seeds", "2", "--json",
    )  # fmt: skip
    assert said.status == 2
    assert len(said.json["ranking"]) == 1
    assert re.search(r"seed1 cannot be made \(No space left on device\)", said.err.splitlines()[-1])
    assert read(folder / "summary.json")["ranking"]


# ---------------------------------------------------------------------- parts


def test_a_timeline_stops_growing(tmp_path: Path) -> None:
    """After so many spans it ignores more, and still opens; nothing of no length is drawn."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, 1, most_events=10, most_messages=3)
    for start in range(50):
        timeline.computed(0, (start, start), 0, 8, None)
        timeline.computed(0, (start, start + 1), 1, 8, None)
        timeline.carried("send", 0, 1, 8, (10 * start, 10 * start + 5))
        timeline.gathered("all_reduce", [0, 1], (start, start + 1))
    timeline.close()
    timeline.close()
    events = read(path)
    assert sum(event["name"] == "gradient" for event in events) == 10
    assert sum(event["ph"] == "s" for event in events) == 1
    assert sum(event["name"] == "all_reduce of 2 workers" for event in events) == 2
    told = [event["name"] for event in events if event["ph"] == "i"]
    assert told == ["messages are left out from here on"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """Below a file, and through a link that leads nowhere."""
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "at" / "all")
    for place in (file, link):
        with pytest.raises(ConfigurationError, match="cannot be made"):
            RunFolder.create(place, "run")


def test_settings_are_plain_values() -> None:
    """What is written down needs no class to be read."""
    described = make_settings(digits(), "d_psgd:topology=torus", "gpu-nodes-4x8").as_dict()
    assert strict(to_json(described)) == described
