"""The page in a real browser: it draws, toggles, sorts, obeys the keyboard, and asks nobody.

Every test fails on any error or warning in the browser's console, and on any request but that for
the page itself.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
from page_browser import CHARTS, CHROMIUM, HELD, Opened
from page_sample import LABELS, bare_method, sample_page

from gossamer.report.page.html_file import page_html
from tiers import wide

playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; run pip install playwright"
)
# Not wait_for_function: it evaluates text in the page, which the page's policy forbids.
expect = playwright_api.expect
pytestmark = [
    pytest.mark.browser,
    wide,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; install chromium"),
]
HOSTILE = '</script><img src=x onerror="window.harm=1"><svg onload="window.harm=1">'


def test_every_chart_has_marks(opened):
    """A full comparison shows every chart, and none of them is empty."""
    sizes = opened(sample_page()).sizes()
    assert list(sizes) == CHARTS
    assert {name: count for name, count in sizes.items() if count < 8} == {}


def test_every_chart_says_in_words_what_it_shows(opened):
    """Charts have a label, a caption, and their numbers as a table for who cannot see them."""
    page = opened(sample_page()).page
    for name in CHARTS:
        figure = page.locator(f"#figure-{name}")
        assert len(figure.locator(".chart").get_attribute("aria-label")) > 40
        assert len(figure.locator("figcaption").inner_text()) > 20
    page.evaluate(
        "() => document.querySelectorAll('details').forEach((one) => { one.open = true; })"
    )
    tables = page.locator("details.numbers table")
    expect(tables).to_have_count(len(CHARTS))
    assert tables.filter(has=page.locator("tbody tr")).count() == len(CHARTS)


def test_a_toggled_method_leaves_all_charts_and_comes_back(opened):
    """One press in the legend takes a method out of every chart; another brings it back."""
    one = opened(sample_page())
    whole = one.page.evaluate(HELD)
    assert sum(f'"{LABELS[2]}"' in held for _, held in whole) >= 10
    key = one.page.get_by_role("button", name=LABELS[2], exact=True)
    key.click()
    assert key.get_attribute("aria-pressed") == "false"
    assert [name for name, held in one.page.evaluate(HELD) if f'"{LABELS[2]}"' in held] == []
    assert LABELS[2] not in one.page.locator("#choose-time").inner_text()
    one.page.get_by_role("button", name="Show all").click()
    assert key.get_attribute("aria-pressed") == "true"
    assert one.page.evaluate(HELD) == whole


def test_all_methods_switched_off_leave_a_word_of_explanation(opened):
    """Without any method there are no charts, but a sentence on how to get them back."""
    one = opened(sample_page())
    for label in LABELS:
        one.page.get_by_role("button", name=label, exact=True).click()
    assert one.sizes() == {}
    assert one.page.get_by_role("status").is_visible()
    one.page.get_by_role("button", name="Show all").click()
    assert list(one.sizes()) == CHARTS


def test_tables_sort_as_numbers_both_ways(opened):
    """A press on a heading sorts by value, not by letters; a second one turns the order."""
    one = opened(sample_page())
    heading = one.page.locator("#results thead th").filter(has_text="run time")
    heading.get_by_role("button").click()
    rising = [float(text.removesuffix(" s")) for text in one.column("results", 4)]
    assert rising == sorted(rising)
    assert rising[0] < 100 < rising[-1]
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.get_by_role("button").click()
    assert [float(text.removesuffix(" s")) for text in one.column("results", 4)] == rising[::-1]
    assert heading.get_attribute("aria-sort") == "descending"


def test_what_is_missing_sorts_last_either_way(opened):
    """A method that never reached the target stands below the others, in both orders."""
    one = opened(sample_page())
    heading = one.page.locator("#results thead th").nth(1).get_by_role("button")
    for _ in range(2):
        heading.click()
        assert one.column("results", 1)[-1] == "not reached"


def test_the_keyboard_alone_toggles_and_sorts(opened):
    """Tab reaches contents, legend and headings in order; Enter and Space press them."""
    page = opened(sample_page()).page
    words = "() => document.activeElement.innerText"
    reached: list[str] = []
    for _ in range(45):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(words).strip())
        if reached[-1] == LABELS[0]:
            page.keyboard.press("Enter")
        if reached[-1] == "final loss":
            page.keyboard.press("Space")
            break
    sections = page.locator("main > section h2").all_inner_texts()
    assert reached[: 1 + len(sections) + len(LABELS)] == ["Dark", *sections, *LABELS]
    key = page.get_by_role("button", name=LABELS[0], exact=True)
    assert key.get_attribute("aria-pressed") == "false"
    sorted_by = page.locator("#results th[aria-sort=ascending]")
    assert sorted_by.inner_text().startswith("final loss")
    assert page.evaluate(words).startswith("final loss")


def test_rendering_again_keeps_what_the_reader_chose(opened):
    """New data leave toggles, choices, sort order, focus and the place on the page alone."""
    one = opened(sample_page())
    page = one.page
    page.get_by_role("button", name=LABELS[1], exact=True).click()
    page.locator("#choose-time").select_option(LABELS[3])
    page.locator("#results thead th").nth(2).get_by_role("button").click()
    page.evaluate("window.scrollTo({top: 2400, behavior: 'instant'})")
    place = "() => Math.round(document.querySelector('#results h2').getBoundingClientRect().top)"
    seen_at = page.evaluate(place)
    newer = sample_page(verdict="It is otherwise.")
    newer["methods"] = [*copy.deepcopy(newer["methods"]), bare_method("late")]
    before = one.column("results", 0)
    page.evaluate("(data) => window.gossamer.render(data)", newer)
    page.evaluate("(data) => window.gossamer.render(data)", newer)
    assert page.locator("h1").inner_text() == "It is otherwise."
    key = page.get_by_role("button", name=LABELS[1], exact=True)
    assert key.get_attribute("aria-pressed") == "false"
    assert page.locator("#choose-time").input_value() == LABELS[3]
    assert [name for name, held in page.evaluate(HELD) if f'"{LABELS[1]}"' in held] == []
    assert one.column("results", 0) == [*before, "late"]
    # The verdict is shorter now: what the reader looks at must stand where it stood, but for the
    # fractions of a pixel by which browsers do not scroll.
    assert abs(page.evaluate(place) - seen_at) <= 1
    assert page.evaluate("document.activeElement.innerText").startswith("final accuracy")
    assert list(one.sizes()) == CHARTS


def test_the_strip_shows_the_method_that_is_chosen(opened):
    """Choosing a method redraws the strip and the workers' bars, and nothing else."""
    page = opened(sample_page()).page
    page.locator("#choose-time").select_option("ad_psgd")
    for name in ("strip", "workers"):
        assert page.locator(f"#figure-{name} h3").inner_text().endswith("under ad_psgd")


