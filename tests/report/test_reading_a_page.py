"""What a reader needs on a page beside its charts: the way around, and what a figure is worth.

Every test fails on any error or warning in the browser's console.
"""

from __future__ import annotations

import pytest
from page_browser import CHROMIUM
from page_sample import LABELS, bare_method, sample_page

from tiers import wide

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; run pip install playwright"
)
expect = playwright_api.expect
pytestmark = [
    pytest.mark.browser,
    wide,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; install chromium"),
]

ADVICE = {
    "reasons": ["easgd takes 1.2 times as long."],
    "next_step": "Train with ad_psgd, the first of the ranking:",
    "command": "gossamer train --method ad_psgd",
    "changes": ["With 4 workers: choose easgd."],
    "scenes": {
        "title": "If one thing differed", "columns": ["change", "first"],
        "rows": [["4 workers", "easgd"]],
    },
}  # fmt: skip
HEAT = {
    "optimiser": "sgd", "key": "accuracy", "rates": [0.01, 0.1, 1.0], "batches": [16, 64],
    "panels": [
        {"delay": delay, "edge": 0.05 if delay else None,
         "cells": [[rate, batch, 0.5 + 0.1 * rate, rate == 2, True]
                   for rate in range(3) for batch in range(2)]}
        for delay in (0, 1, 4, 8)
    ],
}  # fmt: skip
OPTION = "(host) => echarts.getInstanceByDom(host).getOption()"


def alone(**changes):
    """A page of one method."""
    return sample_page(methods=sample_page()["methods"][:1], **changes)


def test_the_contents_lead_to_every_section(opened):
    """One link each, in order; the one to what is folded opens it."""
    page = opened(sample_page()).page
    links = page.locator("nav.contents a")
    headings = page.locator("main > section h2").all_inner_texts()
    assert links.all_inner_texts() == headings
    ids = links.evaluate_all("(all) => all.map((one) => one.getAttribute('href').slice(1))")
    assert ids == page.locator("main > section").evaluate_all("(all) => all.map((one) => one.id)")
    assert not page.locator("#settings table").is_visible()
    page.get_by_role("link", name="All settings").click()
    assert page.locator("#settings table").is_visible()
    page.evaluate("(data) => window.gossamer.render(data)", sample_page(verdict="Otherwise."))
    assert page.locator("#settings table").is_visible()


def test_a_short_page_needs_no_contents(opened):
    page = opened(sample_page(methods=[], grid=None, cluster=None, settings=[])).page
    assert page.locator("nav.contents").count() == 0


def test_long_tables_are_folded_and_short_ones_are_not(opened):
    long = {"title": "Every place", "columns": ["a"], "rows": [[at] for at in range(288)]}
    page = opened(sample_page(tables=[*sample_page()["tables"], long])).page
    assert page.locator("#table-0 table").is_visible()
    assert not page.locator("#table-1 table").is_visible()
    page.get_by_text("Show 288 rows").click()
    assert page.locator("#table-1 table").is_visible()


def test_the_verdict_says_whom_it_speaks_of_when_methods_are_switched_off(opened):
    """It is a sentence about all of them, whichever are shown."""
    page = opened(sample_page()).page
    scope = page.locator(".scope")
    assert not scope.is_visible()
    for label in LABELS[:2]:
        page.get_by_role("button", name=label, exact=True).click()
    assert "all 8 methods; 2 of them are switched off" in scope.inner_text()
    page.get_by_role("button", name="Show all").click()
    assert not scope.is_visible()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ("360 test samples", "0.278 points", "at 95 %", "1.15 points")),
        ({"test_samples": 10_000}, ("10,000 test samples", "0.0100 points", "0.218 points")),
        ({"test_samples": None}, ()),
        ({"score": "loss", "target": 0.2}, ()),
    ],
)
def test_the_page_says_how_far_an_accuracy_can_be_trusted(opened, changes, said):
    """The number of test samples, what one of them is worth, and the standard error sqrt(pq/n)."""
    told = opened(sample_page(**changes)).page.locator(".precision")
    assert told.is_visible() == bool(said)
    words = told.inner_text().replace("\u00a0", " ")
    assert [part for part in said if part not in words] == []


