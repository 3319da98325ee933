"""Clusters, topologies, settings and the laboratory as a page draws them."""

from __future__ import annotations

import pytest
from run_folders import (
    rising,
    settings_of,
    strict,
    write,
    write_run,
)

from gossamer.config.cluster import load_cluster
from gossamer.methods import METHODS
from gossamer.report.page.build import report_data
from gossamer.report.page.topology import drawn_topology

# ---------------------------------------------------------------------- drawings


class TestDrawings:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("workers", [1, 2, 5, 8])
    def test_every_method_has_a_topology(self, method, workers):
        """Edges join nodes that exist, never a node with itself, each pair once."""
        drawn = drawn_topology(method, workers, {}, "ring")
        pairs = [tuple(sorted(edge)) for edge in drawn["edges"]]
        assert len(set(pairs)) == len(pairs)
        assert all(0 <= a < b < len(drawn["nodes"]) for a, b in pairs)
        servers = [node for node in drawn["nodes"] if node.startswith("server")]
        assert len(servers) == METHODS[method].has_server
        if servers:
            assert {b for _, b in pairs} == {workers}
        assert drawn["note"] or workers == 5

    @pytest.mark.parametrize("collective", ["ring", "tree", "halving_doubling", "butterfly"])
    def test_an_average_over_all_reaches_all(self, collective):
        """Whatever way the sum travels, its lines connect everyone."""
        drawn = drawn_topology("all_reduce", 8, {}, collective)
        reached = {0}
        for _ in range(8):
            reached |= {n for edge in drawn["edges"] if reached & set(edge) for n in edge}
        assert reached == set(range(8))

    def test_a_crowded_graph_is_thinned(self):
        """Above 64 workers at most 400 lines, and the note says so."""
        drawn = drawn_topology("pull_gossip", 100, {}, "ring")
        assert len(drawn["edges"]) == 400
        assert "400 of its 4950" in drawn["note"]
        assert "random peer" in drawn["note"]
        assert len(drawn_topology("pull_gossip", 64, {}, "ring")["edges"]) == 64 * 63 / 2

    def test_groups_average_inside_and_speak_through_their_first(self):
        """Two groups of four: three links inside each, one between the first ones."""
        drawn = drawn_topology("all_reduce:groups=2", 8, {}, "ring")
        assert sorted(map(tuple, drawn["edges"])) == [
            (0, 1), (0, 2), (0, 3), (0, 4), (4, 5), (4, 6), (4, 7),
        ]  # fmt: skip

    def test_shards_are_servers_of_their_own(self):
        """Every worker speaks with every server."""
        drawn = drawn_topology("downpour:servers=3", 4, {}, "ring")
        assert drawn["nodes"][4:] == ["server 0", "server 1", "server 2"]
        assert len(drawn["edges"]) == 12

    def test_a_cluster_shows_what_is_wrong_with_it(self, tmp_path):
        """Slow workers, slow links and deaths at their machines; the network's faults as notes."""
        faults = [
            "slow 0=10",
            "slow-link 1=5",
            "kill 2@1.5s",
            "drop 0.05",
            "partition 0,1|2,3@1s+2s",
        ]
        config = settings_of("downpour", faults=faults)
        data = report_data([write_run(tmp_path / "run", config, rising(0.2))])
        cluster = data["cluster"]
        machines = cluster["machines"]
        assert [machine["slow"] for machine in machines] == [10.0, 1.0, 1.0, 1.0]
        assert [machine["slow_link"] for machine in machines] == [1.0, 5.0, 1.0, 1.0]
        assert [machine["dies"] for machine in machines] == [False, False, True, False]
        assert machines[2]["notes"] == ["worker 2 dies at 1.5 s"]
        assert (cluster["servers"], cluster["bandwidth"]) == (1, "10 Gbit/s")
        assert any("5 %" in note for note in cluster["notes"])
        assert any("workers 0, 1 and workers 2, 3" in note for note in cluster["notes"])

    def test_workers_share_machines_and_machines_share_racks(self, tmp_path):
        """Five workers, two to a machine, two machines to a rack."""
        config = settings_of()
        config["cluster"] |= {"workers": 5, "workers_per_machine": 2, "machines_per_rack": 2}
        data = report_data([write_run(tmp_path / "run", config, rising(0.2))])
        machines = data["cluster"]["machines"]
        assert [(machine["workers"], machine["place"]) for machine in machines] == [
            ([0, 1], "rack 0"), ([2, 3], "rack 0"), ([4], "rack 1"),
        ]  # fmt: skip

    def test_machines_stand_at_their_sites_and_notes_say_what_is_between(self, tmp_path):
        """Names instead of numbers; rates and times of the matrix; who else uses the links."""
        config = settings_of()
        config["cluster"] |= load_cluster("home-dsl-8").as_dict()
        config["cluster"] |= {"sites": load_cluster("halos-geo-16").as_dict()["sites"]}
        cluster = report_data([write_run(tmp_path / "run", config, rising(0.2))])["cluster"]
        assert [machine["place"] for machine in cluster["machines"]] == [
            f"region{place // 2}" for place in range(8)
        ]
        assert cluster["bandwidth"] == "40 Mbit/s up, 100 Mbit/s down"
        assert cluster["notes"] == [
            "Between two sites one flow can have 117 Mbit/s to 935 Mbit/s.",
            "A message to another site takes 30 ms before its first byte.",
            "Others take 25 % of each card, for 600 s every 1200 s on average.",
            "Each worker computes 1.5 times slower for 120 s every 600 s on average.",
        ]

    def test_settings_hold_everything_that_decided_the_run(self, compared):
        """Every value of config.json, with units; what differs names whose it is."""
        listed = {one["name"]: one["value"] for one in report_data([compared])["settings"]}
        assert listed["methods"] == "ad_psgd, downpour"
        assert listed["learning rates"] == "0.1, 0.3"
        assert listed["seeds"] == "0, 1"
        assert listed["cluster network latency"] == "100 us"
        assert listed["cluster compute seconds"] == "2 ms"
        assert listed["largest gradient norm"] == "none"
        assert listed["downpour: n push"] == "1"
        config = settings_of("downpour")
        total = sum(
            len(value) if isinstance(value, dict) else 1
            for part in (config, *(config["cluster"][key] for key in ("compute", "network")))
            for value in part.values()
        )
        assert len(listed) >= total - len(config["method_options"])