def test_hovering_shows_values(opened):
    """Over a chart a box names the methods with their values there."""
    page = opened(sample_page()).page
    page.locator("#figure-accuracy-epochs .chart").hover(position={"x": 300, "y": 100})
    tip = page.locator("#figure-accuracy-epochs .tip")
    tip.wait_for()
    assert "epochs" in tip.inner_text()
    assert LABELS[0] in tip.inner_text()
    assert "%" in tip.inner_text()


def test_the_waiting_of_a_worker_names_whom_it_waits_for(opened):
    """Over a stripe of the strip stands for whom the worker waits."""
    page = opened(sample_page()).page
    host = page.locator("#figure-strip .chart")
    host.scroll_into_view_if_needed()
    host.hover(position={"x": 160, "y": 44})
    tip = page.locator("#figure-strip .tip")
    tip.wait_for()
    assert "worker 5" in tip.inner_text()


def test_labels_that_look_like_code_are_only_words(opened):
    """A hostile text in every place runs nothing and is shown as it is, in tooltips too."""
    data = sample_page(verdict=HOSTILE, notices=[HOSTILE], command=HOSTILE, title=HOSTILE)
    data["methods"][0]["label"] = HOSTILE
    data["methods"][0]["topology"]["name"] = HOSTILE
    data["methods"][0]["strip"]["segments"][1][4] = HOSTILE
    data["cluster"]["machines"][0]["name"] = HOSTILE
    data["tables"][0]["rows"][0][1] = HOSTILE
    data["settings"][0]["value"] = HOSTILE
    one = opened(data)
    for name, place in (
        ("accuracy-epochs", (300, 100)),
        ("arrivals", (425, 20)),
        ("strip", (160, 44)),
    ):
        host = one.page.locator(f"#figure-{name} .chart")
        host.hover(position={"x": place[0], "y": place[1]})
        one.page.locator(f"#figure-{name} .tip").wait_for()
    assert one.page.evaluate("window.harm") is None
    assert one.page.locator("#page img").count() == 0
    assert one.page.locator("[onerror], [onload]").count() == 0
    assert one.page.locator("h1").inner_text() == HOSTILE
    assert next(iter(one.sizes())) == CHARTS[0]


def test_a_page_without_methods_shows_the_rest(opened):
    """A laboratory's page has pictures and tables only; there is no legend and no empty frame."""
    dot = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADU"
        "lEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    picture = {"title": "Heat-map", "alt": "rates against delays", "png": dot}
    one = opened(sample_page(methods=[], grid=None, cluster=None, target=None, pictures=[picture]))
    assert one.sizes() == {}
    assert one.page.locator(".legend, .hint").count() == 0
    assert one.page.get_by_role("img", name="rates against delays").is_visible()
    headings = one.page.locator("h2").all_inner_texts()
    assert headings == [
        "Good to know",
        "Pictures",
        "What would change the answer",
        "All settings",
        "Reproduce it",
    ]


def test_a_page_of_nothing_but_nulls_still_opens(opened):
    """Each part may be null or empty, alone and all at once."""
    keys = [
        key for key in sample_page() if key not in ("is_growing", "title", "verdict", "command")
    ]
    opened(sample_page(**dict.fromkeys(keys), title="", verdict="", command=""))
    one = opened(sample_page(methods=[bare_method("a"), bare_method("b")], cluster=None, grid=None))
    assert one.sizes() == {}
    assert one.column("results", 0) == ["a", "b"]


