"""One run of a script in virtual time, from settings to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.config.settings import split_groups
from gossamer.errors import ConfigurationError, RunOver, Stalled
from gossamer.methods import Method
from gossamer.observe.callbacks import Callback
from gossamer.observe.observer import Observer
from gossamer.runs.result import Result, Row, digest_of
from gossamer.script.channel import Said
from gossamer.script.fork_server import ForkServer
from gossamer.script.memory import tensor_of
from gossamer.sim.engine import NullEngine
from gossamer.sim.script.crew import Crew
from gossamer.sim.script.script_gradients import ScriptWorker
from gossamer.sim.script.script_settings import ScriptSettings
from gossamer.sim.script.script_world import ScriptWorld, distance_of
from gossamer.sim.simulation import Simulation

_NOTHING_REPORTED = (
    "the script has reported nothing, so there is no curve; call worker.report(loss=..., "
    "accuracy=...) where it evaluates"
)
_NO_STEPS = (
    "the script has left its loop without a step of any worker; see that the loop has batches and "
    "calls worker.step()"
)


class ScriptSimulation(Simulation):
    """Builds the world of one run, runs it, and ends its processes."""

    def __init__(
        self,
        settings: ScriptSettings,
        server: ForkServer,
        outputs: Path,
        *,
        on_row: Callable[[Row], None] | None = None,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
        needs_reports: bool = False,
    ) -> None:
        """`outputs` is a folder for what the processes print."""
        assert settings.script is not None
        self.settings = self._script_settings = settings
        self._method: Method = settings.method.method
        self._on_row = on_row
        self.engine = NullEngine()
        self.forecast = None
        self.history: list[Row] = []
        self._began = 0.0
        self._reported: dict[str, float] = {}
        self._needs_reports = needs_reports
        if settings.method.shape.machines > 1:
            raise ConfigurationError(
                f"{settings.method}: a script's model is trained whole by one process and cannot "
                "be cut into stages; leave out stages= and tensor="
            )
        if settings.method.standby:
            raise ConfigurationError(
                f"{settings.method}: the servers of a script have no standby in virtual time, "
                "because the script's optimiser runs there; leave out standby="
            )
        if settings.cluster.has_newcomers:
            raise ConfigurationError(
                "no worker of a script can come during a run in virtual time, because its process "
                "begins with the script; leave out --arrive, --return and the repair of [failures]"
            )
        size = settings.cluster.workers
        self._crew = Crew(
            server, settings.script, range(size), size, seed=settings.seed,
            method=str(settings.method), threads=settings.threads, outputs=outputs,
        )  # fmt: skip
        try:
            self._crew.meet()
            self._crew.welcome(split_groups(settings.method.groups, settings.cluster))
            model = self._crew.begin(has_host=self._method.server is not None)
            options = settings.method_options()
            world = ScriptWorld(settings, options, self._crew, model, observers, callbacks)
            self.world = self._script_world = world
            world.on_report = self._on_report
            self._spawn(options)
        except BaseException:
            self._crew.close()
            raise

    def _make_worker(self, rank: int) -> ScriptWorker:
        return ScriptWorker(self.world, rank)

    async def _lifetime(self, worker: Any, options: dict[str, Any]) -> None:
        try:
            await super()._lifetime(worker, options)
        except RunOver:
            # Of a member of a group, whose leader goes on without it.
            self.world.end_worker(worker.rank)
        if not self._script_world.source.loops[worker.rank].has_ended:
            raise ConfigurationError(
                f"the loop of worker {worker.rank} goes on, but the first worker of its group has "
                "left its own; give every worker of a group as many batches as the others"
            )

    def run(self) -> Result:
        try:
            return super().run()
        finally:
            self._crew.close()

    def _run(self) -> Result:
        self._began, settings = time.perf_counter(), self._script_settings
        try:
            self.world.kernel.run()
        except Stalled:
            self._script_world.calls.check()
            raise
        if self.world.alive and not self.world.metrics.steps:
            raise ConfigurationError(_NO_STEPS)
        parameters, state = self._finish()
        result: Row = {
            "method": str(self.settings.method),
            "task": self.settings.task.name,
            "workers": self.world.size,
            "seed": self.settings.seed,
            "learning_rate": self.settings.learning_rate,
            "digest": self.world.kernel.digest.hexdigest(),
            "parameters_digest": digest_of(parameters),
            **self._row(),
            **self._reported,
            **self._totals(),
        }
        result["notices"] += self._crew.notices
        if settings.compute == "measured":
            took = settings.cluster.compute.seconds
            result["notices"].append(f"measured: a step of worker 0 computes for {took:.3g} s")
        if not self.history:
            if self._needs_reports:
                raise ConfigurationError(_NOTHING_REPORTED)
            result["notices"].append(_NOTHING_REPORTED)
        self.world.observer.ended(result)
        # What the run is judged by, it is judged by to its end.
        score = "accuracy" if "accuracy" in self._reported else "loss"
        while self.history and self.history[-1][score] is None:
            self.history.pop()
        staleness = dict(sorted(self.world.metrics.histogram.items()))
        return Result(self.settings, result, self.history, parameters, staleness, state)

    def _row(self, found: Any = None, *, is_last: bool = False) -> Row:
        row = super()._row()
        values = self.held().workers
        return row | {"loss": None, "accuracy": None, "consensus_distance": distance_of(values)}

    def _on_report(self, rank: int, values: Mapping[str, float]) -> None:
        """That of the main worker counts."""
        if rank != self._script_world.main:
            return
        row = self._row()
        for name in values:
            if row.get(name) is not None:
                raise ConfigurationError(
                    f"worker.report() was given {name!r}, which the simulation counts by itself; "
                    "choose another name"
                )
        self._reported |= values
        self._tell(row | dict(values))

    # ------------------------------------------------------------------ the end

    def _finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Everyone gets the output and goes on to the end of its script."""
        world, crew = self._script_world, self._crew
        standing = world.standing()
        found = [world.contribution(rank) for rank in standing]
        living = [crew.members[rank] for rank in sorted(world.alive)]
        if not living:
            return world.workers.parameters.mean(0), {}
        outputs = {member.rank: world.put_output(member.rank, found) for member in living}
        for member in living:
            member.tell("final", {"main": world.main})
        if world.source.loops[world.main].recalibrates:
            said = [crew.next(member) for member in living]
            for member in living:
                member.tell("collected", {"members": len(said)})
                for one in said:
                    member.tell("averages", one.values, raw=one.raw)
        state: dict[str, Tensor] = {}
        for member in living:
            member.is_needed = False
        for member in living:
            for said_last in crew.drained(member):
                if said_last.kind == "model":
                    state = _state_of(said_last)
                elif said_last.kind == "report":
                    self._on_report(member.rank, said_last["values"])
        return outputs[world.main], state


def _state_of(said: Said) -> dict[str, Tensor]:
    """A model by the names that the script gives its parts."""
    raw = tensor_of(said.files[0], torch.uint8)
    state: dict[str, Tensor] = {}
    at = 0
    for name, kind, shape in said["tensors"]:
        dtype: torch.dtype = getattr(torch, kind)
        size = torch.Size(shape)
        end = at + size.numel() * dtype.itemsize
        state[name] = raw[at:end].clone().view(dtype).view(size)
        at = end
    return state
