"""Callbacks: hear what a run does while it goes on, and keep its figures as tables.

One of eight workers is four times slower, and another dies. The listener counts who does how much
and notes when the model is good enough; the exporter writes metrics.csv and summary.csv.
"""

import csv
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gossamer
from gossamer.config.faults import parse_fault
from gossamer.report.exporters import CsvExporter


class Watch(gossamer.Callback):
    """Overrides what it wants to hear."""

    def __init__(self) -> None:
        self.steps, self.exchanges = Counter[int](), Counter[int]()
        self.good_after: float | None = None

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        self.steps[worker] = step

    def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
        self.exchanges[worker] += 1

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        print(f"{seconds:.2f} s: worker {worker} is {'back' if is_alive else 'gone'}")

    def on_evaluation(self, row: dict[str, Any]) -> None:
        if self.good_after is None and row["accuracy"] >= 0.9:
            self.good_after = row["virtual_seconds"]


watch = Watch()
faults = (parse_fault("slow", "0=4"), parse_fault("kill", "5@300ms"))
cluster = gossamer.Cluster(workers=8, faults=faults)
with tempfile.TemporaryDirectory() as folder:
    callbacks = [watch, CsvExporter(folder)]
    gossamer.simulate("digits-mlp", "ad_psgd", cluster, seed=1, epochs=6, callbacks=callbacks)
    with (Path(folder) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
print(f"90 % right after {watch.good_after:.2f} s")
for worker, what in ((0, "the slow one"), (1, "another")):
    print(f"{what}: {watch.steps[worker]} steps, {watch.exchanges[worker]} exchanges")
print(f"metrics.csv: {len(rows)} rows, the last with loss {float(rows[-1]['loss']):.3f}")

# Prints:
# 0.35 s: worker 5 is gone
# 90 % right after 0.34 s
# the slow one: 20 steps, 69 exchanges
# another: 82 steps, 82 exchanges
# metrics.csv: 21 rows, the last with loss 0.149