# ---------------------------------------------------------------------- the laboratory


class TestLaboratory:
    def test_staleness_is_shown_as_histograms(self, tmp_path):
        """Of the Monte-Carlo and of the simulation."""
        write(tmp_path / "config.json", {"workers": 4, "updates": 10, "command_line": "gossamer"})
        write(tmp_path / "summary.json", {
            "workers": 4, "expected_mean": 3, "mean_staleness": 2.9,
            "staleness_histogram": {"2": 3, "3": 7},
            "monte_carlo": {"mean": 3.1, "histogram": {"3": 9, "4": 1}},
        })  # fmt: skip
        data = report_data([tmp_path])
        strict(data)
        assert [method["staleness"] for method in data["methods"]] == [
            {"3": 9, "4": 1}, {"2": 3, "3": 7},
        ]  # fmt: skip
        assert "workers − 1 = 3" in data["verdict"]
        assert data["kind"] == "lab"

    def test_pictures_are_inside_the_page_and_damaged_ones_are_not(self, tmp_path):
        """A page opens without its folder."""
        write(tmp_path / "config.json", {"table": "some-table", "command_line": "gossamer"})
        cell = {"row": "r", "column": "c", "published": 2.0, "ours": 1.0, "deviation": -0.5}
        write(tmp_path / "summary.json", {"cells": [cell]})
        (tmp_path / "table.png").write_bytes(b"\x89PNG and so on")
        (tmp_path / "other.png").write_bytes(b"text")
        data = report_data([tmp_path])
        assert len(data["pictures"]) == 1
        assert data["missing"] == ["other.png was left out: it is damaged."]
        assert data["tables"][0]["rows"] == [["r", "c", 2.0, 1.0, -50.0, ""]]
        assert "0.50 to 0.50 in the 1 cells" in data["verdict"]

    @pytest.mark.parametrize("mark", [{"grid": {}}, {"scenes": []}, {"updates": 1}, {"table": "t"}])
    def test_a_laboratory_without_results_says_so(self, tmp_path, mark):
        """Its settings are shown, and that summary.json is not there."""
        write(tmp_path / "config.json", {**mark, "task": "digits-mlp"})
        data = report_data([tmp_path])
        strict(data)
        assert any("summary.json" in line for line in data["missing"])
        assert data["verdict"] == "There is no result yet."
