"""Published tables of low communication and of compression."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import gossamer
from gossamer.studies.lab import bandwidth
from gossamer.studies.lab.bandwidth import BANDWIDTHS, BandwidthCurve, best_of_kinds, findings
from gossamer.studies.reproductions import TABLES, PublishedCell
from gossamer.studies.reproductions.async_diloco_clock import TIMES_S, arrivals
from gossamer.studies.reproductions.compressed import bits_cliff, cifar10
from gossamer.studies.reproductions.streaming_diloco import points_apart
from gossamer.studies.reproductions.table import mean_cell
from gossamer.studies.reproductions.trainings import Problem
from gossamer.tasks import images
from tiers import wide


def computed(name: str) -> list[PublishedCell]:
    compute = TABLES[name].compute
    assert compute is not None
    return compute(0, lambda _: None)


@wide
def test_the_table_of_bandwidths_is_the_published_one() -> None:
    """At least 65 of its 75 cells to the point, all others one point away."""
    apart = [abs(points_apart(cell)) for cell in computed("streaming-diloco")]
    assert len(apart) == 75
    assert apart.count(0) >= 65
    assert max(apart) == 1


def test_two_rows_of_bandwidths_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.studies.reproductions import streaming_diloco as table

    few = {key: row for key, row in table.PUBLISHED.items() if key[0] == "1B"}
    monkeypatch.setattr(table, "PUBLISHED", few)
    apart = [abs(points_apart(cell)) for cell in computed("streaming-diloco")]
    assert len(apart) == 25
    assert apart.count(0) >= 21
    assert max(apart) <= 1


def test_the_clock_of_four_unequal_workers_is_the_published_one() -> None:
    """Ten times to a hundredth of a second; with another grace period they are others."""
    cells = {cell.row: cell.ours for cell in computed("async-diloco-clock")}
    for number, published in enumerate(TIMES_S, start=1):
        assert cells[f"after {800 * number} steps"] == pytest.approx(published, abs=0.005)
    assert cells["mean staleness"] == pytest.approx(2.75, abs=0.01)
    assert cells["greatest staleness"] == 14
    assert arrivals(0, grace_s=0.0)[0][39] != pytest.approx(TIMES_S[0], abs=0.005)


# ---------------------------------------------------------------------- bits


def losses(**by_row: float) -> list[PublishedCell]:
    return [PublishedCell(row, "seed 0", None, loss) for row, loss in by_row.items()]


def test_the_cliff_is_judged_by_increases() -> None:
    """Above 32 bits, seed by seed; what was not trained is left open."""
    rows = {
        "32 bits": 2.0, "16 bits": 2.0, "8 bits": 2.0, "4 bits": 2.01, "2 bits": 2.6,
        "2 bits, feedback": 2.01, "2 bits, whole numbers": 2.5, "1 bit": 3.0,
        "2 bits, whole numbers, feedback": 2.0, "1 bit, feedback": 2.1,
    }  # fmt: skip
    said = bits_cliff.verdict(losses(**rows))
    assert "2 bits: +30.00 % above 32 bits, published +32 %" in said
    assert said.count(": agrees") == 4
    assert said.count("cannot say") == 0
    steep = bits_cliff.verdict(losses(**(rows | {"2 bits": 2.0})))
    assert "two bits and one without feedback are a cliff (at least 5 %): does not agree" in steep
    assert "feedback helps: does not agree" in steep
    assert bits_cliff.verdict(losses(**{"32 bits": 2.0})).count("cannot say") == 4


@wide
def test_the_cliff_is_trained_on_any_text(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    told = gossamer(
        "reproduce", "bits-cliff", "--data", str(text), "--quick", "--epochs", "0.5", "--jobs", "1",
        "--runs", str(tmp_path), "--json",
    )  # fmt: skip
    assert told.status == 0, told.err
    assert [cell["row"] for cell in told.json["cells"]] == list(bits_cliff.METHODS)
    assert next(tmp_path.glob("*bits-cliff/table.png")).stat().st_size > 1000


# ---------------------------------------------------------------------- CIFAR-10


@pytest.fixture
def tiny_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random images in the form of CIFAR-10, 60 in each file."""
    monkeypatch.setattr(images.read_cifar10, "__defaults__", (60,))
    generator = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        table = generator.integers(0, 256, (60, 3073), dtype=np.uint8)
        table[:, 0] %= 10
        table.tofile(tmp_path / name)
    return tmp_path


