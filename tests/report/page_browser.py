"""A page that a browser has opened, and what it has said and asked for since."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any, cast

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
CHARTS = [
    "accuracy-time", "accuracy-epochs", "arrivals", "front", "shares", "strip", "workers",
    "loss-time", "loss-epochs", "training_loss-time", "training_loss-epochs", "staleness",
    "consensus_distance-time", "consensus_distance-epochs", "bytes", "cards",
    "topology-0", "topology-1", "topology-2",
]  # fmt: skip
# Names of all series and categories that the charts hold: what a reader can see of a method.
HELD = """() => [...document.querySelectorAll(".chart")].map((host) => {
  const option = echarts.getInstanceByDom(host).getOption();
  return [host.parentElement.id, JSON.stringify([option.series.map((one) => one.name),
    (option.yAxis || []).map((one) => one.data || []), option.title || []])];
})"""


@dataclass
class Opened:
    """A page and what it has said and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Marks (paths) in the picture of each chart."""
        script = """() => Object.fromEntries([...document.querySelectorAll(".chart")].map((host) =>
            [host.parentElement.id.slice(7), host.querySelectorAll("svg path").length]))"""
        return cast(dict[str, int], self.page.evaluate(script))

    def column(self, table: str, number: int) -> list[str]:
        """The words in one column of a section's first table, from above."""
        script = "(rows, number) => rows.map((row) => row.cells[number].innerText)"
        rows = self.page.locator(f"#{table} .table").first.locator("tbody tr")
        return cast(list[str], rows.evaluate_all(script, number))


def watch(one: Opened) -> None:
    one.page.on("console", lambda message: one.complaints.append(f"{message.type}: {message.text}"))
    one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
    one.page.on("request", lambda request: one.requests.append(request.url))
