"""From run folders to the page's data: what was measured, nothing more, whatever the folder."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from run_folders import (
    SLOPES,
    WORKERS,
    method_of,
    rising,
    row,
    settings_of,
    strict,
    write,
    write_comparison,
    write_run,
)

from gossamer import simulate
from gossamer.errors import ConfigurationError
from gossamer.report.page.build import report_data
from gossamer.runs.arrival import arrival, seconds_to

# ---------------------------------------------------------------------- whole folders


def test_what_a_priced_run_spends_is_on_the_page_and_else_nothing_is(tmp_path, compared):
    """The page has what the ranking of its runs says, to the target and in all."""
    assert report_data([compared])["expenses"] == []
    folder = write_comparison(tmp_path / "priced", SLOPES)
    for metrics in folder.glob("*/metrics.jsonl"):
        rate = 3.0 if "ad_psgd" in metrics.parent.name else 1.0
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        for one in rows:
            one["dollars"] = rate * one["virtual_seconds"]
        metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = report_data([folder], target=0.5)
    strict(data)
    quick, thrifty = data["expenses"]
    assert (quick["method"], thrifty["method"]) == ("ad_psgd", "downpour")
    assert quick["to_target"]["dollars"] == pytest.approx(3 * quick["seconds"], rel=1e-2)
    assert thrifty["to_target"]["dollars"] == pytest.approx(thrifty["seconds"], rel=1e-2)
    assert quick["on_front"]
    assert thrifty["on_front"]
    assert data["economy"].startswith("downpour is the cheapest")


class TestAComparison:
    def test_each_method_is_shown_at_its_best_rate(self, compared):
        """The grid names the rate, and the curves are those of its runs."""
        data = report_data([compared])
        strict(data)
        assert data["grid"]["rates"] == [0.1, 0.3]
        assert [(r["method"], r["chosen"]) for r in data["grid"]["rows"]] == [
            ("ad_psgd", 1), ("downpour", 0),
        ]  # fmt: skip
        winner = method_of(data, "ad_psgd")
        assert winner["learning_rate"] == 0.3
        curve = winner["curves"]["time"]["accuracy"]
        assert curve["mean"] == pytest.approx([0.245 * at for at in range(5)])
        assert curve["low"] == pytest.approx([0.24 * at for at in range(5)])
        assert curve["high"] == pytest.approx([0.25 * at for at in range(5)])
        assert winner["curves"]["epochs"]["accuracy"]["x"] == [0.0, 0.5, 1.0, 1.5, 2.0]

    def test_an_accuracy_says_what_it_is_a_share_of(self, compared, tmp_path):
        """The number of test samples, as long as all runs have the same one."""
        assert report_data([compared])["test_samples"] == 360
        config = settings_of() | {"test_samples": 100}
        other = write_run(tmp_path / "other", config, rising(0.2))
        assert report_data([compared, other])["test_samples"] is None

    def test_times_to_the_target_are_those_of_the_statistics(self, compared):
        """The target is 98 % of the best that is held; who misses it with all seeds has no time."""
        data = report_data([compared])
        assert data["target"] == 0.88
        expected = arrival("", [rising(0.24), rising(0.25)], 0.88, "accuracy")
        found = method_of(data, "ad_psgd")["arrival"]
        assert (found["mean"], found["reached"], found["seeds"]) == (expected.mean, 2, 2)
        assert method_of(data, "downpour")["arrival"]["mean"] is None
        assert found["runs"] == list(expected.seconds)
        assert data["verdict"].startswith("Only ad_psgd reaches 88 %")
        assert [method["label"] for method in data["methods"]] == ["ad_psgd", "downpour"]

    def test_a_given_target_counts(self, compared):
        """For the verdict, the bars and the line."""
        data = report_data([compared], target=0.5)
        expected = [seconds_to(rising(slope), 0.5) for slope in (0.15, 0.16)]
        assert data["target"] == 0.5
        mean = math.sqrt(math.prod(expected))
        assert method_of(data, "downpour")["arrival"]["mean"] == pytest.approx(mean)

    def test_the_seed_that_chose_the_rates_is_not_ranked(self, tmp_path):
        """The rates come from its runs, the times from the others; the grid shows what it took."""
        slopes = {
            ("ad_psgd", 0.1, 0): 0.35, ("ad_psgd", 0.3, 0): 0.20,
            ("ad_psgd", 0.1, 1): 0.26, ("ad_psgd", 0.1, 2): 0.25,
            ("downpour", 0.1, 0): 0.15, ("downpour", 0.3, 0): 0.16,
            ("downpour", 0.3, 1): 0.13, ("downpour", 0.3, 2): 0.1252,
        }  # fmt: skip
        folder = write_comparison(tmp_path / "run", slopes, choosing_seed=0)
        data = report_data([folder], target=0.4)
        winner, loser = method_of(data, "ad_psgd"), method_of(data, "downpour")
        assert (winner["learning_rate"], loser["learning_rate"]) == (0.1, 0.3)
        assert winner["arrival"]["runs"] == pytest.approx([0.4 / 0.26, 0.4 / 0.25])
        assert (winner["arrival"]["is_close"], loser["arrival"]["is_close"]) == (True, False)
        assert loser["arrival"]["times"] == pytest.approx((0.26 * 0.25 / 0.13 / 0.1252) ** 0.5)
        seconds = {row["method"]: row["seconds"] for row in data["grid"]["rows"]}
        assert seconds["ad_psgd"] == pytest.approx([0.4 / 0.35, 0.4 / 0.20])
        assert data["verdict"].startswith("ad_psgd reaches 40 % first")
        assert data["missing"] == []
        assert any("edge of the grid" in notice for notice in data["notices"])

    def test_an_interrupted_comparison_has_no_winner(self, tmp_path):
        """Its page says how far it came before it says anything else."""
        folder = write_comparison(tmp_path / "run", SLOPES)
        why = "Interrupted when 2 of 8 methods had run"
        write(folder / "summary.json", {"ended": "interrupted", "cut_short": why})
        assert report_data([folder], target=0.3)["verdict"].startswith(f"{why}, so no winner")

    def test_waiting_has_one_source(self, compared):
        """Table, bar and picture: each worker up to its end, mean over workers and seeds."""
        data = report_data([compared])
        for method in data["methods"]:
            shares = method["shares"]
            assert method["figures"]["waiting_fraction"] == shares["waiting"]
            assert sum(shares.values()) == pytest.approx(1.0)

    def test_a_comparison_keeps_its_own_target(self, compared, tmp_path):
        """What its user asked for is in its summary, and a later report does not forget it."""
        copy = tmp_path / "copy"
        shutil.copytree(compared, copy)
        write(copy / "summary.json", {"task": "digits-mlp", "target": 0.3})
        assert report_data([copy])["target"] == 0.3

    def test_figures_cards_and_staleness_come_from_the_summaries(self, compared):
        """Bytes are per step of the whole run; gradients of all seeds are counted together."""
        method = method_of(report_data([compared]), "ad_psgd")
        assert method["figures"]["accuracy"] == pytest.approx(0.98)
        assert method["figures"]["seconds"] == 4.0
        assert method["cards"][0] == {"name": "worker 0", "sent": 20.0, "received": 10.0}
        assert method["staleness"] == {"0": 6, "1": 14}
        assert method["workers"] == [
            {"computing": 2.0, "waiting": {"peer 1": 1.0}, "other": 1.0, "total": 4.0}
        ] * WORKERS  # fmt: skip
        assert method["output"] == "mean of workers"
        assert (method["status"], method["seeds"]) == ("finished", 2)

    def test_runs_that_did_not_end_are_shown_and_not_judged(self, compared, tmp_path):
        """An interrupted method has its curves; the verdict speaks of the others only."""
        copy = tmp_path / "copy"
        shutil.copytree(compared, copy)
        for folder in copy.glob("ad_psgd-*"):
            config = json.loads((folder / "config.json").read_text())
            write(folder / "summary.json", {"method": config["method"], "ended": "interrupted"})
        data = report_data([copy])
        strict(data)
        assert method_of(data, "ad_psgd")["status"] == "interrupted"
        assert "ad_psgd" not in data["verdict"]
        assert any("ad_psgd" in notice for notice in data["notices"])

    def test_a_rate_with_too_few_seeds_is_left_out(self, compared, tmp_path):
        """As on the console: two seeds against one would not be fair. The page says so."""
        copy = tmp_path / "copy"
        shutil.copytree(compared, copy)
        shutil.rmtree(copy / "ad_psgd-lr0.3-seed1")
        data = report_data([copy])
        assert method_of(data, "ad_psgd")["learning_rate"] == 0.1
        assert any("1 of 8 runs" in line and "seed 1" in line for line in data["missing"])
        assert any("1 of 2 seeds" in line for line in data["missing"])

    def test_failures_are_told(self, compared, tmp_path):
        """With the reason that the run gave."""
        copy = tmp_path / "copy"
        shutil.copytree(compared, copy)
        for folder in copy.glob("downpour-*"):
            write(folder / "summary.json", {"method": "downpour", "ended": "worker 3 is lost"})
        data = report_data([copy])
        assert method_of(data, "downpour")["status"] == "failed"
        assert any("worker 3 is lost" in notice for notice in data["notices"])


class TestOneRun:
    def test_it_has_a_sentence_of_its_own(self, tmp_path):
        """What it came to; a target near its own best would say nothing."""
        data = report_data([write_run(tmp_path / "run", settings_of(), rising(0.2))])
        strict(data)
        assert data["verdict"] == (
            "ad_psgd comes to 80.0 % accuracy after 4.00 virtual s in its only run."
        )
        assert (data["kind"], data["target"], data["grid"]) == ("simulate", None, None)
        (method,) = data["methods"]
        assert method["curves"]["time"]["accuracy"]["low"] is None
        assert method["arrival"] is None
        assert (data["command"], data["missing"]) == ("gossamer simulate", [])

    def test_each_step_has_its_staleness(self, tmp_path):
        """Of a run that was just simulated."""
        result = simulate("quadratic", "downpour", engine="loop", epochs=0.2, evaluations=3)
        end = {**result.summary, "staleness_histogram": result.staleness}
        config = result.settings.as_dict()
        folder = write_run(tmp_path / "run", config, result.history, summary=end)
        (read,) = report_data([folder])["methods"]
        assert sum(read["staleness"].values()) == result.summary["steps"]

    def test_a_run_of_times_only_is_not_called_a_failure(self, tmp_path):
        """Without gradients there are no scores, and nothing is missing."""
        config = settings_of(engine="none")
        end = {"virtual_seconds": 2.0, "steps": 40, "ended": "finished", "epochs": 1.0}
        data = report_data([write_run(tmp_path / "run", config, [], summary=end)])
        assert "nothing was trained" in data["verdict"]
        assert data["missing"] == []
        assert method_of(data, "ad_psgd")["figures"]["steps"] == 40.0

    def test_a_diverged_run_has_no_score(self, tmp_path):
        """Its scores are null, the page's numbers too, and the verdict says why."""
        history = [row(0.0, 0.1), row(1.0, None, loss=None)]
        folder = write_run(tmp_path / "run", settings_of(), history, diverged=True)
        data = report_data([folder])
        strict(data)
        assert method_of(data, "ad_psgd")["status"] == "diverged"
        assert "diverged" in data["verdict"]

    def test_real_workers_tell_seconds_by_the_clock(self, tmp_path):
        """Their books hold what each did; nothing of a simulated network is shown."""
        config = {**settings_of(), "command": "train", "faults": ["slow 1=4"], "transport": "shm"}
        history = [
            {"seconds": at, "epochs": at, "accuracy": 0.3 * at, "loss": 1.0, "output": "mean"}
            for at in (0.0, 1.0, 2.0)
        ]
        end = {"ended": "finished", "steps": 20, "seconds": 2.0, "accuracy": 0.6, "workers": 2}
        folder = write_run(tmp_path / "run", config, history, summary=end)
        (folder / "workers").mkdir()
        for rank in range(2):
            book = {
                "kind": "books", "seconds": 2.0, "computing_seconds": 1.0, "bytes": 100,
                "waiting_seconds": {"server 0": 0.5}, "staleness": {"1": 5},
            }  # fmt: skip
            (folder / "workers" / f"{rank}.jsonl").write_text(json.dumps(book) + "\n")
        data = report_data([folder])
        strict(data)
        assert (data["kind"], data["time"], data["missing"]) == ("train", "seconds", [])
        (method,) = data["methods"]
        assert method["curves"]["time"]["accuracy"]["x"] == [0.0, 1.0, 2.0]
        assert method["workers"][0] == {
            "computing": 1.0, "waiting": {"server 0": 0.5}, "other": 0.5, "total": 2.0,
        }  # fmt: skip
        assert method["cards"][1] == {"name": "worker 1", "sent": 5.0, "received": None}
        assert method["staleness"] == {"1": 10}
        assert [machine["slow"] for machine in data["cluster"]["machines"]] == [1.0, 4.0, 1.0, 1.0]
        assert data["cluster"]["bandwidth"] == ""