@wide
@pytest.mark.parametrize("name", ["powersgd-cifar10", "dgc-cifar10"])
def test_tables_of_error_and_bytes_run_on_a_cpu_and_go_on(
    tiny_cifar: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick part is stopped before it begins, and goes on; the bytes are those of the encoder.
    Both train the small network here, because a step of the large one takes a CPU a minute."""
    table = TABLES[name]
    assert table.trainings is not None
    small = dataclasses.replace(table.trainings, problem=Problem("cifar10-resnet20"))
    monkeypatch.setitem(TABLES, name, dataclasses.replace(table, trainings=small))

    def reproduce(*more: str) -> Any:
        return gossamer(
            "reproduce", name, "--data", str(tiny_cifar), "--jobs", "1", *more, "--json"
        )

    runs = ("--runs", str(tiny_cifar / "runs"))
    stopped = reproduce("--quick", "--epochs", "1", "--minutes", "1e-9", *runs)
    assert stopped.status == 0, stopped.err
    assert stopped.json["ended"] == "stopped"
    (folder,) = (tiny_cifar / "runs").iterdir()
    done = reproduce("--resume", str(folder))
    assert done.json["ended"] == "finished"
    ratios = [c["ours"] for c in done.json["cells"] if c["column"] == "times fewer bytes"]
    assert len(ratios) == 1
    assert ratios[0] > 1


def test_the_order_of_ranks_is_judged_beside_their_levels() -> None:
    def cells(*scores: float) -> list[PublishedCell]:
        rows = ("SGD", "rank 1", "rank 2", "rank 4")
        return [PublishedCell(r, "accuracy %", 94.0, s) for r, s in zip(rows, scores, strict=True)]

    assert cifar10.powersgd_verdict(cells(94.0, 93.0, 94.1, 94.2)).count(": agrees") == 3
    assert cifar10.powersgd_verdict(cells(94.0, 93.0, 92.0, 94.2)).count(": does not agree") == 1


def test_the_words_follow_the_number_of_seeds() -> None:
    """One seed is called one, and two are a mean whose interval is shown."""
    alone = [PublishedCell("SGD", "accuracy %", 94.3, score) for score in (94.0, 94.2)]
    together = mean_cell(alone)
    for verdict in (cifar10.powersgd_verdict, cifar10.dgc_verdict):
        assert "\none seed; accuracies" in verdict(alone[:1])
        said = verdict([together])
        assert "\nmeans of 2 seeds with 95 % intervals; accuracies" in said
        assert "one seed" not in said
    trainings = cifar10.POWERSGD.trainings
    assert trainings is not None
    assert trainings.show(alone[0]) == "94.00 | 94.30"
    assert trainings.show(together) == "94.10 ± 1.27 | 94.30"


# ---------------------------------------------------------------------- against bandwidth


def curve(method: str, kind: str, seconds: list[float]) -> BandwidthCurve:
    return BandwidthCurve(method, kind, (0.1,) * len(seconds), tuple(seconds))


def test_where_one_kind_ends_and_another_begins() -> None:
    """The largest bandwidth from which on down the one is faster by a tenth."""
    count = len(BANDWIDTHS)
    whole = [100.0 / (1 + at) for at in range(count)]
    few = [0.5 * one for one in whole[:4]] + [99.0] * (count - 4)
    curves = [
        curve("all_reduce", "all-reduce", whole),
        curve("all_reduce+int8", "all-reduce, fewer bits", few),
        curve("local_sgd", "local steps", [20.0] * count),
    ]  # fmt: skip
    ends, begin, bits = findings(curves)
    assert ends.startswith("all-reduce of whole gradients ends: at 10 Mbit/s and below")
    assert begin.startswith("local steps begin: at 2.15 Mbit/s and below; at 1 Mbit/s 2.5 times")
    assert bits == "fewer bits are needed: nowhere here"
    assert best_of_kinds(curves)["local steps"][0] == (20.0, "local_sgd")


@wide
def test_the_study_of_bandwidths_stops_goes_on_and_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times fall as bandwidth grows; the stored file alone gives the same table and picture."""
    monkeypatch.setattr(bandwidth, "TRAINED_AT", (BANDWIDTHS[0], BANDWIDTHS[-1]))
    asked = (
        "lab", "bandwidth", "--task", "digits-mlp", "--epochs", "4", "--lr", "0.1", "--optimiser",
        "sgd:momentum=0.9", "--methods", "all_reduce diloco:period=8+int4 ad_psgd", "--jobs", "1",
    )  # fmt: skip
    first = gossamer(*asked, "--minutes", "1e-9", "--runs", str(tmp_path))
    assert first.status == 0, first.err
    (folder,) = tmp_path.iterdir()
    done = gossamer("lab", "bandwidth", "--resume", str(folder), "--jobs", "1", "--json")
    assert done.status == 0, done.err
    assert len(done.json["curves"]) == 3
    stored = json.loads((folder / "bandwidth.json").read_text())
    assert [one["kind"] for one in stored["curves"]] == [
        "all-reduce", "local steps, fewer bits", "gossip"
    ]  # fmt: skip
    seconds = stored["curves"][0]["seconds"]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 5 * seconds[-1]
    (folder / "bandwidth.png").unlink()
    again = gossamer("lab", "bandwidth", "--redraw", str(folder / "bandwidth.json"))
    assert again.status == 0, again.err
    assert (folder / "bandwidth.png").stat().st_size > 1000
    assert all(line in again.out for line in stored["findings"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--redraw", "nowhere.json"), "nowhere.json is not a file of curves"),
        (("--redraw", "a.json", "--seed", "1"), "trains nothing; leave out --seed"),
        (("--methods", "ad_psgd", "--task", "digits-mlp"), "put all_reduce first"),
        (("--methods", "all_reduce+tpok", "--task", "digits-mlp"), "did you mean 'topk'"),
        (("--target", "-1", "--task", "digits-mlp"), "--target must be an accuracy above 0"),
        (("--lr", "fast", "--task", "digits-mlp"), "--lr"),
        (("--minutes", "0", "--task", "digits-mlp"), "minutes must be above 0"),
    ],
)
def test_what_the_study_cannot_do_is_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    told = gossamer("lab", "bandwidth", *arguments, "--runs", "none")
    assert told.status == 2
    assert said in told.err