def test_the_advice_is_the_first_result(opened):
    """Before the notices and the race: whom to train with, by a command to copy, and why."""
    page = opened(sample_page(kind="advise", advice=ADVICE)).page
    ids = page.locator("main > *").evaluate_all(
        "(all) => all.map((one) => one.id || one.className)"
    )
    assert ids[:5] == ["advice", "notices", "race", "cost", "changes"]
    assert page.locator("#advice code").inner_text() == ADVICE["command"]
    assert "1.2 times" in page.locator("#advice").inner_text()
    assert ADVICE["changes"][0] in page.locator("#changes").inner_text()
    assert page.locator("#changes tbody tr").count() == 1
    undecided = ADVICE | {"command": "", "changes": [], "scenes": None}
    page = opened(sample_page(kind="advise", advice=undecided)).page
    assert page.locator("#advice .command, #changes").count() == 0
    assert "Train with" not in page.locator("#advice").inner_text()


@pytest.mark.parametrize(("width", "across"), [(1280, 4), (390, 2)])
def test_the_heat_map_is_drawn_with_a_number_in_each_cell(opened, width, across):
    """As text that stays sharp, in as many panels side by side as leave room for it."""
    one = opened(sample_page(methods=[], heat_maps=[HEAT]), width=width)
    host = one.page.locator("#figure-heat-0 .chart")
    words = host.locator("svg text").all_text_contents()
    assert [words.count(text) for text in ("50.0", "60.0", "70.0")] == [8, 8, 8]
    assert {f"delay {delay}" for delay in (0, 1, 4, 8)} <= set(words)
    option = host.evaluate(OPTION)
    assert len({grid["top"] for grid in option["grid"]}) == 4 / across
    # The edge of the first panel is not known.
    assert sum(series["name"] == "predicted edge" for series in option["series"]) == 3
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width


def test_an_edge_that_hides_something_fades(opened):
    """On a phone the legend and wide tables go on beyond the screen, and show that they do."""
    page = opened(sample_page(), width=390).page
    legend = page.locator(".legend")
    assert "swipe" in page.locator(".hint").inner_text()
    expect(legend).to_have_class("legend more")
    legend.evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    expect(legend).to_have_class("legend")
    wide = opened(sample_page()).page
    assert wide.locator(".more").count() == 0
    assert "swipe" not in wide.locator(".hint").inner_text()


def test_a_page_of_one_method_speaks_of_one(opened):
    """Nothing to choose, no plural, and all of its curve is on the picture."""
    page = opened(alone()).page
    assert page.locator("#choose-time").count() == 0
    assert page.locator("#learning h2").inner_text() == "How it learns"
    assert page.locator("#figure-accuracy-time .chart").evaluate(OPTION)["yAxis"][0]["min"] == 0


def test_what_was_measured_once_is_no_curve(opened):
    data = alone()
    for view in data["methods"][0]["curves"].values():
        view["consensus_distance"] = {
            "x": [0.0, 1.0, 2.0], "mean": [0.0, 0.0, 0.02], "low": None, "high": None,
        }  # fmt: skip
    assert opened(data).page.locator("#consensus").count() == 0


@pytest.mark.parametrize("nodes", [["0", "1"], ["0", "server 0"], ["0", "1", "server 0"]])
def test_two_that_talk_are_drawn_apart(opened, nodes):
    """A line of nodes has a width and a height, or the chart would blow it up to a block."""
    method = bare_method("a") | {
        "topology": {"name": "pair", "note": "", "nodes": nodes, "edges": [[0, len(nodes) - 1]]}
    }
    host = opened(sample_page(methods=[method])).page.locator("#figure-topology-0 .chart")
    places = host.evaluate(OPTION)["series"][0]["data"]
    for axis in "xy":
        assert max(one[axis] for one in places) - min(one[axis] for one in places) > 50
    widths = host.locator("svg path").evaluate_all(
        "(all) => all.map((one) => Number(one.getAttribute('stroke-width') || 0))"
    )
    assert max(widths) < 4


def test_the_strip_ends_without_numbers_that_touch(opened):
    """The end of what is shown is a tick only if it is a round number."""
    for end, is_round in ((0.25, True), (0.37139, False)):
        data = alone()
        data["methods"][0]["strip"] |= {"from": 0.0, "to": end}
        axis = opened(data).page.locator("#figure-strip .chart").evaluate(OPTION)["xAxis"][0]
        assert axis["interval"] == 0.05
        assert axis["axisLabel"]["showMaxLabel"] is is_round
