"""The page with sliders in a real browser: it answers, links, obeys the keyboard, and asks nobody.

Every test fails on any error or warning in the browser's console, and on any request but that for
the page itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from page_browser import CHROMIUM, Opened

from gossamer.config.cluster import load_cluster
from gossamer.config.price import Price
from gossamer.plan.cost.workload import workload_of_bytes
from gossamer.plan.page.planner import PlannerQuestion, planner_html
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
METHODS = ("all_reduce", "local_sgd", "ad_psgd", "downpour")
SLIDERS = [
    "Parameters", "Workers", "Bandwidth", "Latency", "Step, fixed", "Step, per sample", "Batch",
    "Period", "Bits",
]  # fmt: skip
Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 workers on 10 Gbit Ethernet with 100 M parameters, prices and 2 GB of memory."""
    plain = load_cluster("ethernet-10g-16")
    compute = dataclasses.replace(plain.compute, seconds=0.1, per_sample=0.0, memory=2e9)
    price = Price(worker_hour=2.5, watts=400.0, idle_watts=100.0)
    cluster = dataclasses.replace(plain, compute=compute, price=price)
    asked = PlannerQuestion(METHODS, cluster, workload_of_bytes(4e8), (1, 2, 4, 8, 16, 32), None)
    path = tmp_path_factory.mktemp("planner") / "cost.html"
    path.write_text(planner_html(asked), encoding="utf-8")
    return path


def test_the_sentence_at_the_top_follows_the_sliders(opened_file: Open, page_file: Path) -> None:
    """It names the setting, what all-reduce waits, and the best."""
    page = opened_file(page_file).page
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("With 10 Gbit/s, 16 workers and 100 M parameters")
    expect(heading).to_contain_text("all_reduce waits 8")
    slow = heading.inner_text()
    page.get_by_label("Bandwidth", exact=True).first.fill("800 Gbit/s")
    page.keyboard.press("Enter")
    expect(heading).to_contain_text("With 800 Gbit/s")
    assert heading.inner_text() != slow
    assert page.url.endswith("#bandwidth=100000000000")


def test_a_link_brings_back_what_was_asked(opened_file: Open, page_file: Path) -> None:
    """Values, hidden methods and the chosen axis; what is damaged stays at its start."""
    link = "#workers=8&bandwidth=125000000&period=16&hidden=downpour&over=workers&latency=x&bits=99"
    page = opened_file(page_file, link).page
    expect(page.get_by_role("heading", level=1)).to_contain_text("With 1 Gbit/s, 8 workers")
    assert page.locator("#type-period").input_value() == "16"
    assert page.locator("#type-latency").input_value() == "100 µs"
    assert page.locator("#type-bits").input_value() == "32"
    assert page.locator("#choose-axis").input_value() == "number of workers"
    key = page.get_by_role("button", name="downpour", exact=True)
    assert key.get_attribute("aria-pressed") == "false"
    page.get_by_role("button", name="Start again").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("With 10 Gbit/s, 16 workers")
    page.evaluate("() => { location.hash = 'workers=4'; }")
    expect(page.get_by_role("heading", level=1)).to_contain_text("4 workers")