def test_holes_in_the_data_leave_the_rest_standing(opened):
    """Nulls inside of curves, arrivals, workers and cards cost their own mark and no other."""
    data = sample_page(missing=["summary.json of ad_psgd is damaged"])
    first = data["methods"][0]
    for view in first["curves"].values():
        view["accuracy"] |= {"low": None, "high": None}
        view["loss"]["mean"] = [None] * 60
        view["training_loss"]["mean"][::2] = [None] * 30
    first["arrival"] = {"mean": None, "low": None, "high": None, "reached": 1, "seeds": 3}
    first["workers"] = [{"computing": None, "waiting": {}, "other": None, "total": None}]
    first["cards"][0] = {"name": "worker 0", "sent": None, "received": None}
    first["figures"] = dict.fromkeys(first["figures"])
    one = opened(data)
    one.page.locator("#choose-time").select_option(first["label"])
    assert list(one.sizes()) == CHARTS[:6] + CHARTS[7:]
    assert "1 of 3 seeds" in one.column("results", 1)
    assert "summary.json of ad_psgd is damaged" in one.page.locator(".notices").inner_text()


def test_dark_follows_the_system_until_the_button_is_pressed(opened):
    """The page turns dark with the system and back; the button overrules it."""
    page = opened(sample_page(), scheme="dark").page
    theme = "() => document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="dark")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(theme) == "dark"


@pytest.mark.parametrize("width", [390, 1024, 1280])
def test_the_results_fit_without_scrolling(opened, width):
    """Whoever looks for a figure of a method has it on the screen, named, at any usual width."""
    one = opened(sample_page(), width=width)
    widths = """(boxes) => boxes.map((box) => box.scrollWidth - box.clientWidth)"""
    assert one.page.locator("#results .table").evaluate_all(widths) == [0, 0]
    waiting = one.page.locator("#results td[data-title=waiting]").first
    assert waiting.inner_text() == "4.0 %"
    one.page.get_by_role("button", name="final loss", exact=True).click()
    assert one.column("results", 0)[0] == "all_reduce"


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_no_width_makes_the_page_scroll_sideways(opened, width):
    """Wide tables scroll in boxes of their own, and charts keep to the width of the screen."""
    one = opened(sample_page(), width=width)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    one.page.set_viewport_size({"width": 390, "height": 800})
    expect(one.page.locator(".chart svg").first).to_have_attribute("width", "358")
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_growing_page_asks_its_own_server_until_the_run_ends(browser):
    """Every two seconds it asks for data.json; a failure is borne; the last data end the asking."""
    address, asked = "http://growing.test/", []
    one = Opened(browser.new_page())
    one.page.on("pageerror", lambda error: one.complaints.append(str(error)))

    def answer(route: Any) -> None:
        asked.append(route.request.url.removeprefix(address))
        if asked[-1] == "report.html":
            page = page_html(cast(Any, sample_page(is_growing=True, verdict="At first.")))
            route.fulfill(body=page, content_type="text/html")
        elif len(asked) == 2:
            route.abort()
        else:
            route.fulfill(
                json=sample_page(is_growing=len(asked) < 4, verdict=f"Answer {len(asked)}.")
            )

    one.page.route("**/*", answer)
    one.page.clock.install()
    one.page.goto(address + "report.html")
    for count in (2, 3, 4):
        with one.page.expect_event("request"):
            one.page.clock.run_for(2000)
        if count > 2:
            one.page.get_by_text(f"Answer {count}.").wait_for()
        else:
            one.page.evaluate("() => new Promise((done) => { Promise.resolve().then(done); })")
    one.page.clock.run_for(20_000)
    assert asked == ["report.html", "data.json", "data.json", "data.json"]
    assert one.complaints == []
    one.page.close()


def test_the_command_is_copied(opened, browser):
    """The button puts the exact command on the clipboard, or selects it where that is refused."""
    page = opened(sample_page()).page
    page.get_by_role("button", name="Copy").click()
    expect(page.locator(".copy")).not_to_have_text("Copy")
    assert page.locator(".copy").inner_text() in ("Copied", "Selected: press Ctrl+C")


def test_paper_is_white(opened):
    """Printed from a dark screen the page turns light, and dark again afterwards."""
    page = opened(sample_page(), scheme="dark").page
    theme = "() => document.documentElement.dataset.theme"
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(theme) == "light"
    page.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(theme) == "dark"


def test_workers_that_agree_up_to_rounding_do_not_flatten_the_others(opened):
    """The axis of consensus distances ends four decades below the top and names who is below it."""
    data = sample_page()
    for view in data["methods"][1]["curves"].values():
        view["consensus_distance"] |= {"mean": [1e-8] * 60, "low": None, "high": None}
    page = opened(data).page
    figure = page.locator("#figure-consensus_distance-time")
    assert "Below the axis: d_psgd" in figure.locator("figcaption").inner_text()
    script = "(host) => echarts.getInstanceByDom(host).getOption().yAxis[0].min"
    assert figure.locator(".chart").evaluate(script) > 1e-6
