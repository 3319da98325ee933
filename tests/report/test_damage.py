"""Run folders that were cut, overwritten or killed over: the page shows what is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import (
    SLOPES,
    few,
    method_of,
    rising,
    settings_of,
    strict,
    write,
    write_comparison,
    write_run,
)

from gossamer.report.page.build import report_data
from gossamer.runs.kept_runs import read_folder

# ---------------------------------------------------------------------- damage


class TestDamage:
    def test_an_empty_folder_has_a_page_that_says_so(self, tmp_path):
        """No methods, and the reason."""
        data = report_data([tmp_path])
        strict(data)
        assert data["methods"] == []
        assert any("holds no run" in line for line in data["missing"])

    @few
    @given(data=st.data())
    def test_no_damage_to_a_folder_is_an_error(self, data, tmp_path_factory):
        """Any file cut anywhere, overwritten or gone: the page shows the rest as strict JSON."""
        folder = tmp_path_factory.mktemp("damaged") / "run"
        write_comparison(folder, {("ad_psgd", 0.1, 0): 0.2, ("downpour", 0.1, 0): 0.1})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        victim = data.draw(st.sampled_from(files))
        raw = victim.read_bytes()
        match data.draw(st.sampled_from(["cut", "rubbish", "gone", "list", "wrong"])):
            case "cut":
                # Whole lines less look like a younger run, so the cut goes through one.
                kept = raw[: data.draw(st.integers(1, len(raw) - 2))].rstrip(b"\n")
                victim.write_bytes(kept[:-1] if kept.endswith(b"}") else kept)
            case "rubbish":
                victim.write_bytes(data.draw(st.binary(min_size=1, max_size=40)) + b"\xff{")
            case "gone":
                victim.unlink()
            case "list":
                victim.write_text("[1, 2]\n")
            case "wrong":
                keys = ("cluster", "method", "learning_rate", "epochs", "virtual_seconds", "cards",
                        "runs", "seeds", "method_options", "ended", "accuracy")  # fmt: skip
                odd = data.draw(st.sampled_from([None, "x", -1, [], {}, [None], {"a": []}, 1e308]))
                victim.write_text(json.dumps(dict.fromkeys(keys, odd)) + "\n")
                strict(report_data([folder]))
                return
        found = report_data([folder])
        strict(found)
        assert found["missing"]
        assert found["methods"]

    def test_a_half_written_line_costs_that_line_only(self, tmp_path):
        """A run killed over a line keeps all others."""
        folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"virtual_seconds": 5.0, "epo')
        data = report_data([folder])
        assert len(method_of(data, "ad_psgd")["curves"]["time"]["accuracy"]["x"]) == 5
        assert any("half-written" in line for line in data["missing"])

    def test_a_killed_run_is_unfinished_and_a_growing_one_is_running(self, tmp_path):
        """Nobody wrote its end; only who watches knows whether it still goes on."""
        folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
        (folder / "summary.json").unlink()
        data = report_data([folder])
        assert method_of(data, "ad_psgd")["status"] == "unfinished"
        assert "unfinished" in data["verdict"]
        growing = report_data([folder], is_growing=True)
        assert method_of(growing, "ad_psgd")["status"] == "running"

    def test_numbers_that_are_none_are_left_out(self, tmp_path):
        """Texts, truth values and numbers beyond floats in place of scores do no harm."""
        folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"virtual_seconds": 5, "epochs": 2.5, "accuracy": "high"}\n')
            file.write('{"virtual_seconds": 6, "epochs": 3, "accuracy": 1%s}\n' % ("0" * 400))
            file.write('{"virtual_seconds": NaN, "epochs": 3}\n')
            file.write("[" * 100_000 + "\n")
        data = report_data([folder])
        strict(data)
        assert method_of(data, "ad_psgd")["curves"]["time"]["accuracy"]["x"][-1] == 4.0
        assert len(data["missing"]) == 2


# ---------------------------------------------------------------------- sizes


@few
@given(points=st.integers(1, 900))
def test_a_curve_has_few_points_and_keeps_its_ends(points, tmp_path_factory):
    """However often a run was evaluated."""
    folder = tmp_path_factory.mktemp("long") / "run"
    write_run(folder, settings_of(), rising(1 / 900, points))
    curve = report_data([folder])["methods"][0]["curves"]["time"]["accuracy"]
    assert len(curve["x"]) == min(points, 300)
    assert (curve["x"][0], curve["x"][-1]) == (0.0, points - 1)
    assert curve["x"] == sorted(set(curve["x"]))


def test_a_long_strip_ends_earlier_for_all_workers(tmp_path):
    """At most 3,000 stripes, none beyond the end, and no worker is cut out."""
    folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
    segments = [
        [rank, float(at), at + 1.0, "computing", ""] for rank in range(4) for at in range(1000)
    ]
    segments += [[0, 3.0, 2.0, "computing", ""], [0, 1.0, 2.0, "dancing", ""], "rubbish"]
    strip = {"from": 0.0, "to": 1000.0, "segments": segments, "servers": 0}
    write(folder / "strip.json", strip)
    shown = report_data([folder])["methods"][0]["strip"]
    assert len(shown["segments"]) == 3000
    assert shown["to"] == 750.0
    assert {segment[0] for segment in shown["segments"]} == {0, 1, 2, 3}
    assert all(segment[2] <= shown["to"] for segment in shown["segments"])


def test_a_folder_is_read_without_being_changed(tmp_path):
    """Reading leaves every byte and every name as it was."""

    def everything() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    folder = write_comparison(tmp_path / "run", SLOPES)
    before = everything()
    assert len(read_folder(folder).runs) == len(SLOPES)
    assert everything() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without an end")
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "strip.json"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path, name):
    """A device in a file's place would never end."""
    folder = write_run(tmp_path / "run", settings_of(), rising(0.2))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/full")
    data = report_data([folder])
    assert any(f"{name} was left out: it is no ordinary file" in line for line in data["missing"])