def test_the_keyboard_alone_moves_every_slider(opened_file: Open, page_file: Path) -> None:
    """Tab goes from field to slider in order, arrows move them, and each says its value."""
    page = opened_file(page_file).page
    page.keyboard.press("Tab")
    for name in SLIDERS:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.labels[0].innerText") == name
        page.keyboard.press("Tab")
        active = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert active == name
        slider = page.get_by_role("slider", name=name, exact=True)
        before = slider.get_attribute("aria-valuetext")
        page.keyboard.press("ArrowLeft" if name == "Bits" else "ArrowRight")
        expect(slider).not_to_have_attribute("aria-valuetext", before)
        assert slider.input_value() == page.evaluate("document.activeElement.value")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("Bandwidth", "fast", "Bandwidth must be a number, such as 25 Gbit/s, got fast."),
        ("Workers", "5", "Workers must be one of 1, 2, 4, 8, 16, 32, got 5."),
        ("Bits", "0", "Bits must be from 1 to 64, got 0."),
        ("Step, fixed", "0", "A step must take some time"),
    ],
)
def test_a_wrong_entry_gets_one_sentence_and_changes_nothing(
    opened_file: Open, page_file: Path, name: str, text: str, sentence: str
) -> None:
    """The field keeps what was typed, so that it can be mended."""
    page = opened_file(page_file).page
    heading = page.get_by_role("heading", level=1).inner_text()
    field = page.get_by_label(name, exact=True).first
    field.fill(text)
    field.press("Enter")
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text(sentence)
    assert field.input_value() == text
    assert field.get_attribute("aria-invalid") == "true"
    assert page.get_by_role("heading", level=1).inner_text() == heading
    assert "#" not in page.url


def test_the_table_says_what_fits_and_what_it_costs(opened_file: Open, page_file: Path) -> None:
    """With 2 GB a second copy is too much; dollars are those of 16 workers for an epoch."""
    one = opened_file(page_file)
    heads = one.page.locator("#results thead th").all_inner_texts()
    assert [head.split("\n")[0].strip() for head in heads][-3:] == [
        "dollars an epoch", "energy an epoch", "memory, of 2.00 GB",
    ]  # fmt: skip
    assert sorted(one.column("results", 0)) == sorted(METHODS)
    hours = float(one.column("results", 5)[0].removesuffix(" s")) / 3600
    dollars = float(one.column("results", 6)[0].removeprefix("$"))
    assert dollars == pytest.approx(16 * 2.5 * hours, rel=0.02)
    one.page.locator("#type-parameters").fill("200M")
    one.page.keyboard.press("Enter")
    expect(one.page.locator("#results tbody")).to_contain_text("too many")
    expect(one.page.get_by_role("heading", level=1)).to_contain_text("none fits into a worker")


def test_charts_have_marks_words_and_numbers(opened_file: Open, page_file: Path) -> None:
    """Both charts are drawn, say what they show, and have their numbers as a table."""
    one = opened_file(page_file)
    sizes = one.sizes()
    assert list(sizes) == ["parts", "over"]
    assert all(count >= 8 for count in sizes.values())
    for name in sizes:
        figure = one.page.locator(f"#figure-{name}")
        assert len(figure.locator(".chart").get_attribute("aria-label")) > 40
        figure.locator("summary").click()
        expect(figure.locator("tbody tr").nth(len(METHODS) - 1)).to_be_visible()
    for over in ("number of workers", "model size", "batch", "latency"):
        one.page.locator("#choose-axis").select_option(over)
        expect(one.page.locator("#figure-over h3")).to_contain_text(over)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_never_scrolls_sideways_and_follows_the_theme(
    opened_file: Open, page_file: Path, width: int, scheme: str
) -> None:
    """On a phone as on a wide screen, in both themes."""
    page = opened_file(page_file, width=width, scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    small = page.locator("input[type=range]").evaluate_all(
        "(all) => all.filter((one) => one.getBoundingClientRect().width < 100).length"
    )
    assert small == 0


def test_every_control_has_a_name_of_its_own(opened_file: Open, page_file: Path) -> None:
    """Sliders, fields, buttons and choosers: no two of a kind are called the same."""
    page = opened_file(page_file).page
    for role in ("slider", "textbox", "button", "combobox"):
        names = page.get_by_role(role).evaluate_all(
            "(all) => all.map((one) => one.getAttribute('aria-label')"
            " || (one.labels && one.labels[0] && one.labels[0].innerText) || one.innerText)"
        )
        assert all(names), role
        assert role == "button" or len(set(names)) == len(names)
    assert page.get_by_role("slider").count() == len(SLIDERS)
