"""Print how large the house is, before and after, as the table of `docs/design.md`.

    python tools/house_table.py COMMIT             sizes at COMMIT beside those of the working tree
    python tools/house_table.py COMMIT --walks     also one step of each of the three walks

A walk is one step of a run as `sys.setprofile` sees it: how many files of the package take part,
and how often the file changes from one call to the next. COMMIT is walked in a checkout of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WALKS = {
    "simulate (ad_psgd)": "simulate",
    "join on shm (all_reduce)": "shm",
    "join over torch (ad_psgd)": "torch",
}


def python_files(root: Path) -> list[Path]:
    return sorted((root / "src" / "gossamer").rglob("*.py"))


def folder_of(path: Path, root: Path) -> str:
    """The folder as the table names it; what lies at the top of the package is `(top)`."""
    return str(path.parent.relative_to(root / "src" / "gossamer")).replace(".", "(top)", 1)


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """Files and lines of each folder."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in python_files(root):
        found[folder_of(path, root)].append(path.read_text(encoding="utf-8").count("\n"))
    return {folder: (len(lines), sum(lines)) for folder, lines in found.items()}


def shared_class_names(root: Path) -> int:
    """How many names stand for more than one class."""
    names = Counter(
        node.name
        for path in python_files(root)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return sum(count > 1 for count in names.values())


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The tree of a commit, in a folder that goes away again."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", commit, "src"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def walk(root: Path, kind: str) -> dict[str, int]:
    """Files and changes of file of one step, counted by `walk_steps.py`."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "walk.json"
        program = [str(ROOT / "tools" / "walk_steps.py"), kind, str(found)]
        command = [sys.executable, *program]
        if kind != "simulate":
            start = "from gossamer_command import main; main()"
            command = [
                sys.executable, "-c", start, "run", "-n", "2", "--transport", kind, *program,
            ]  # fmt: skip
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(found.read_text())


def table(before: Path, *, walks: bool) -> str:
    """The whole table as Markdown."""
    old, new = sizes(before), sizes(ROOT)
    rows = [("folder", "files before", "lines before", "files", "lines")]
    for folder in sorted(old.keys() | new.keys()):
        counts = (*old.get(folder, (0, 0)), *new.get(folder, (0, 0)))
        rows.append((f"`{folder}`", *(f"{count:,}" if count else "" for count in counts)))
    for name, prefix in (("all", ""), ("`real/` and below", "real")):
        counts = [
            sum(size[place] for folder, size in tree.items() if folder.startswith(prefix))
            for tree in (old, new)
            for place in (0, 1)
        ]
        rows.append((f"**{name}**", *(f"**{count:,}**" for count in counts)))
    rows.append(("", "", "", "", ""))
    largest = [max(files for files, _ in tree.values()) for tree in (old, new)]
    shared = [shared_class_names(tree) for tree in (before, ROOT)]
    rows.append(("files in the largest folder", str(largest[0]), "", str(largest[1]), ""))
    rows.append(("names of more than one class", str(shared[0]), "", str(shared[1]), ""))
    if walks:
        for name, kind in WALKS.items():
            steps = [walk(tree, kind) for tree in (before, ROOT)]
            cells = [f"{step['files']} files, {step['changes']} changes" for step in steps]
            rows.append((f"one step: {name}", cells[0], "", cells[1], ""))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|---|---|---|---|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what the working tree is compared with")
    parser.add_argument("--walks", action="store_true", help="trace one step of three runs, too")
    asked = parser.parse_args()
    with checkout(asked.commit) as before:
        print(table(before, walks=asked.walks))


if __name__ == "__main__":
    main()
