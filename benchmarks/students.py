"""What a student of an ensemble is worth: beside one teacher, the ensemble, and itself alone.

    python benchmarks/students.py --write docs/benchmarks/students

Eight members are trained for each seed, for as many epochs together as a student and for as many
each, and then students of two sizes, with and without teachers, by one worker. Every model is
measured on the test set of handwritten digits, which nothing was chosen by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import gossamer
from gossamer.runs.statistics import interval

MEMBERS = 8
EPOCHS = 20
TEACHERS = (EPOCHS / MEMBERS, float(EPOCHS))
"""As many samples as one model sees, for all teachers together and for each of them."""
TASK = "digits-mlp"
STUDENTS = {"of the same size": TASK, "of 16 units": f"{TASK}:width=16"}
TEMPERATURE = 4.0
SOFT = 0.9
RATE = 0.03

Scores = dict[str, list[float]]


def measure(seeds: Sequence[int], epochs: float) -> Scores:
    """The accuracies of every kind of model, one for each seed; each model sees so many epochs."""
    found: Scores = {}
    for seed in seeds:
        cluster = gossamer.load_cluster("equal-8").changed(workers=MEMBERS)
        ensemble = gossamer.simulate(
            TASK, "ensemble", cluster, epochs=epochs * MEMBERS, seed=seed, learning_rate=RATE,
            evaluations=1,
        )  # fmt: skip
        for name, student in STUDENTS.items():
            made = gossamer.distill(
                ensemble, student=student, temperature=TEMPERATURE, soft=SOFT, epochs=EPOCHS,
                seed=seed, learning_rate=RATE, alone=True, evaluations=1,
            )  # fmt: skip
            rows = {f"student {name}": "student",
                    f"{name}, without teachers": "student without teachers"}  # fmt: skip
            if name == next(iter(STUDENTS)):  # the teachers are the same for all students
                rows = {"one teacher, mean of eight": "single teacher",
                        "ensemble of eight": "ensemble", **rows}  # fmt: skip
            for row, key in rows.items():
                found.setdefault(row, []).append(made.scores[key][1])
    return found


def table(all_found: Mapping[float, Scores], seeds: Sequence[int]) -> str:
    """The page."""
    lines = [
        f"Distilling an ensemble of {MEMBERS} on `{TASK}`, {len(seeds)} seeds: test accuracy, mean "
        f"and 95 % interval. Students see {EPOCHS} epochs; rate {RATE:g}, temperature "
        f"{TEMPERATURE:g}, {SOFT:g} of the loss is the teachers'.",
    ]
    for epochs, found in all_found.items():
        lines += ["", f"Each teacher sees {epochs:g} epochs:", ""]
        lines += ["| model | test accuracy | seed by seed |", "|---|---|---|"]
        lines += _rows(found)
    lines += [
        "",
        "Made by `python benchmarks/students.py --write docs/benchmarks/students` with torch "
        f"{torch.__version__} on the CPU.",
    ]
    return "\n".join(lines) + "\n"


def _rows(found: Scores) -> list[str]:
    lines: list[str] = []
    for name, scores in found.items():
        span = interval(list(scores))
        each = ", ".join(f"{100 * score:.2f}" for score in scores)
        half = 100 * (span.high - span.mean)
        lines.append(f"| {name} | {100 * span.mean:.2f} ± {half:.2f} % | {each} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="PATH.md and PATH.json are written")
    given = parser.parse_args()
    seeds = range(given.seeds)
    found = {epochs: measure(seeds, epochs) for epochs in TEACHERS}
    text = table(found, seeds)
    print(text)
    if given.write is not None:
        given.write.with_suffix(".md").write_text(text, encoding="utf-8")
        kept = json.dumps(
            {"seeds": list(seeds), "accuracy_by_epochs_of_a_teacher": found}, indent=1
        )
        given.write.with_suffix(".json").write_text(kept + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
