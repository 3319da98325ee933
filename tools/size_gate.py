"""Fail when a file or a function outgrows what one reader holds in mind.

Files under 500 lines, functions under 70, a method of `gossamer.methods` under 60.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 70
METHOD_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")


def complaints(path: Path) -> list[str]:
    """Every place in one file that is too long."""
    text = path.read_text(encoding="utf-8")
    where = path.relative_to(ROOT)
    found: list[str] = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{where}: {lines} lines, at most {FILE_LINES}")
    limit = METHOD_LINES if "methods" in path.parts else FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append(f"{where}:{node.lineno} {node.name}: {length} lines, at most {limit}")
    return found


def main() -> int:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [line for path in files for line in complaints(path)]
    for line in found:
        print(line)
    total = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    print(f"size gate: {len(files)} files, {total} lines, {len(found)} too long")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
