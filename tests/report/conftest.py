"""A comparison's folder, and a browser, that several files look at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from page_browser import CHROMIUM, FLAGS, Opened, watch
from run_folders import SLOPES, write_comparison

from gossamer.report.page.html_file import write_page


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("runs") / "compared", SLOPES)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One for each file that looks at pages: none is open while others start processes."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        profile = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1280, "height": 900}
        )
        yield context
        context.close()


@pytest.fixture
def opened_file(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a file as a page; it may neither complain nor ask for anything else."""
    pages: list[Opened] = []

    def open_page(path: Path, fragment: str = "", **view: Any) -> Opened:
        one = Opened(browser.new_page())
        pages.append(one)
        watch(one)
        one.page.set_viewport_size({"width": view.get("width", 1280), "height": 900})
        one.page.emulate_media(color_scheme=view.get("scheme", "light"))
        one.page.goto(path.as_uri() + fragment)
        return one

    yield open_page
    for one in pages:
        one.page.close()
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith("file:")] == []
        assert len(one.requests) == 1


@pytest.fixture
def opened(opened_file: Callable[..., Opened], tmp_path: Path) -> Callable[..., Opened]:
    names = itertools.count()

    def open_page(data: dict[str, Any], **view: Any) -> Opened:
        path = tmp_path / f"report-{next(names)}.html"
        write_page(path, cast(Any, data))
        return opened_file(path, **view)

    return open_page
