"""Hand-made data of a page: eight methods on sixteen workers, one of them slow."""

from __future__ import annotations

import math
from typing import Any

WORKERS = 16
SLOW = 5
LABELS = (
    "all_reduce", "d_psgd", "ad_psgd", "downpour", "ssp:bound=4", "easgd",
    "local_sgd:period=8,outer=nesterov", "sgp",
)  # fmt: skip
_PACES = (9.4, 9.1, 1.15, 1.0, 5.2, 1.3, 3.6, 1.9)
"""Seconds an epoch."""
_WORTHS = (1.0, 0.95, 0.86, 0.55, 0.7, 0.8, 0.9, 0.85)
"""What an epoch teaches, against that of exact averages."""
_SYNCHRONOUS = (0, 1, 6)
_POINTS = 60


def sample_page(**changes: Any) -> dict[str, Any]:
    """A comparison as a page shows it; `changes` replaces parts of it."""
    page: dict[str, Any] = {
        "title": "digits-mlp on one-slow-of-16",
        "subtitle": "16 workers, 3 seeds, 4 learning rates each",
        "kind": "compare",
        "verdict": "ad_psgd reaches 95 % first, after 9.87 s (9.31-10.4 s); next is easgd "
        "with 12.1 s, last is d_psgd, which needs 71.4 s, 7.2 times as long; downpour does not.",
        "command": "gossamer compare --task digits-mlp --cluster one-slow-of-16 --epochs 20 "
        "--seeds 3 --methods 'all_reduce d_psgd ad_psgd downpour'",
        "version": "0.1.0", "is_growing": False, "score": "accuracy", "target": 0.95,
        "rule": "A run reaches the target when it is there and stays.", "can_tell": True,
        "time": "virtual seconds", "test_samples": 360, "advice": None, "heat_maps": [],
        "methods": [_method(place) for place in range(len(LABELS))],
        "grid": {
            "rates": [0.05, 0.1, 0.2, 0.4],
            "rows": [
                {"method": label, "values": [0.93, 0.95 + 0.001 * place, 0.96, None],
                 "seconds": [None, 30.0, 20.0, None], "chosen": 2}
                for place, label in enumerate(LABELS)
            ],
        },
        "expenses": [_expense(place) for place in range(len(LABELS))],
        "economy": "local_sgd is the cheapest.",
        "cluster": _cluster(),
        "settings": [
            {"name": "task", "value": "digits-mlp"}, {"name": "batch", "value": "32 samples"},
            {"name": "learning rates", "value": "0.05, 0.1, 0.2, 0.4"},
            {"name": "epochs", "value": "20"}, {"name": "seeds", "value": "0, 1, 2"},
        ],
        "pictures": [],
        "tables": [
            {"title": "What would change the answer", "columns": ["workers", "winner", "lead"],
             "rows": [[8, "ad_psgd", "1.2 times"], [32, "easgd", "1.9 times"], [128, "sgp", None]]},
        ],
        "notices": ["Three seeds give wide intervals; run ten for a closer look."],
        "missing": [],
    }  # fmt: skip
    return page | changes


def _expense(place: int) -> dict[str, Any]:
    """What the method there spends; the slower the dearer, but for one."""
    seconds = 10.0 * _PACES[place]
    dollars = 0.001 if place == 6 else 0.002 * seconds
    return {
        "method": LABELS[place], "seconds": seconds, "on_front": place in (3, 6),
        "to_target": {"dollars": dollars, "joules": 5e4 * seconds},
        "in_all": {"dollars": 2 * dollars, "joules": 1e5 * seconds},
    }  # fmt: skip


def bare_method(label: str) -> dict[str, Any]:
    """A method of which nothing is known but its name."""
    nothing = {"accuracy": None, "loss": None, "training_loss": None, "consensus_distance": None}
    figures = "accuracy loss seconds waiting_fraction mean_staleness max_staleness bytes_per_step"
    return {
        "label": label, "learning_rate": None, "seeds": 0, "output": "", "status": "unfinished",
        "curves": {"time": dict(nothing), "epochs": dict(nothing)}, "arrival": None, "look": 0,
        "shares": None, "workers": [], "strip": None, "lineage": None, "staleness": {}, "cards": [],
        "topology": None, "figures": dict.fromkeys(figures.split()),
    }  # fmt: skip


def _curve(epochs: list[float], pace: float, values: list[float], spread: float) -> dict[str, Any]:
    return {
        "x": [pace * epoch for epoch in epochs],
        "mean": values,
        "low": [value * (1 - spread) for value in values],
        "high": [value * (1 + spread) for value in values],
    }


