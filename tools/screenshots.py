"""Photograph a report for the documentation: on a wide screen, in the dark, on a phone, and inside.

python tools/screenshots.py RUN/report.html docs/pictures

Needs playwright and a Chromium of the system; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light",
              "device_scale_factor": 2, "is_mobile": True, "has_touch": True},
}  # fmt: skip
SECTIONS = {"inside": "#time"}
"""Parts of the page that get a picture of their own, in the light view."""
MARGIN = 24


def photograph(page_file: Path, folder: Path, *, whole: bool) -> list[Path]:
    """One PNG a view, named after the page; `whole` takes all of it, not the first screen.

    And one of each section that the page has.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("screenshots need Chromium, which is not installed; install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    with sync_playwright() as playwright:
        for name, view in VIEWS.items():
            with tempfile.TemporaryDirectory() as profile:
                context = playwright.chromium.launch_persistent_context(
                    profile, executable_path=chromium, args=FLAGS, **view
                )
                page = context.new_page()
                page.goto(page_file.resolve().as_uri())
                page.locator("footer").wait_for()
                made.append(folder / f"{page_file.stem}-{name}.png")
                page.screenshot(path=made[-1], full_page=whole)
                if name == "light":
                    made += _sections(page, folder, page_file.stem)
                context.close()
    return made


def _sections(page: Any, folder: Path, stem: str) -> list[Path]:
    made: list[Path] = []
    # The row of methods sticks to the top and would lie over what is below it.
    page.add_style_tag(content=".legend { position: static !important; }")
    for name, selector in SECTIONS.items():
        box = page.locator(selector).bounding_box() if page.locator(selector).count() else None
        if box is None:
            continue
        clip = {
            "x": box["x"] - MARGIN, "y": box["y"] - MARGIN,
            "width": box["width"] + 2 * MARGIN, "height": box["height"] + 2 * MARGIN,
        }  # fmt: skip
        made.append(folder / f"{stem}-{name}.png")
        page.screenshot(path=made[-1], full_page=True, clip=clip)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description="photograph a report in light, dark, on a phone, and inside"
    )
    parser.add_argument("page", type=Path, help="a report.html")
    parser.add_argument("folder", type=Path, help="where the PNGs go")
    parser.add_argument("--whole", action="store_true", help="the whole page, not one screen of it")
    arguments = parser.parse_args()
    if not arguments.page.is_file():
        raise SystemExit(f"{arguments.page} is not a file; give a report.html")
    for path in photograph(arguments.page, arguments.folder, whole=arguments.whole):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
