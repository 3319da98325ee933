"""Run folders as the commands leave them, with histories made up for the occasion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import settings

from gossamer.config.cluster import load_cluster
from gossamer.config.faults import parse_fault
from gossamer.config.settings import make_settings
from support import digits

Row = dict[str, Any]
WORKERS = 4
few = settings(max_examples=25)


def strict(data) -> str:
    """As JSON has it: neither NaN nor infinity."""
    return json.dumps(data, allow_nan=False)


def method_of(data, label):
    (found,) = [method for method in data["methods"] if method["label"] == label]
    return found


def settings_of(method: str = "ad_psgd", *, cluster: str = "equal-8", faults=(), **choices) -> Row:
    """As config.json keeps them."""
    machines = load_cluster(cluster).changed(
        workers=WORKERS, faults=[parse_fault(*fault.split(" ", 1)) for fault in faults]
    )
    return make_settings(digits(), method, machines, **choices).as_dict()


def row(seconds: float, accuracy: float | None, **more) -> Row:
    return {
        "virtual_seconds": seconds, "epochs": seconds / 2, "steps": int(10 * seconds),
        "output": "mean", "training_loss": 1.0, "loss": 1.0 / (1 + seconds),
        "accuracy": accuracy, "consensus_distance": 0.1,
        "computing_seconds": [0.5 * seconds] * WORKERS,
        "waiting_seconds": [0.25 * seconds] * WORKERS, **more,
    }  # fmt: skip


def rising(slope: float, points: int = 5) -> list[Row]:
    """Accuracy from 0 on a straight line, a point every second."""
    return [row(float(at), min(1.0, slope * at)) for at in range(points)]


def summary_of(config: Row, history: list[Row], **more) -> Row:
    return {
        "method": config["method"], "task": config["task"], "workers": WORKERS,
        "seed": config["seed"], "learning_rate": config["learning_rate"], **history[-1],
        "wall_seconds": 0.1, "waiting_fraction": 0.25, "mean_staleness": 1.5, "max_staleness": 4,
        "bytes_per_step": 1e4, "exchanges_per_step": 1.0, "notices": [], "diverged": False,
        "waiting_by_worker": [{"peer 1": 0.25 * history[-1]["virtual_seconds"]}] * WORKERS,
        "cards": [{"name": f"worker {rank}", "sent": 800, "received": 400}
                  for rank in range(WORKERS)],
        "staleness_histogram": {"0": 3, "1": 7}, "ended": "finished", **more,
    }  # fmt: skip


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_run(
    folder: Path, config: Row, history: list[Row], *, summary: Row | None = None, **more
) -> Path:
    """One run, ended unless its summary says otherwise."""
    write(folder / "config.json", {"command_line": "gossamer simulate", **config})
    lines = "".join(json.dumps(one) + "\n" for one in history)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if summary is None and history:
        summary = summary_of(config, history, **more)
    if summary is not None:
        write(folder / "summary.json", summary)
    return folder


def write_comparison(
    folder: Path, slopes: dict[tuple[str, float, int], float], choosing_seed: int | None = None
) -> Path:
    """By (method, rate, seed): how fast its accuracy rises; one seed may choose the rates."""
    configs = {
        (method, rate, seed): settings_of(method, learning_rate=rate, seed=seed)
        for method, rate, seed in slopes
    }
    seeds = len({seed for _, _, seed in slopes} - {choosing_seed})
    write(
        folder / "config.json",
        {
            "runs": list(configs.values()), "seeds": seeds, "choosing_seed": choosing_seed,
            "command_line": "gossamer compare",
        },
    )  # fmt: skip
    for (method, rate, seed), slope in slopes.items():
        name = f"{method}-lr{rate:g}-seed{seed}"
        write_run(folder / name, configs[method, rate, seed], rising(slope))
    write(folder / "summary.json", {"task": "digits-mlp", "ended": "finished"})
    return folder


SLOPES = {
    ("ad_psgd", 0.1, 0): 0.20, ("ad_psgd", 0.1, 1): 0.21,
    ("ad_psgd", 0.3, 0): 0.24, ("ad_psgd", 0.3, 1): 0.25,
    ("downpour", 0.1, 0): 0.15, ("downpour", 0.1, 1): 0.16,
    ("downpour", 0.3, 0): 0.10, ("downpour", 0.3, 1): 0.11,
}  # fmt: skip
"""Of a comparison in which ad_psgd wins, at 0.3."""