def _method(place: int) -> dict[str, Any]:
    label, pace, worth = LABELS[place], _PACES[place], _WORTHS[place]
    epochs = [20 * point / (_POINTS - 1) for point in range(_POINTS)]
    best = 0.975 - 0.05 * (1 - worth) - (0.03 if label == "downpour" else 0.0)
    accuracy = [0.1 + (best - 0.1) * (1 - math.exp(-0.75 * worth * epoch)) for epoch in epochs]
    loss = [0.08 / worth + 2.2 * math.exp(-0.5 * worth * epoch) for epoch in epochs]
    training = [0.02 / worth + 2.2 * math.exp(-0.6 * worth * epoch) for epoch in epochs]
    distance = [0.02 * (1 + place) * math.exp(-0.08 * epoch) for epoch in epochs]
    views = {
        name: {
            "accuracy": _curve(epochs, scale, accuracy, 0.006),
            "loss": _curve(epochs, scale, loss, 0.06),
            "training_loss": _curve(epochs, scale, training, 0.06),
            "consensus_distance": None if place == 0 else _curve(epochs, scale, distance, 0.1),
        }
        for name, scale in (("time", pace), ("epochs", 1.0))
    }
    reached = next((e * pace for e, a in zip(epochs, accuracy, strict=True) if a >= 0.95), None)
    arrival = {
        "mean": reached, "low": reached and reached * 0.94, "high": reached and reached * 1.06,
        "reached": 3 if reached else 0, "seeds": 3, "times": reached and 1.0 + place,
        "runs": [reached and reached * share for share in (0.95, 1.0, 1.06)],
        "is_close": label in ("ad_psgd", "easgd"),
    }  # fmt: skip
    is_synchronous = place in _SYNCHRONOUS
    staleness = {"0": 4000} if is_synchronous else _staleness(place)
    return {
        "label": label, "learning_rate": 0.2, "seeds": 3,
        "output": "server" if label in ("downpour", "ssp:bound=4") else "mean of workers",
        "status": "finished", "curves": views, "arrival": arrival, "look": place,
        "shares": {"computing": 0.15 if is_synchronous else 0.94,
                   "waiting": 0.83 if is_synchronous else 0.04, "other": 0.02},
        "workers": [_worker(rank, 20 * pace, is_synchronous) for rank in range(WORKERS)],
        "strip": _strip(is_synchronous), "lineage": None, "staleness": staleness,
        "cards": _cards(place),
        "topology": _topology(place),
        "figures": {
            "accuracy": accuracy[-1], "loss": loss[-1], "seconds": 20 * pace,
            "waiting_fraction": 0.83 if is_synchronous else 0.04, "mean_staleness": float(place),
            "max_staleness": 3.0 * place, "bytes_per_step": 34_000.0 * (1 + place % 3),
            "consensus_distance": None if place == 0 else distance[-1],
            "exchanges_per_step": 0.97, "steps": 9_000.0 - 700 * place, "wall_seconds": 3.1,
        },
    }  # fmt: skip


def _staleness(place: int) -> dict[str, int]:
    centre = 1 + 2 * (place % 4)
    return {str(age): int(5000 * math.exp(-((age - centre) ** 2) / (2 + age))) for age in range(22)}


def _worker(rank: int, total: float, is_synchronous: bool) -> dict[str, Any]:
    share = 0.97 if rank == SLOW or not is_synchronous else 0.12
    waiting = {f"worker {SLOW}": total * (0.96 - share) * 0.9, "all_reduce": 0.01 * total}
    return {
        "computing": share * total,
        "waiting": waiting if share < 0.9 else {},
        "other": 0.03 * total,
        "total": total,
    }


def _strip(is_synchronous: bool) -> dict[str, Any]:
    segments: list[list[Any]] = []
    for rank in range(WORKERS):
        at, length = 0.0, 0.1 if rank == SLOW else 0.01 + 0.0004 * rank
        while at < 0.5:
            segments.append([rank, at, at + length, "computing", "gradient"])
            at += length
            if is_synchronous and rank != SLOW:
                segments.append([rank, at, at - length + 0.1, "waiting", f"worker {SLOW}"])
                at += 0.1 - length
            segments.append([rank, at, at + 0.004, "communicating", "all_reduce"])
            at += 0.004
    segments.append([3, 0.42, 0.5, "paused", "fault"])
    return {"from": 0.0, "to": 0.5, "segments": segments, "servers": 0}


def _cards(place: int) -> list[dict[str, Any]]:
    amount = 34_000.0 * (1 + place % 3) / WORKERS
    workers = [
        {"name": f"worker {rank}", "sent": amount, "received": amount * (1 + 0.05 * (rank % 3))}
        for rank in range(WORKERS)
    ]
    if LABELS[place] not in ("downpour", "ssp:bound=4"):
        return workers
    return [*workers, {"name": "server 0", "sent": 16 * amount, "received": 16 * amount}]


def _topology(place: int) -> dict[str, Any]:
    nodes = [str(rank) for rank in range(WORKERS)]
    if LABELS[place] in ("downpour", "ssp:bound=4"):
        edges = [[rank, WORKERS] for rank in range(WORKERS)]
        return {"name": "star", "note": "", "nodes": [*nodes, "server 0"], "edges": edges}
    if LABELS[place] == "sgp":
        edges = [[a, (a + step) % WORKERS] for a in range(WORKERS) for step in (1, 2, 4, 8)]
        note = "One of these neighbours at a time, in turn."
        return {"name": "exponential", "note": note, "nodes": nodes, "edges": edges}
    edges = [[rank, (rank + 1) % WORKERS] for rank in range(WORKERS)]
    return {"name": "ring", "note": "", "nodes": nodes, "edges": edges}


def _cluster() -> dict[str, Any]:
    machines = [
        {
            "name": f"machine {number}", "workers": [2 * number, 2 * number + 1],
            "place": f"rack {number // 4}", "slow": 10.0 if number == SLOW // 2 else 1.0,
            "slow_link": 4.0 if number == 6 else 1.0, "dies": number == 7,
            "notes": ["dies at 4 s"] if number == 7 else [],
        }
        for number in range(WORKERS // 2)
    ]  # fmt: skip
    return {
        "name": "one-slow-of-16", "title": "Sixteen workers, one of them ten times slower",
        "workers": WORKERS, "machines": machines, "servers": 1, "bandwidth": "10 Gbit/s",
        "latency": "100 us", "step": "10 ms ± 10 %", "notes": ["Two racks share one uplink."],
    }  # fmt: skip
