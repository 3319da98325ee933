"""Histories of runs that nobody ran."""

from typing import Any


def rows(scores, *, seconds=1.0, key="accuracy") -> list[dict[str, Any]]:
    """One evaluation every `seconds` and every epoch; two workers, one waiting half its time."""
    history = []
    for at, score in enumerate(scores):
        now = at * seconds
        row = {"virtual_seconds": now, "epochs": float(at), "accuracy": None, "loss": 1.0}
        row["computing_seconds"], row["waiting_seconds"] = [now, now / 2], [0.0, now / 4]
        history.append({**row, key: score})
    return history
