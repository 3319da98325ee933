"""What a run has counted, and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.observe.lineage import Lineage
from gossamer.observe.noise_scale import NoiseScale, mean_of_sums, ratio
from gossamer.observe.observer import SECOND, Observer, Row, Span, end_name


@dataclass
class Tally:
    """A stream of numbers: how many, their sum and the largest."""

    count: int = 0
    total: float = 0
    most: float | None = None

    def add(self, total: float, most: float | None = None, count: int = 1) -> None:
        """One number, or what another tally has counted."""
        self.count += count
        self.total += total
        most = total if most is None else most
        self.most = most if self.most is None else max(self.most, most)

    @property
    def mean(self) -> float | None:
        """None if nothing was measured."""
        return self.total / self.count if self.count else None


@dataclass
class WorkerMetrics:
    """What one worker has done."""

    steps: int = 0
    samples: int = 0
    computing_ns: int = 0
    waiting_ns: Counter[str] = field(default_factory=Counter[str])
    """By cause."""
    exchanges: float = 0.0
    """The models received from others; a part of a model, as from one of several servers, counts
    as a fraction."""
    lasted_ns: int = 0
    """How long the worker took part, once it has ended."""
    gap: Span = (0, 0)
    """The longest time between the beginnings of two steps, since the first of all."""
    absent_ns: int = 0
    """How long it was dead, or not there yet."""
    lost_ns: int = 0
    """How long it computed gradients that were lost with its death."""
    lost_samples: int = 0
    """The samples of those gradients, which others have trained or it has trained later."""
    _steps_began: Span | None = None
    """When the first and the last step began."""

    @property
    def waited_ns(self) -> int:
        return sum(dict(self.waiting_ns).values())

    def lost(self, computed_ns: int, samples: int) -> None:
        """A gradient was lost with the worker."""
        self.lost_ns += computed_ns
        self.lost_samples += samples

    def began_step(self, now_ns: int) -> None:
        """A step begins, or the last step is over."""
        first, last = self._steps_began or (now_ns, now_ns)
        if now_ns - last > self.gap[1] - self.gap[0]:
            self.gap = (last - first, now_ns - first)
        self._steps_began = (first, now_ns)


class Metrics(Observer):
    """Counts the events of a whole run, or of one process of it."""

    def __init__(self, size: int, ranks: Iterable[int] | None = None) -> None:
        """The run has `size` workers; those in `ranks` are counted, or all."""
        self._size = size
        ranks = range(size) if ranks is None else ranks
        self.workers = {rank: WorkerMetrics() for rank in ranks}
        self.staleness = Tally()
        self.histogram: Counter[int] = Counter()
        """The number of gradients of each staleness."""
        self.global_staleness = Tally()
        self.age = Tally()
        """The steps that a peer had made since the model that it gave in an exchange."""
        self.told: dict[str, Tally] = {}
        """The numbers that methods have reported, by name."""
        self.lineage = Lineage()
        self._losses: list[Tensor] = []
        self.noise = NoiseScale()
        """Of the gradients computed here."""
        self._noises: list[list[float]] = []
        """Of those computed in other processes."""

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        own = self.workers[worker]
        own.steps += 1
        own.computing_ns += work_ns
        own.samples += samples
        if loss is not None:
            self._losses.append(loss)

    def waited(
        self, worker: int, what: str, peer: int | None, span: Span, moving: Sequence[Span] = ()
    ) -> None:
        # The cause names the server, because servers are the bottlenecks.
        is_server = peer is not None and peer >= self._size
        cause = what + end_name(peer, self._size, "from") if is_server else what
        self.workers[worker].waiting_ns[cause] += span[1] - span[0]

    def began_step(self, worker: int, at_ns: int) -> None:
        self.workers[worker].began_step(at_ns)

    def exchanged(
        self, worker: int, peer: int | None, at_ns: int, *, share: float = 1.0,
        age: int | None = None,
    ) -> None:  # fmt: skip
        # On real workers only one of a pair knows that both have exchanged, and counts for both.
        own = self.workers.get(worker) or next(iter(self.workers.values()))
        own.exchanges += share
        if age is not None:
            self.age.add(age)

    def stale(self, end: int, missed: int, at_ns: int, missed_of_all: int | None = None) -> None:
        self.staleness.add(missed)
        self.histogram[missed] += 1
        if missed_of_all is not None:
            self.global_staleness.add(missed_of_all)

    def observed(self, end: int, what: str, value: float, at_ns: int) -> None:
        steps = self.workers[end].steps if end in self.workers else 0
        if self.lineage.hears(end, what, value, steps, at_ns):
            return
        self.told.setdefault(what, Tally()).add(value)

    def told_of(self, what: str) -> Tally:
        return self.told.get(what, Tally())

    @property
    def steps(self) -> int:
        return sum(own.steps for own in self.workers.values())

    @property
    def exchanges(self) -> float:
        return sum(own.exchanges for own in self.workers.values())

    @property
    def waiting_by_cause(self) -> dict[str, float]:
        """In seconds, of all workers together."""
        causes: Counter[str] = Counter()
        for own in self.workers.values():
            causes.update(dict(own.waiting_ns))
        return {cause: waited / SECOND for cause, waited in causes.items()}

    @property
    def waiting_fraction(self) -> float | None:
        """The share of time with nothing to compute and something awaited, mean over workers."""
        shares = [
            own.waited_ns / own.lasted_ns if own.lasted_ns else 0.0 for own in self.workers.values()
        ]
        return sum(shares) / len(shares) if shares else None

    @property
    def noise_scale(self) -> float | None:
        """In samples."""
        return ratio(mean_of_sums([self.noise.sums, *self._noises]))

    def known_noise(self) -> float | None:
        """The same, where something else asks for it now and then."""
        return self.noise_scale

    def take_losses(self) -> list[Tensor]:
        """The losses since the last time."""
        losses, self._losses = self._losses, []
        return losses

    @property
    def batch_share(self) -> list[float] | None:
        """The mean batch of each worker as a part of all workers' mean batches together; None where
        they are equal."""
        batches = [own.samples / own.steps for own in self.workers.values() if own.steps]
        if len(set(batches)) < 2 or len(batches) < len(self.workers):
            return None
        return [batch / sum(batches) for batch in batches]

    def row(self) -> Row:
        """The progress of the workers; the training loss is the mean since the last row."""
        losses = self.take_losses()
        causes = self.waiting_by_cause
        return {
            "steps": self.steps,
            "samples": sum(own.samples for own in self.workers.values()),
            "training_loss": float(torch.stack(losses).mean()) if losses else None,
            "noise_scale": self.noise_scale,
            "mean_staleness": self.staleness.mean,
            "waits_for": max(causes, key=lambda cause: causes[cause], default=None),
        }

    def state(self) -> Row:
        """The counts of the one worker of this process, for its log and its checkpoints."""
        (own,) = self.workers.values()
        return {
            "steps": own.steps,
            "samples": own.samples,
            "exchanges": own.exchanges,
            "computing_seconds": own.computing_ns / SECOND,
            "waiting_seconds": {what: ns / SECOND for what, ns in dict(own.waiting_ns).items()},
            "staleness": {str(missed): count for missed, count in sorted(self.histogram.items())},
            "observed": self.tallies,
            "noise": self.noise.sums,
            "lineage": self.lineage.state(),
            "longest_step_gap_seconds": (own.gap[1] - own.gap[0]) / SECOND,
            "longest_step_gap_at": own.gap[0] / SECOND,
        }

    @property
    def tallies(self) -> Row:
        """What methods have told, for checkpoints."""
        return {what: [tally.count, tally.total, tally.most] for what, tally in self.told.items()}

    @tallies.setter
    def tallies(self, state: Row) -> None:
        self.told = {
            what: Tally(count, total, most) for what, (count, total, most) in state.items()
        }

    def load(self, rank: int, state: Row) -> None:
        """Add the counts of a worker of that rank."""
        waited = {what: round(s * SECOND) for what, s in state["waiting_seconds"].items()}
        gap_at, gap = (
            round(state[f"longest_step_gap_{what}"] * SECOND) for what in ("at", "seconds")
        )
        self.workers[rank] = WorkerMetrics(
            state["steps"], state["samples"], round(state["computing_seconds"] * SECOND),
            Counter(waited), state["exchanges"], round(state.get("seconds", 0.0) * SECOND),
            (gap_at, gap_at + gap),
        )  # fmt: skip
        self._noises.append(state.get("noise", []))
        self.lineage.load(state.get("lineage", []))
        for missed, count in state["staleness"].items():
            self.staleness.add(int(missed) * count, int(missed), count)
            self.histogram[int(missed)] += count
        for what, (count, total, most) in state["observed"].items():
            self.told.setdefault(what, Tally()).add(total, most, count)


def time_shares(metrics: Metrics, duration_ns: int, usual_ns: float, apart_ns: float) -> Row:
    """Where the time of all workers went, as shares of it that add up to 1.

    `usual_ns` is how long machines on which nothing goes wrong compute what was trained, and
    `apart_ns` what comes after each gradient and overlaps with nothing. `useful` is the goodput:
    the samples trained per second over those that all machines could train, were nobody slow,
    dead or waiting.
    """
    workers = metrics.workers.values()
    whole = max(1, duration_ns) * len(workers)
    computing = sum(own.computing_ns for own in workers)
    shares = {
        "useful": usual_ns / whole,
        "slower": (computing - usual_ns - apart_ns) / whole,
        "applying": apart_ns / whole,
        "waiting": sum(own.waited_ns for own in workers) / whole,
        "lost": sum(own.lost_ns for own in workers) / whole,
        "absent": sum(own.absent_ns for own in workers) / whole,
    }
    # Pauses, gradients that the end of the run has cut off, and what comes after a worker's end.
    return shares | {"other": 1.0 - sum(shares.values())}


def _of_exchanges(metrics: Metrics, steps: int) -> Row:
    """What compression did, and how alike workers moved; nothing where there was neither."""
    encoded, cosine = metrics.told_of("encoded bytes"), metrics.told_of("cosine")
    found: Row = {"displacement_cosine": cosine.mean} if cosine.count else {}
    if encoded.total:
        found |= {
            "compression_ratio": metrics.told_of("plain bytes").total / encoded.total,
            "coding_seconds_per_step": metrics.told_of("coding").total / steps,
            "residual_norm": metrics.told_of("residual").mean,
        }
    return found


def _lost_with_servers(metrics: Metrics) -> Row:
    """The updates that deaths of servers have cost; nothing where nothing was lost."""
    lost = metrics.told_of("lost updates")
    return {"lost_updates": int(lost.total)} if lost.count else {}


def summary(metrics: Metrics, bytes_sent: int) -> Row:
    """The summary of every run, in virtual time, by `train` and in a user's loop.

    A value that a method cannot have is None, because no measurement is not zero.
    """
    steps = max(1, metrics.steps)
    return {
        "steps": metrics.steps,
        "batch_share": metrics.batch_share,
        "bytes_per_step": bytes_sent / steps,
        "exchanges_per_step": metrics.exchanges / steps or None,
        "waiting_fraction": metrics.waiting_fraction,
        "waiting_by_cause": metrics.waiting_by_cause,
        "noise_scale": metrics.noise_scale,
        "mean_staleness": metrics.staleness.mean,
        "max_staleness": metrics.staleness.most,
        "max_clock_gap": metrics.told_of("clock_gap").most,
        "max_queue": metrics.told_of("queue").most,
        "dropped_gradients": metrics.told_of("dropped").count,
        **_lost_with_servers(metrics),
        **_of_exchanges(metrics, steps),
        **({"lineage": metrics.lineage.entries} if metrics.lineage.entries else {}),
    }
