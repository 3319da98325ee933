"""The forms of the page, run by node or, where that is missing, by Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "neither node nor Chromium with playwright is installed; install one of them"


def has_engine() -> bool:
    if NODE is not None:
        return True
    try:
        import playwright  # noqa: F401
    except ImportError:
        return False
    return CHROMIUM is not None


def run_javascript(text: str, folder: Path) -> Any:
    """The value of a script, whose last line is an expression."""
    body, _, last = text.rstrip().rpartition("\n")
    script = f'"use strict";\n{body}\nconst told = {last};\n'
    if NODE is not None:
        place = folder / "script.js"
        place.write_text(f"{script}console.log(JSON.stringify(told));\n", encoding="utf-8")
        done = subprocess.run([NODE, place], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        found = browser.new_page().evaluate(f"() => {{ {script} return JSON.stringify(told); }}")
        browser.close()
    return json.loads(found)
