"""What a benchmark does with its figures: it prints, writes and hands them on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any


def tell(found: Any, as_markdown: Callable[[Any], str], arguments: argparse.Namespace) -> None:
    """Print the figures; also as `--write` and `--json` ask."""
    print("\n" + as_markdown(found))
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(found, indent=2) + "\n")
        arguments.write.with_suffix(".md").write_text(as_markdown(found))
    if getattr(arguments, "json", False):
        print(json.dumps(found))
