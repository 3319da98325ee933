"""One run in virtual time, from settings to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.callbacks import Callback
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings, split_groups
from gossamer.errors import RunOver
from gossamer.groups import Grouping, Groups, role_of
from gossamer.methods import Method, MethodSpec, for_role
from gossamer.optim.optimisers import make_optimiser
from gossamer.optim.schedules import make_schedule
from gossamer.replica import cut
from gossamer.runs.result import Result, Row, digest_of
from gossamer.sim.accounts import Observed
from gossamer.sim.buckets import make_buckets
from gossamer.sim.budget import Budget
from gossamer.sim.engine import Engine, make_engine
from gossamer.sim.gradients import GradientDesk
from gossamer.sim.interrupts import interrupted_between_events
from gossamer.sim.kernel import SECOND
from gossamer.sim.replica_matrix import ReplicaStore
from gossamer.sim.rounds import Complete, Rounds
from gossamer.sim.worker import SimulatedWorker
from gossamer.sim.world import Parts, Rates, World
from gossamer.tasks import Task
from gossamer.tasks.evaluator import Evaluator, Held
from gossamer.tasks.flat_model import FlatModel
from gossamer.tasks.split import make_sampler
from gossamer.trace import Recorder

_COMPILE_AFTER_GRADIENTS = 20_000


class Simulation:
    """Builds the world of one run, runs it, keeps its metrics."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_row: Callable[[Row], None] | None = None,
        recorder: Recorder | None = None,
        callbacks: Sequence[Callback] = (),
        engine: Engine | None = None,
        model: FlatModel | None = None,
    ) -> None:
        self.settings = settings
        self._method: Method = settings.method.method
        self._ends = (
            len(split_groups(settings.method.groups, settings.cluster)) or settings.cluster.workers
        )
        options = settings.method.resolve(self._ends, settings.steps_per_worker)
        self._options = options
        self._on_row = on_row
        device = torch.device(settings.device)
        self.model = (
            FlatModel(settings.task, device, seed=settings.seed) if model is None else model
        )
        self.engine = engine or make_engine(settings.engine, self.model, compiled=self._compiles())
        self._evaluator = Evaluator(
            self.model, self._method.output, settings.buffers,
            is_trained_itself=self._method.is_trained_itself(self._ends, options),
        )  # fmt: skip
        self.world = World(self._parts(options), recorder, callbacks)
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
        gradients = self.settings.samples / (self.settings.batch or 1)
        return self.settings.device.startswith("cuda") and gradients >= _COMPILE_AFTER_GRADIENTS

    def _parts(self, options: dict[str, Any]) -> Parts:
        settings, model = self.settings, self.model
        cluster, task = settings.cluster, settings.task
        assert settings.batch
        assert settings.epochs
        assert settings.learning_rate
        assert settings.optimiser
        synchronous = self._method.is_synchronous(options)
        optimiser = settings.method.optimiser(
            make_optimiser(settings.optimiser), self._ends, is_synchronous=synchronous
        )
        workers = ReplicaStore(cluster.workers, model.initial, optimiser, clip=settings.clip)
        slices = self._slices()
        servers = tuple(
            ReplicaStore(1, model.initial[part], optimiser, clip=settings.clip) for part in slices
        )
        buffers = model.initial_buffers.repeat(cluster.workers, 1)
        schedule = make_schedule(settings.schedule, epochs=settings.epochs, workers=cluster.workers)
        own_bytes = model.layout.total * model.initial.element_size()
        byte_scale = settings.model_bytes / own_bytes if settings.model_bytes else 1.0
        sample = task.train.inputs[:1].to(model.device)
        return Parts(
            cluster=cluster,
            seed=settings.seed,
            budget=Budget(
                settings.samples,
                settings.batch,
                len(task.train),
                synchronous=synchronous,
                living=lambda: self.world.alive - self.world.ended,
                groups=split_groups(settings.method.groups, cluster),
            ),
            rates=Rates(settings.learning_rate, schedule),
            sampler=make_sampler(
                task.train.targets,
                cluster.workers,
                settings.batch,
                settings.split,
                settings.seed,
                synchronous,
            ),
            desk=GradientDesk(self.engine, workers, buffers),
            workers=workers,
            servers=servers,
            slices=slices,
            server_machines=self._server_machines(len(servers)),
            buckets=make_buckets(model.module, sample, byte_scale),
            shares_replica=self._method.shares_replica,
            servers_hold_model=self._method.servers_hold_model,
            byte_scale=byte_scale,
        )

    def _slices(self) -> tuple[slice, ...]:
        """Which server holds what."""
        if not self._method.has_server:
            return ()
        return cut(self.model.layout.sizes, self.settings.method.servers)

    def _server_machines(self, servers: int) -> tuple[int, ...]:
        """A machine for each server: one of its own, or those of the workers in turn."""
        cluster = self.settings.cluster
        machines = cluster.machine_of(cluster.workers - 1) + 1
        if self.settings.method.placement == "workers":
            return tuple(server % machines for server in range(servers))
        return tuple(machines + server for server in range(servers))

    def _spawn(self, options: dict[str, Any]) -> None:
        world, method = self.world, self._method
        groups = split_groups(self.settings.method.groups, world.cluster)
        if groups:
            world.speakers = [group[0] for group in groups]
        for rank in range(world.size):
            lifetime = self._lifetime(SimulatedWorker(world, rank), options, groups)
            world.kernel.spawn(lifetime, rank, is_main=True)
        if method.server is not None:
            for end in range(world.size, world.ends):
                own = for_role(method.server, options)
                role = method.server(SimulatedWorker(world, end), world.replicas[end], **own)
                world.kernel.spawn(role, end, is_main=False)

    async def _lifetime(
        self, worker: SimulatedWorker, options: dict[str, Any], groups: Groups
    ) -> None:
        replica = self.world.replicas[worker.rank]
        own = for_role(self._method.worker, options)
        ending = self.world.ending

        async def text(handle: Any, x: Any, **options: Any) -> None:
            """Once, and again if a worker that died has left something to do."""
            while True:
                try:
                    await self._method.worker(handle, x, **options)
                except RunOver:
                    pass
                if not ending.may_go_on or not await ending.goes_on(worker.rank):
                    return

        grouping = Grouping(worker.rank, self.world.size, groups)
        await role_of(worker, replica, text, own, grouping, on_orphaned=lambda lost: None)
        self.world.end_worker(worker.rank)

    def run(self) -> Result:
        """To the end of the run; what was recorded before an error has been handed out already."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.settings.threads)
        try:
            with interrupted_between_events(self.world.kernel):
                return self._run()
        except BaseException:
            # Python complains about coroutines that never ran: the first row comes before any did.
            for end in range(self.world.ends):
                self.world.kernel.end_tasks(end)
            raise
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> Result:
        self._began = time.perf_counter()
        if self.settings.engine != "none" and self._is_due(0):
            self._tell(self._row())
        self.world.kernel.run()
        summary = self._row()
        if self.settings.engine != "none":
            self._tell(summary)
        held = self._held()
        parameters = self._evaluator.output_parameters(held)
        summary = {
            "method": str(self.settings.method),
            "task": self.settings.task.name,
            "workers": self.world.size,
            "seed": self.settings.seed,
            "learning_rate": self.settings.learning_rate,
            "digest": self.world.kernel.digest.hexdigest(),
            "parameters_digest": digest_of(parameters),
            **summary,
            **self._totals(),
        }
        for callback in self.world.callbacks:
            callback.on_end(summary)
        tally = self.world.accounts.staleness.histogram
        has_model = self.settings.engine != "none"
        state = self._evaluator.state_dict(held, parameters) if has_model else {}
        staleness = dict(sorted(tally.items()))
        return Result(self.settings, summary, self.history, parameters, staleness, state)

    def _watch_progress(self) -> None:
        """In a synchronous run rows are made of complete rounds, else after a gradient."""
        if self.world.budget.is_synchronous:
            groups = split_groups(self.settings.method.groups, self.settings.cluster)
            Rounds(self.world, groups, self._is_due, lambda found: self._tell(self._row(found)))
        else:
            self.world.on_progress = self._progressed

    def _progressed(self) -> None:
        if self._is_due(self.world.budget.processed):
            self._tell(self._row())

    def _is_due(self, samples: int) -> bool:
        """Whether so many samples are worth a row; the last row is made at the end of the run."""
        budget = self.world.budget
        is_due = self._next_evaluation <= budget.epochs_of(samples) and samples < budget.samples
        if is_due:
            assert self.settings.epochs
            self._next_evaluation += self.settings.epochs / self.settings.evaluations
        return is_due

    def _tell(self, row: Row) -> None:
        self.history.append(row)
        try:
            if self._on_row is not None:
                self._on_row(row)
            for callback in self.world.callbacks:
                callback.on_evaluation(row)
        except Exception as error:
            self.world.kernel.raised_outside = error
            raise

    def _row(self, found: Complete | None = None) -> Row:
        """One line of the metrics; every value names the model it speaks of by `output`.

        Of a complete round, or of the moment.
        """
        world, accounts = self.world, self.world.accounts
        losses, accounts.losses = accounts.losses, []
        samples = world.budget.processed if found is None else found.samples
        row: Row = {
            "virtual_seconds": world.duration_ns / SECOND,
            "epochs": world.budget.epochs_of(samples),
            "steps": accounts.steps if found is None else found.steps,
            "samples": samples,
            "output": self._method.output,
            "training_loss": float(torch.stack(losses).mean()) if losses else None,
            "mean_staleness": accounts.staleness.mean,
            "mean_global_staleness": accounts.global_staleness.mean,
            "mean_age": accounts.age.mean,
            "bytes": sum(world.post.bytes_put),
            "computing_seconds": [a.computing_ns / SECOND for a in accounts.workers],
            "waiting_seconds": [a.waited_ns / SECOND for a in accounts.workers],
            "waits_for": accounts.longest_wait,
        }
        if self.settings.engine != "none":
            scores = self._evaluator.score(self._held() if found is None else self._left(found))
            row |= {
                "loss": scores.loss,
                "accuracy": scores.accuracy,
                "worker_accuracy": scores.worker_accuracy,
                "consensus_distance": scores.consensus_distance,
            }
        return row

    def _held(self) -> Held:
        """By the living who speak for themselves; if nobody lives, by all of them."""
        world = self.world
        alive = [rank for rank in world.speakers if rank in world.alive] or list(world.speakers)
        world.parts.workers.flush()
        parameters = world.parts.workers.parameters
        return Held(
            parameters if len(alive) == world.size else parameters[alive],
            [world.replicas[rank].weight for rank in alive],
            world.desk.buffers[alive],
            self._held_by_servers(),
        )

    def _left(self, found: Complete) -> Held:
        """Servers have not gone on: that takes everybody, and one has only just ended the round."""
        return Held(found.workers, found.weights, found.buffers, self._held_by_servers())

    def _held_by_servers(self) -> list[Tensor]:
        servers = self.world.replicas[self.world.size :]
        return [held.snapshot() if held.output is None else held.output for held in servers]

    def _cards(self) -> list[dict[str, Any]]:
        """What each end has sent and got over the network, in bytes."""
        size, post = self.world.size, self.world.post
        return [
            {"name": f"worker {end}" if end < size else f"server {end - size}",
             "sent": post.bytes_put[end], "received": post.bytes_taken[end]}
            for end in range(self.world.ends)
        ]  # fmt: skip

    def _observed(self, what: str) -> Observed:
        return self.world.accounts.observed.get(what, Observed())

    def _totals(self) -> Row:
        world, accounts = self.world, self.world.accounts
        steps = max(1, accounts.steps)
        causes: dict[str, float] = {}
        for account in accounts.workers:
            for cause, waited in account.waiting_ns.items():
                causes[cause] = causes.get(cause, 0.0) + waited / SECOND
        weights = [world.replicas[r].weight for r in world.speakers if r in world.alive]
        return {
            "wall_seconds": time.perf_counter() - self._began,
            "events": world.kernel.events,
            "max_staleness": accounts.staleness.most,
            "max_global_staleness": accounts.global_staleness.most,
            "max_clock_gap": self._observed("clock_gap").most,
            "dropped_gradients": self._observed("dropped").count,
            "max_queue": self._observed("queue").most,
            "bytes_per_step": sum(world.post.bytes_put) / steps,
            "waiting_fraction": accounts.waiting_fraction(world.ended_ns),
            "ended_seconds": [ended / SECOND for ended in world.ended_ns],
            "waiting_by_cause": causes,
            "waiting_by_worker": [
                {cause: waited / SECOND for cause, waited in account.waiting_ns.items()}
                for account in accounts.workers
            ],
            "cards": self._cards(),
            "exchanges_per_step": accounts.exchanges_per_step,
            "mean_width": world.desk.mean_width,
            "lost_mass": len(world.speakers) - sum(weights),
            "living": len(world.alive),
            "notices": [*self.settings.notices(), *self.engine.notices],
        }


def simulate(
    task: str | Task,
    method: str | MethodSpec,
    cluster: str | Path | Cluster = "equal-8",
    *,
    data: Path | str | None = None,
    on_row: Callable[[Row], None] | None = None,
    callbacks: Sequence[Callback] = (),
    **choices: Any,
) -> Result:
    """Train in virtual time with true gradients; the same seed gives the same run.

    `choices` are the fields of `Settings`: seed, epochs, batch, learning_rate, optimiser,
    schedule, clip, split, engine, device, compiled, buffers, evaluations.
    """
    settings = make_settings(task, method, cluster, data=data, **choices)
    return Simulation(settings, on_row=on_row, callbacks=callbacks).run()
