"""From the runs of some folders to the methods of one page: what belongs together, and its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.report.page.settings import differing
from gossamer.runs.contest import Entry
from gossamer.runs.folder import to_json
from gossamer.runs.json_files import count
from gossamer.runs.kept_runs import Folder, Run
from gossamer.runs.result import Row

# What may differ between runs that are repetitions of each other.
_REPEATED = frozenset({"seed", "seeds", "command_line", "made_with"})


@dataclass
class GatheredRuns:
    """The methods of a page."""

    whole: dict[str, Entry[Run]] = field(default_factory=dict[str, Entry[Run]])
    """Those whose runs came to their end: what the verdict speaks of."""
    partial: dict[str, Entry[Run]] = field(default_factory=dict[str, Entry[Run]])
    """Those that were interrupted, failed or are under way."""
    timed: dict[str, Entry[Run]] = field(default_factory=dict[str, Entry[Run]])
    """Those that were never evaluated, so that nothing but times is known."""
    notices: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])

    @property
    def all(self) -> dict[str, Entry[Run]]:
        return self.whole | self.partial | self.timed


@dataclass
class _Group:
    """Runs that differ by seed, and in a comparison by rate, only."""

    label: str
    config: Row
    source: str
    runs: list[Run]
    seeds: int


def check_same_task(folders: Sequence[Folder]) -> None:
    """Scores of different tasks say nothing about each other."""
    known = [(run.task, folder) for folder in folders for run in folder.runs if run.task]
    # A folder of several runs knows the task by its name, its runs with the options, too.
    known += [(one.task, one) for one in folders if one.task and not any(r.task for r in one.runs)]
    for task, folder in known:
        first, before = known[0]
        if task != first:
            raise ConfigurationError(
                f"runs of different tasks cannot share a page: {before.path} trains {first}, "
                f"{folder.path} trains {task}; report them one at a time"
            )


def gather(folders: Sequence[Folder]) -> GatheredRuns:
    """The methods of all folders, under labels that tell them apart."""
    gathered = GatheredRuns()
    groups: dict[object, _Group] = {}
    for folder in folders:
        for key, group in _groups(folder):
            if key in groups:
                _add(groups[key], group, gathered.notices)
            else:
                groups[key] = group
    for label, group in zip(_labels(list(groups.values())), groups.values(), strict=True):
        _sort_in(gathered, label, group)
    return gathered


def _groups(folder: Folder) -> list[tuple[object, _Group]]:
    """Of one folder: a comparison's methods, or runs by all that decided them but the seed."""
    asked = count(folder.summary.get("seeds")) or count(folder.config.get("seeds")) or 1
    seeds = asked if folder.kind == "compare" else 1
    source = folder.path.resolve().name
    runs = [run for run in folder.runs if run.history or run.summary] or folder.runs[:1]
    found: dict[object, _Group] = {}
    for run in runs:
        key: object = run.label if run.is_in_grid else _identity(run.config, with_rate=True)
        if key in found:
            _add(found[key], _Group(run.label, run.config, source, [run], seeds), [])
        else:
            found[key] = _Group(run.label, run.config, source, [run], seeds)
    keyed: list[tuple[object, _Group]] = []
    for group in found.values():
        is_in_grid = group.runs[0].is_in_grid
        # Nobody knows what runs without settings have in common with any other.
        identity = _identity(group.config, with_rate=not is_in_grid) if group.config else id(group)
        keyed.append(((is_in_grid, identity), group))
    return keyed


def _identity(config: Row, *, with_rate: bool) -> str:
    left_out = _REPEATED if with_rate else _REPEATED | {"learning_rate"}
    kept = {key: value for key, value in sorted(config.items()) if key not in left_out}
    return to_json(kept)


def _add(group: _Group, other: _Group, notices: list[str]) -> None:
    """More seeds of the same; a simulated run repeated to the bit is no new evidence."""
    group.config = group.config or other.config
    for run in other.runs:
        same = [
            one for one in group.runs
            if not run.is_real and run.seed is not None
            and (one.seed, one.rate) == (run.seed, run.rate)
        ]  # fmt: skip
        if same:
            notices.append(
                f"{run.label} with seed {run.seed} is in {group.source} and in {other.source}; "
                "it counts once."
            )
        else:
            group.runs.append(run)
    if group.source != other.source:
        # Several comparisons of one method: their seeds add up.
        group.seeds = max(group.seeds, _most_seeds(group.runs))


def _most_seeds(runs: Sequence[Run]) -> int:
    counts: dict[float, int] = {}
    for run in runs:
        if run.is_trial:
            continue
        counts[run.rate] = counts.get(run.rate, 0) + 1
    return max(counts.values(), default=1)


def _labels(groups: Sequence[_Group]) -> list[str]:
    labels = [group.label for group in groups]
    for label in {label for label in labels if labels.count(label) > 1}:
        places = [at for at, own in enumerate(labels) if own == label]
        texts = differing([groups[at].config for at in places])
        if len(set(texts)) < len(texts):
            texts = [groups[at].source for at in places]
        for at, text in zip(places, texts, strict=True):
            labels[at] = f"{label} ({text})" if text else label
    taken: dict[str, int] = {}
    for at, label in enumerate(labels):
        taken[label] = taken.get(label, 0) + 1
        if taken[label] > 1:
            labels[at] = f"{label} #{taken[label]}"
    return labels


def _sort_in(gathered: GatheredRuns, label: str, group: _Group) -> None:
    trials = [run for run in group.runs if run.is_trial and run.history]
    group.runs = [run for run in group.runs if not run.is_trial] or group.runs
    ended = _by_rate([run for run in group.runs if run.has_ended and run.history])
    # A rate with fewer seeds than the others would not be a fair comparison.
    whole = {rate: runs for rate, runs in ended.items() if len(runs) >= group.seeds}
    begun = _by_rate([run for run in group.runs if run.history])
    has_counted = not group.runs[0].is_trial
    if whole and has_counted:
        gathered.whole[label] = Entry(label, whole, _by_rate([t for t in trials if t.has_ended]))
    elif begun:
        gathered.partial[label] = Entry(label, begun)
    else:
        gathered.timed[label] = Entry(label, _by_rate(group.runs))
    shown = whole if has_counted and whole else begun
    for rate in sorted(begun.keys() - shown.keys()):
        done = len(ended.get(rate, []))
        gathered.missing.append(
            f"{label} at {rate:g} has {done} of {counted(group.seeds, 'seed')} and was left out."
        )


def _by_rate(runs: Sequence[Run]) -> dict[float, list[Run]]:
    found: dict[float, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed or 0):
        found.setdefault(run.rate, []).append(run)
    return dict(sorted(found.items()))
