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
    # Shares in proportion to speed, precision, memory of a method, fragments, rules of outer loops.
    ".": 3550,
    # Workers that attach.
    "commands": 3570,
    # And time to a target against bandwidth.
    # Late stages in the laboratory.
    # And lines between models.
    # Tables of many small trainings, and several seeds of a cell.
    "commands/studies": 3030,
    "commands/view": 540,
    # What dividing a model over a cluster answers.
    "commands/work": 3320,
    # The network in a file of its own: sites, other traffic, shared slowness, and their checks; and
    # the prices of a cluster.
    # Batches that grow, and micro-batches on one machine.
    "config": 1650,
    # New: what becomes of several trained models.
    "consolidate": 800,
    "commands/models": 350,
    # New: compressors of what is exchanged, and the worker that uses them below every method.
    # And averages of models that are rounded in pairs.
    "compression": 2420,
    # The laws of outer loops, in a file of their own.
    "contract": 960,
    "integrations": 410,
    # Data that differ, copies for compression, transfers beside computing at servers; the family of
    # outer loops with its servers, and methods that change during a run.
    "methods": 3500,
    # The noise scale of gradients, and who descends from whom.
    "observe": 1280,
    # LARS and LAMB, in rows and in loops; the table of optimisers in files by kind.
    "optim": 1780,
    # How often to write checkpoints.
    "plan": 380,
    # One worker alone, beside the answer.
    # One worker alone beside the cluster.
    # Replicas of several machines among the candidates.
    # Batches, momenta, decays and groups among the candidates.
    # Goodput, and the advice on checkpoints.
    "plan/advise": 2560,
    "plan/cost": 2310,
    "plan/hardware": 1650,
    # New: replicas of several machines, their schedules and stages, and the closed forms of these.
    # New: replicas of several machines, their schedules, stages, and the module of one stage.
    "pipeline": 880,
    # New: dividing a model over a cluster, published networks and hybrids.
    "plan/parallel": 2080,
    # New: the closed forms in the language of the browser, and what their page is told.
    "plan/page": 750,
    # Sites and racks are looked for.
    "plan/probe": 2070,
    # Workers that take part only when they have a model; addresses of standbys.
    "real": 2280,
    # Partitions and drops.
    "real/faults": 770,
    # New: checkpoints of a loop in two lines of it.
    "real/join/checkpoints": 190,
    # Islands over which PyTorch shards a model.
    # Islands over which PyTorch shards a model. What servers with standbys refuse.
    "real/join": 4590,
    # New: workers that come to a loop during the run.
    "real/join/elastic": 600,
    # Islands, and loops whose replicas are stages of several processes.
    "real/join/divided": 900,
    # New: losses and predictions that methods compare.
    "real/join/learning": 260,
    # New: scaled rates, and BatchNorm over the batches of all workers.
    "real/join/scaling": 480,
    "real/join/virtual": 850,
    # Elastic runs: workers that come back, and launchers that attach.
    "real/launch": 2890,
    # New: replicas of several processes, and the engines of their pipelines.
    # And stages without old weights.
    "real/pipelines": 910,
    # One process of such a replica, and its batches.
    # Batches that grow, agreed on where the noise of gradients decides.
    # A checkpoint of n workers made one of m; the goodput of real runs.
    "real/train": 3870,
    "real/transports": 1330,
    "real/transports/conformance": 1240,
    "real/transports/mpi": 1110,
    "real/transports/shm": 2560,
    "real/transports/torch": 2730,
    "report": 60,
    "report/exporters": 610,
    # And the lineage of a population.
    # What faults have cost.
    "report/page": 2660,
    # And models divided over machines.
    "report/pictures": 1350,
    # What methods spend until the target, and the front of time and money.
    "runs": 1880,
    "script": 720,
    # New: servers with standbys, the same for both worlds.
    "standby": 1400,
    "sim/checkpoint": 370,
    # New: uplinks, pipes, other traffic and collectives as flows, beside the full folder sim.
    "sim/links": 500,
    "sim/memory": 260,
    # New: pipelines in virtual time.
    "sim/pipelines": 820,
    # What it refuses: teachers, and tuning of optimisers.
    # Sentences where there were tracebacks.
    # What scripts refuse in virtual time: standbys of servers.
    "sim/script": 1900,
    # Gradients are shown to the noise scale; growing batches.
    "sim": 4120,
    # New: workers that come and go, beside all else that goes wrong.
    # And servers that die; what became of every sample, and how recoveries went.
    "sim/faults": 900,
    "sim/traces": 640,
    "sim/forms": 1200,
    "studies": 60,
    # And time to a target against bandwidth.
    # Edges of stability of late stages, and the runs beside them.
    "studies/lab": 3510,
    # New: the map of what the papers have; its table is a file of data.
    "studies/map": 180,
    # Tables of a shared network, and of batch, workers and staleness.
    # And two tables of the low-communication family that need no gradients.
    # What staleness costs, beside batch and learners.
    # Goodput at a million chips.
    # Several seeds of a cell, and rows of corrected settings.
    "studies/reproductions": 3170,
    # A worker that comes late begins in the order of the others.
    # The average of the output models of a run.
    # With dropout that models ask of functions, and the accuracy of next words.
    # Gradients over micro-batches.
    # And what teachers predict.
    # VGG, dropout of the transformer, losses that are trained and not judged by.
    "tasks": 3750,
    # New: bits of displacements, and error against bytes.
    "studies/reproductions/compressed": 920,
    # New: sparse samples, recurrent networks, trees of images, and changes that every task takes.
    "tasks/published": 2280,
    # New: tables of pipelines and of the cost model of divided models.
    "studies/reproductions/parallel": 460,
    # New: tables of small trainings with three seeds each.
    "studies/reproductions/repeated": 2910,
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
