"""What a run tells whoever wants to listen, while it goes on.

    class Printer(gossamer.Callback):
        def on_evaluation(self, row):
            print(row["epochs"], row["loss"])

    gossamer.simulate("digits-mlp", "ad_psgd", callbacks=[Printer()])

Override what is of interest; an error raised in a callback ends the run. Times are seconds since
the beginning of the run: virtual ones in a simulation, real ones elsewhere.
"""

from __future__ import annotations

from typing import Any


class Callback:
    """Listens to nothing; a subclass overrides what it wants to hear."""

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        """A worker has computed a gradient, its `step`-th counted from 1."""

    def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
        """A worker has got a peer's model, so many of the peer's steps old (None: not known)."""

    def on_staleness(self, end: int, staleness: int, seconds: float) -> None:
        """A gradient was applied that missed so many updates of the replica of this end.

        Ends are the workers, followed by the servers.
        """

    def on_drop(self, end: int, seconds: float) -> None:
        """An end has dropped a gradient that came too late."""

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        """The others have learnt that a worker is gone, or there again."""

    def on_evaluation(self, row: dict[str, Any]) -> None:
        """The output model was evaluated; the row is the line in metrics.jsonl."""

    def on_checkpoint(self, place: str, seconds: float) -> None:
        """A checkpoint is complete."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run has ended by itself; the summary is that of summary.json."""