# ---------------------------------------------------------------------- several folders


class TestSeveralRuns:
    def test_runs_that_differ_by_seed_are_one_method(self, tmp_path):
        """Three folders, one line with a band, whenever each of them was written."""
        folders = [
            write_run(
                tmp_path / f"run{seed}",
                {**settings_of(seed=seed), "made_with": {"written": f"at second {seed}"}},
                rising(0.2 + 0.01 * seed),
            )
            for seed in range(3)
        ]
        (method,) = report_data(folders)["methods"]
        assert method["seeds"] == 3
        assert method["curves"]["time"]["accuracy"]["high"][-1] == pytest.approx(0.88)

    def test_the_same_simulated_run_counts_once(self, tmp_path):
        """A second copy is no new evidence, and the page says so."""
        folders = [
            write_run(tmp_path / name, settings_of(seed=3), rising(0.2)) for name in ("one", "two")
        ]
        data = report_data(folders)
        assert method_of(data, "ad_psgd")["seeds"] == 1
        assert any("counts once" in notice for notice in data["notices"])

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"learning_rate": 0.3}, ["learning rate 0.1", "learning rate 0.3"]),
            ({"cluster": "one-slow-of-8"}, ["cluster equal-8", "cluster one-slow-of-8"]),
            ({"epochs": 3}, ["epochs 20", "epochs 3"]),
        ],
    )
    def test_equal_labels_are_told_apart_by_what_differs(self, tmp_path, change, expected):
        """One method with other settings is another line of the chart."""
        first = write_run(tmp_path / "one", settings_of(), rising(0.2))
        second = write_run(tmp_path / "two", settings_of(**change), rising(0.25))
        data = report_data([first, second])
        labels = sorted(method["label"] for method in data["methods"])
        assert all(e in label for e, label in zip(expected, labels, strict=True)), labels
        assert data["kind"] == "report"
        assert data["target"] == 0.9

    def test_comparisons_are_merged(self, compared, tmp_path):
        """More seeds of the same methods, and methods that only one of them has."""
        more = {("ad_psgd", 0.3, 7): 0.23, ("ad_psgd", 0.1, 7): 0.2, ("d_psgd", 0.1, 7): 0.1}
        other = write_comparison(tmp_path / "other", more)
        data = report_data([compared, other])
        assert method_of(data, "ad_psgd")["seeds"] == 3
        assert method_of(data, "d_psgd")["seeds"] == 1
        assert len(data["methods"]) == 3

    def test_different_tasks_are_refused_with_both_names(self, tmp_path):
        """Accuracies of different tasks say nothing about each other."""
        one = write_run(tmp_path / "one", settings_of(), rising(0.2))
        config = {**settings_of(), "task": "quadratic"}
        two = write_run(tmp_path / "two", config, rising(0.2))
        with pytest.raises(
            ConfigurationError, match=r"one trains digits-mlp.*two trains quadratic"
        ):
            report_data([one, two])

    def test_simulated_and_real_seconds_are_not_passed_off_as_one(self, tmp_path):
        """They may stand beside each other, with a warning."""
        one = write_run(tmp_path / "one", settings_of(), rising(0.2))
        config = {**settings_of(), "command": "train"}
        two = write_run(tmp_path / "two", config, rising(0.25))
        data = report_data([one, two])
        assert len(data["methods"]) == 2
        assert any("virtual" in notice for notice in data["notices"])
        assert data["verdict"].startswith("Some of these times are virtual")

    @pytest.mark.parametrize("kind", ["nothing", "file"])
    def test_a_path_that_is_no_folder_is_refused(self, tmp_path, kind):
        """Nothing could be on its page."""
        path = tmp_path / "there"
        if kind == "file":
            path.write_text("")
        with pytest.raises(ConfigurationError, match="is a file" if kind == "file" else "exist"):
            report_data([path])
