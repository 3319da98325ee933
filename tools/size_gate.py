"""Fail when a file, a function or a folder outgrows what one reader holds in mind.

- A file has at most 500 lines, a function at most 70, a method of `gossamer.methods` at most 60.
- A folder of the package has at most 18 files, and a budget of lines (`BUDGETS`), which is what it
  had when the budget was set and 10 % more. Whoever needs more raises it in the same commit and
  says there why.
- A class name stands for one class in the whole package.
- A module of fewer than 60 lines has at least two importers; entry points are excepted.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 70
METHOD_LINES = 60
FOLDER_FILES = 18
SMALL_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gossamer"
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")
BUDGETS = {
    ".": 3710,
    "commands": 3750,
    "commands/models": 150,
    "commands/studies": 2270,
    "commands/view": 540,
    "commands/work": 3590,
    "compression": 2270,
    "config": 1720,
    "consolidate": 790,
    "contract": 1030,
    "integrations": 430,
    "methods": 3800,
    "observe": 1320,
    "optim": 1900,
    "pipeline": 940,
    "plan": 160,
    "plan/advise": 2290,
    "plan/cost": 2540,
    "plan/hardware": 1460,
    "plan/page": 740,
    "plan/parallel": 2190,
    "plan/probe": 2090,
    "real": 2430,
    "real/faults": 710,
    "real/join": 4630,
    "real/join/checkpoints": 190,
    "real/join/divided": 490,
    "real/join/elastic": 240,
    "real/join/learning": 110,
    "real/join/scaling": 160,
    "real/join/virtual": 920,
    "real/launch": 2420,
    "real/pipelines": 1000,
    "real/train": 3560,
    "real/transports": 1460,
    "real/transports/conformance": 1250,
    "real/transports/mpi": 1090,
    "real/transports/shm": 2680,
    "real/transports/torch": 2850,
    "report": 60,
    "report/exporters": 610,
    "report/page": 2640,
    "report/pictures": 1470,
    "runs": 2060,
    "script": 740,
    "sim": 4500,
    "sim/checkpoint": 380,
    "sim/faults": 650,
    "sim/forms": 1170,
    "sim/links": 440,
    "sim/memory": 270,
    "sim/pipelines": 830,
    "sim/script": 1820,
    "sim/traces": 590,
    "standby": 700,
    "studies": 20,
    "studies/lab": 2860,
    "studies/map": 70,
    "studies/reproductions": 2990,
    "studies/reproductions/compressed": 450,
    "studies/reproductions/parallel": 410,
    "studies/reproductions/repeated": 970,
    "tasks": 3570,
    "tasks/published": 760,
}
ENTRY_POINTS = {
    "__main__",
    "methods.synchronous",
    "plan.probe.program",
    "real.launch.die_with_launcher",
    "report.exporters.tensorboard",
}
"""Modules that somebody starts rather than imports, or that are one of a family in a table."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; what stands inside an expression is not looked at."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        for one in getattr(node, name, ()):
            yield one
            yield from statements(one)


def too_long(path: Path, text: str, tree: ast.Module) -> list[str]:
    """Every place in one file that is too long."""
    where = path.relative_to(ROOT)
    found: list[str] = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{where}: {lines} lines, at most {FILE_LINES}")
    limit = METHOD_LINES if PACKAGE / "methods" in path.parents else FUNCTION_LINES
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append(f"{where}:{node.lineno} {node.name}: {length} lines, at most {limit}")
    return found


def full_folders(texts: dict[Path, str]) -> list[str]:
    """Folders of the package with too many files, too many lines, or no budget."""
    lines: dict[str, list[int]] = defaultdict(list)
    for path, text in texts.items():
        lines[str(path.parent.relative_to(PACKAGE))].append(text.count("\n"))
    found: list[str] = []
    for folder, counts in sorted(lines.items()):
        budget = BUDGETS.get(folder, 0)
        if len(counts) > FOLDER_FILES:
            found.append(f"{folder}: {len(counts)} files, at most {FOLDER_FILES}")
        if sum(counts) > budget:
            found.append(f"{folder}: {sum(counts)} lines, its budget in BUDGETS is {budget}")
    return found


def shared_class_names(trees: dict[Path, ast.Module]) -> list[str]:
    """Class names that stand for more than one class."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    return [
        f"class {name} is defined {len(where)} times: {', '.join(where)}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__").removesuffix("__init__")


def lonely_modules(texts: dict[Path, str], trees: dict[Path, ast.Module]) -> list[str]:
    """Small modules that only one other module imports: they belong in it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                origin = node.module.removeprefix("gossamer").lstrip(".")
                importers[origin].add(module_of(path))
                for alias in node.names:
                    importers[f"{origin}.{alias.name}"].add(module_of(path))
    found: list[str] = []
    for path, text in texts.items():
        module, lines = module_of(path), text.count("\n")
        is_small = lines < SMALL_LINES and path.name != "__init__.py"
        if is_small and module not in ENTRY_POINTS and len(importers[module]) < 2:
            where = path.relative_to(ROOT)
            found.append(f"{where}: {lines} lines and {len(importers[module])} importer")
    return found


def main() -> int:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    gc.disable()  # Trees have no cycles, and looking for some takes longer than to make them.
    trees = {path: ast.parse(text) for path, text in texts.items()}
    found = [line for path in files for line in too_long(path, texts[path], trees[path])]
    own = {path: text for path, text in texts.items() if PACKAGE in path.parents}
    own_trees = {path: trees[path] for path in own}
    found += full_folders(own) + shared_class_names(own_trees) + lonely_modules(own, own_trees)
    for line in found:
        print(line)
    total = sum(text.count("\n") for text in texts.values())
    print(f"size gate: {len(files)} files, {total} lines, {len(found)} complaints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
