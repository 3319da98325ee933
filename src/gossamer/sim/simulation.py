"""One run in virtual time, from settings to result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.compression import Compressor
from gossamer.compression.coding_times import seconds
from gossamer.compression.compressed_worker import compressed
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, ProtocolError, RunOver
from gossamer.groups import Grouping, role_of
from gossamer.methods import Method, MethodSpec, for_role
from gossamer.methods.method import Role, blamed_method
from gossamer.observe.callbacks import Callback
from gossamer.observe.metrics import summary, time_shares
from gossamer.observe.observer import Observer
from gossamer.observe.progress import Reporter, is_watched, progress_line, warn
from gossamer.precision import rounding_as, threads_of
from gossamer.replica import score_of
from gossamer.runs.result import Result, Row, digest_of
from gossamer.sim.checkpoint.file import RunCheckpoint
from gossamer.sim.checkpoint.pieces import Checkpoints, RunPiece
from gossamer.sim.engine import Engine, NullEngine, make_engine, pays_to_compile
from gossamer.sim.gradients import GradientBatcher
from gossamer.sim.kernel import SECOND, interrupted_between_events
from gossamer.sim.memory.forecast import MOST_ROWS, forecast
from gossamer.sim.memory.shapes import arithmetic_of, without_values
from gossamer.sim.pipelines.split_point import SplitPointModel
from gossamer.sim.rounds import CompleteRound, Rounds
from gossamer.sim.worker import SimulatedWorker
from gossamer.sim.world import World
from gossamer.tasks import Task
from gossamer.tasks.evaluator import Evaluator, Held, OutputAverage
from gossamer.tasks.flat_model import FlatModel
from gossamer.worker import Worker

_ROWS_WITH_WORKERS = 20
"""In about so many rows of a run the workers' own models are measured, which takes several times as
long as measuring the output model; in the first and in the last they always are."""


class Simulation:
    """Builds the world of one run, runs it and makes the rows of its metrics."""

    _past: deque[Row] | None = None
    """The rows that are due again before a resumed run is where it was."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_row: Callable[[Row], None] | None = None,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
        engine: Engine | None = None,
        model: FlatModel | None = None,
        piece: RunPiece | None = None,
    ) -> None:
        """`piece` asks for checkpoints, and may say that the run goes on from one."""
        self.settings = settings
        self._method: Method = settings.method.method
        options = settings.method_options()
        self._on_row = on_row
        device = torch.device(settings.device)
        self.model = (
            model_kind(settings)(
                settings.task, device, seed=settings.seed, precision=settings.precision or "fp32",
                microbatches=settings.microbatches,
            )
            if model is None
            else model
        )  # fmt: skip
        if piece is not None and self._method.acts_by_losses:
            raise ConfigurationError(
                f"{self._method.name} sends models by what losses are, so its run cannot be made "
                "in pieces; leave out --minutes, --resume and --checkpoint-every"
            )
        self._resumed = resumed = None if piece is None else piece.checkpoint()
        if piece is not None and resumed is not None:
            self.settings = settings = resumed.settings_for(settings, piece.path)
        self.forecast = None
        if settings.engine != "none":
            self.forecast = forecast(settings, self.model)
            self.settings = settings = dataclasses.replace(settings, width=self.forecast.width)
        self.engine = engine or make_engine(
            settings.engine, self.model, compiled=self._compiles(),
            most_rows=settings.width or MOST_ROWS,
        )  # fmt: skip
        self._past = deque[Row]([] if resumed is None else resumed.rows)
        # Without gradients no value matters, and the shapes are enough.
        is_without = resumed is not None or isinstance(self.engine, NullEngine)
        self._shown = without_values(self.model, settings.replicas) if is_without else self.model
        first = self.engine if resumed is None else NullEngine()
        self.world = World(settings, options, self._shown, first, observers, callbacks)
        self._pieces = None
        if piece is not None:
            apart = (
                self, self.model, self._shown, self.engine, first, settings, settings.task,
                self.model.task, settings.method, settings.cluster, *observers, *callbacks,
            )  # fmt: skip
            self._pieces = Checkpoints(piece, self.world, apart, self._facts)
        self._evaluator = Evaluator(
            self.model, self._method.output, settings.buffers,
            is_trained_itself=self._method.is_trained_itself(len(self.world.speakers), options)
            and settings.swa is None,
        )  # fmt: skip
        if settings.swa is not None and settings.epochs is not None:
            memory = self.world.replicas[self.world.speakers[0]].memory
            self._evaluator.average = OutputAverage(memory, settings.swa * settings.epochs)
        self._spawn(options)
        self.history: list[Row] = []
        self._next_evaluation = 0.0
        self._began = 0.0
        if settings.engine != "none":
            self._watch_progress()

    def _compiles(self) -> bool:
        chosen = self.settings.compiled
        if chosen is not None:
            return chosen
        batch = self.settings.batch or 1
        gradients = self.settings.samples / batch
        return pays_to_compile(self.model, batch, gradients, self.settings.replicas)

    def _spawn(self, options: dict[str, Any]) -> None:
        world, method = self.world, self._method

        def begin(rank: int) -> None:
            lifetime = self._lifetime(self._make_worker(rank), options)
            world.kernel.spawn(lifetime, rank, is_main=True)

        world.newcomers.begin = begin
        for rank in sorted(world.alive):
            begin(rank)
        if method.server is not None:
            for end in range(world.size, world.ends):
                own = for_role(method.server, options)
                text = self._compressed(method.server)
                handle = world.mortal.server(cast(Worker, SimulatedWorker(world, end)))
                role = text(handle, world.replicas[end], **own)
                world.kernel.spawn(role, end, is_main=False)

    def _compressed(self, role: Role) -> Role:
        spec = self.settings.method
        known, scale = self.settings.cluster.compression, self.world.post.byte_scale

        def price(compressor: Compressor, count: int, decodes: bool) -> float:
            return scale * seconds(compressor, count, known, decodes=decodes)

        return compressed(role, spec.compressor, spec.method.exchange, price)

    def _make_worker(self, rank: int) -> Worker:
        return self.world.mortal.worker(cast(Worker, SimulatedWorker(self.world, rank)))

    async def _lifetime(self, worker: Worker, options: dict[str, Any]) -> None:
        replica = self.world.replicas[worker.rank]
        own = for_role(self._method.worker, options)
        ending, role = self.world.ending, self._compressed(self._method.worker)

        async def text(handle: Any, x: Any, **options: Any) -> None:
            """Run the method, and run it again if a dead worker has left samples."""
            while True:
                try:
                    await role(handle, x, **options)
                except RunOver:
                    pass
                if not ending.may_go_on or not await ending.goes_on(worker.rank):
                    return

        grouping = Grouping(worker.rank, self.world.size, self.world.groups)
        await role_of(worker, replica, text, own, grouping, on_orphaned=lambda lost: None)
        self.world.end_worker(worker.rank)

    def run(self) -> Result:
        """Run to the end. After an error, `on_row` has been given all rows made before it."""
        try:
            with (
                threads_of(self.settings.threads),
                rounding_as(self.settings.precision or "fp32", torch.device(self.settings.device)),
                interrupted_between_events(self.world.kernel),
                blamed_method(self._method),
            ):
                return self._run()
        except BaseException:
            # An error may come before the first event, and Python warns of coroutines never run.
            for end in range(self.world.ends):
                self.world.kernel.end_tasks(end)
            raise

    def _run(self) -> Result:
        self._began = time.perf_counter()
        if self._resumed is not None:
            self._began -= self._resumed.seconds
            self.world.observer.callbacks.is_muted = True
        if self.settings.engine != "none" and self._is_due(0):
            self._tell(self._row())
        if self._resumed is not None and self._pieces is not None:
            self._make_again(self._resumed, self._pieces)
        with arithmetic_of(self._shown) if self._resumed is None else nullcontext():
            if self._pieces is None:
                self.world.kernel.run()
            else:
                self.world.kernel.run(self._pieces.between, self._pieces.stride)
        if self._method.reference and self.world.alive and not self.world.budget.processed:
            raise ProtocolError("no worker asked for a gradient: `await w.gradient(x)` is missing")
        last = self._row(is_last=True)
        if self.settings.engine != "none":
            self._tell(last)
        if self.world.workers.parameters.is_meta:  # nobody has trained
            held, parameters = None, self.model.initial
        else:
            held = self.held()
            parameters = self._evaluator.output_parameters(held)
        result = {
            "method": str(self.settings.method),
            "task": self.settings.task.name,
            "workers": self.settings.cluster.workers,
            "seed": self.settings.seed,
            "learning_rate": self.settings.learning_rate,
            "digest": self.world.kernel.digest.hexdigest(),
            "parameters_digest": digest_of(parameters),
            **last,
            **self._totals(),
        }
        if self._pieces is not None:
            self._pieces.end()
        self.world.observer.ended(result)
        has_model = self.settings.engine != "none"
        state = self._evaluator.state_dict(held, parameters) if held and has_model else {}
        staleness = dict(sorted(self.world.metrics.histogram.items()))
        return Result(self.settings, result, self.history, parameters, staleness, state)

    def _make_again(self, resumed: RunCheckpoint, pieces: Checkpoints) -> None:
        """Make the events of the earlier pieces, and go on with the values that they had."""
        world = self.world
        try:
            with arithmetic_of(self._shown):
                world.kernel.advance(resumed.events)
            pieces.restore(resumed, self.model.device)
        except RuntimeError as error:
            raise ConfigurationError(
                f"the run cannot be resumed, because something in it acts by the values of tensors "
                f"({str(error).splitlines()[0]}); begin it anew"
            ) from error
        assert isinstance(world.batcher, GradientBatcher)
        world.batcher.engine = self.engine
        world.observer.callbacks.is_muted = False

    def _facts(self) -> tuple[Row, list[Row], float]:
        seconds = time.perf_counter() - self._began
        return self.settings.to_json(), self.history, seconds

    def _watch_progress(self) -> None:
        """Rows of a synchronous run are made of complete rounds, all others after a gradient."""
        if self.world.budget.is_synchronous:
            Rounds(self.world, self._is_due, lambda found: self._tell(self._row(found)))
        else:
            self.world.on_progress = self._progressed

    def _progressed(self) -> None:
        if self._is_due(self.world.budget.processed):
            self._tell(self._row())

    def _is_due(self, samples: int) -> bool:
        """Whether a row is due after this many samples; the end of the run makes the last row."""
        budget = self.world.budget
        is_due = self._next_evaluation <= budget.epochs_of(samples) and samples < budget.samples
        if is_due:
            assert self.settings.epochs
            self._next_evaluation += self.settings.epochs / self.settings.evaluations
        return is_due

    def _tell(self, row: Row) -> None:
        self.history.append(row)
        if self.world.observer.callbacks.is_muted:
            return  # it was told when it was made
        try:
            if self._on_row is not None:
                self._on_row(row)
            self.world.observer.evaluated(row)
        except Exception as error:
            self.world.kernel.raised_outside = error
            raise

    def _row(self, found: CompleteRound | None = None, *, is_last: bool = False) -> Row:
        """One line of the metrics, of a complete round or of the present moment.

        `output` names the model that the scores are about.
        """
        world, metrics = self.world, self.world.metrics
        if self._past:
            # What is waiting in the stores is applied, as it was when the row was made.
            metrics.take_losses()
            held = (self.held if found is None else partial(self._left, found))()
            self._evaluator.reached(held, self._past[0]["epochs"])
            return self._past.popleft()
        workers = metrics.workers.values()
        row: Row = {
            "virtual_seconds": world.duration_ns / SECOND,
            "output": self._method.output,
            **metrics.row(),
            "mean_global_staleness": metrics.global_staleness.mean,
            "mean_age": metrics.age.mean,
            "bytes": sum(world.post.bytes_put),
            "computing_seconds": [own.computing_ns / SECOND for own in workers],
            "waiting_seconds": [own.waited_ns / SECOND for own in workers],
        }
        price = self.settings.cluster.price
        if price.spendings:
            egress = world.post.egress_bytes
            row |= {"egress_bytes": egress}
            row |= price.bill(row["virtual_seconds"], row["computing_seconds"], egress)
        if found is not None:
            row |= {"steps": found.steps, "samples": found.samples}
        row["epochs"] = world.budget.epochs_of(row["samples"])
        if self.settings.engine != "none":
            every = -(-self.settings.evaluations // _ROWS_WITH_WORKERS)
            held = self.held() if found is None else self._left(found)
            self._evaluator.reached(held, row["epochs"])
            scores = self._evaluator.score(
                held, has_workers=is_last or len(self.history) % every == 0
            )
            row |= scores.row(self.settings.task) | {"output": self._evaluator.output}
        return row

    def held(self) -> Held:
        """What the living leaders hold; if none is alive, what all leaders hold."""
        world = self.world
        alive = [rank for rank in world.speakers if rank in world.alive] or list(world.speakers)
        world.workers.flush()
        parameters = world.workers.parameters
        return Held(
            parameters if len(alive) == world.size else parameters[alive],
            [world.replicas[rank].weight for rank in alive],
            world.batcher.buffers[alive],
            self._held_by_servers(),
            [score_of(world.replicas[rank].memory) for rank in alive],
        )

    def _left(self, found: CompleteRound) -> Held:
        """What was held at the end of a round. Servers have not changed since, because a worker has
        only just ended the round and they need all workers."""
        return Held(found.workers, found.weights, found.buffers, self._held_by_servers())

    def _held_by_servers(self) -> list[Tensor]:
        servers = self.world.mortal.acting
        return [held.snapshot() if held.output is None else held.output for held in servers]

    def _cards(self) -> list[dict[str, Any]]:
        """The bytes that each end has sent and received over the network."""
        size, post = self.settings.cluster.workers, self.world.post
        first = size + len(self.world.slices)

        def named(end: int) -> str:
            if end < size:
                return f"worker {end}"
            return f"server {end - size}" if end < first else f"standby of server {end - first}"

        return [
            {"name": named(end),
             "sent": sent, "received": received}
            for end, (sent, received) in enumerate(
                zip(post.bytes_put, post.bytes_taken, strict=True)
            )
        ]  # fmt: skip

    def _totals(self) -> Row:
        world, metrics = self.world, self.world.metrics
        for own, ended_ns in zip(metrics.workers.values(), world.ended_ns, strict=True):
            own.lasted_ns = ended_ns
        for rank, since_ns in world.gone_ns.items():  # they have not come back
            metrics.workers[rank].absent_ns += max(0, world.duration_ns - since_ns)
        weights = [world.replicas[r].weight for r in world.speakers if r in world.alive]
        return {
            **summary(metrics, sum(world.post.bytes_put)),
            "wall_seconds": time.perf_counter() - self._began,
            "events": world.kernel.events,
            "max_global_staleness": metrics.global_staleness.most,
            "ended_seconds": [ended / SECOND for ended in world.ended_ns],
            "waiting_by_worker": [
                {cause: waited / SECOND for cause, waited in own.waiting_ns.items()}
                for own in metrics.workers.values()
            ],
            "cards": self._cards(),
            **({} if world.pipelines is None else world.pipelines.facts()),
            "mean_width": world.batcher.mean_width,
            **world.mortal.facts(),
            "lost_mass": len(world.speakers) - sum(weights),
            "living": len(world.alive),
            **self._goodput(),
            "notices": [
                *self.settings.notices(),
                *([] if self.forecast is None else self.forecast.notices()),
                *self.engine.notices,
                *world.newcomers.notices(),
            ],
        }

    def _goodput(self) -> Row:
        """What became of the workers' time, and of the samples that they have read."""
        world, metrics, compute = self.world, self.world.metrics, self.settings.cluster.compute
        samples = sum(own.samples for own in metrics.workers.values())
        usual_s = compute.seconds * metrics.steps + compute.per_sample * samples
        apart_s = compute.unoverlapped_seconds * metrics.steps
        shares = time_shares(metrics, world.duration_ns, usual_s * SECOND, apart_s * SECOND)
        return {
            "goodput": shares["useful"],
            "time_shares": shares,
            "samples_read": world.samples_read,
            "samples_lost": sum(own.lost_samples for own in metrics.workers.values()),
            "samples_by_epoch": world.book.rows(),
            "recoveries": world.recoveries.rows,
        }


def model_kind(settings: Settings) -> type[FlatModel]:
    """How gradients are taken: at one point, or with a forward pass at another."""
    return SplitPointModel if settings.method.shape.has_split_points else FlatModel


def simulate(
    task: str | Task,
    method: str | MethodSpec,
    cluster: str | Path | Cluster = "equal-8",
    *,
    data: Path | str | None = None,
    on_row: Callable[[Row], None] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    checkpoint: Path | str | None = None,
    checkpoint_every: float = math.inf,
    minutes: float = math.inf,
    **choices: Any,
) -> Result:
    """Train in virtual time with true gradients; the same seed gives the same run.

    With `checkpoint`, the path of a file, a long run is made in pieces: it is written every
    `checkpoint_every` seconds, at Ctrl-C, and after so many `minutes`, when `Unfinished` is raised.
    The same call again goes on from that file, with the same bits as if nothing had happened.

    `choices` are the fields of `Settings`: seed, epochs, batch, learning_rate, optimiser,
    schedule, clip, split, engine, device, precision, compiled, buffers, evaluations. `progress`
    shows how far the run is: by a bar on a terminal or in a notebook, elsewhere by a line for each
    evaluation.
    """
    settings = make_settings(task, method, cluster, data=data, **choices)
    piece = None
    if checkpoint is not None:
        place = Path(checkpoint)
        piece = RunPiece(place, checkpoint_every, 60 * minutes, resumes=place.exists())
    elif min(minutes, checkpoint_every) < math.inf:
        raise ConfigurationError("minutes and checkpoint_every need checkpoint, the path of a file")
    if not progress:
        return Simulation(settings, on_row=on_row, callbacks=callbacks, piece=piece).run()
    with Reporter(1, str(settings.method), is_quiet=True) as reporter:

        def shown(row: Row) -> None:
            line = progress_line(str(settings.method), row)
            reporter.at(line, row["samples"] / settings.samples)
            if not is_watched():
                warn(line)
            if on_row is not None:
                on_row(row)

        result = Simulation(settings, on_row=shown, callbacks=callbacks, piece=piece).run()
        reporter.finished(str(settings.method))
        return result
