"""One process of `gossamer train` with `stages=`: a stage of a replica."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.groups import Grouping
from gossamer.observe.observer import SECOND
from gossamer.real.launch.console import say
from gossamer.real.output_model import Contribution
from gossamer.real.pipelines.stage_links import StageLinks
from gossamer.real.pipelines.stage_parts import StageParts
from gossamer.real.pipelines.stage_pipeline import StagePipeline
from gossamer.real.pipelines.stage_session import StageSession
from gossamer.real.train.stage_batches import StageBatches
from gossamer.real.train.training import Training
from gossamer.real.transports.transport import Transport
from gossamer.replica import Layout, Replica
from gossamer.tasks.evaluator import Held
from gossamer.tasks.keyed import key_of
from gossamer.worker import Gradient, Lesson, check_lesson


class StageTraining(Training):
    """One stage of one replica, and the servers of that stage that live in its process."""

    session: StageSession
    _pipeline: StagePipeline | None = None

    # ------------------------------------------------------------------ what it holds

    def _make_session(
        self, transport: Transport, options: Mapping[str, Any] | None
    ) -> StageSession:  # fmt: skip
        settings, model = self._settings, self._model
        self._shape = settings.method.shape
        self._parts = StageParts(model, settings.stage_cut(), self._shape.places)
        self._stage = transport.rank % self._shape.stages
        return StageSession(
            transport, settings.method, self._observer, self._parts.layouts, seed=settings.seed,
            steps=settings.steps_per_worker, options=options,
        )  # fmt: skip

    @property
    def _layout(self) -> Layout:
        return self._parts.layouts[self._stage]

    def _initial(self) -> Tensor:
        return self._parts.of(self._model.initial, self._stage)

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        try:
            super().run()
        except PeerLost:
            if not self.session.is_orphaned:
                raise
            place, gone = self.session.grouping, self.session.transport.lost
            lost = place.lost(self.session.router.live)
            if not self._speaking:
                raise lost from None
            # The replicas that are left hold the result; one of those that end with it says so.
            self.session.transport.close()
            if self.rank == min(set(place.group) - gone):
                say(str(lost))
        finally:
            if self._pipeline is not None:
                self._pipeline.close()

    def start(self) -> None:
        super().start()
        place = self.session.grouping
        links = self._links = StageLinks(self.worker, self.session.driver, place)
        self._stage_batches.links = links
        self._pipeline = StagePipeline(
            self._model,
            self._parts,
            self._shape,
            links,
            self._settings.batch or 1,
            self._share_over,
        )

    def _share_over(self, step: int) -> float:
        """The part of the samples that all replicas have processed before a step of this one."""
        settings = self._settings
        return step * (settings.batch or 1) * settings.replicas / settings.samples

    def _make_pace(self) -> StageBatches:
        place, router = self.session.grouping, self.session.router
        replica = Grouping(place.number, place.ends)
        batches = self._batches_of(
            replica,
            lambda: place.whole(router.live),
            lambda step: place.whole(router.live_at(step)),
        )
        self._stage_batches = StageBatches(batches, self._shape.steps_ahead)
        return self._stage_batches

    # ------------------------------------------------------------------ gradients

    def _gradient(
        self, at: Tensor | Replica, batch: Tensor | None, lesson: Lesson | None
    ) -> Gradient:
        check_lesson(is_divided=lesson is not None)
        if batch is not None:
            raise ConfigurationError(
                f"{self._settings.method} chooses batches of its own, which a replica of several "
                "processes cannot; leave out stages="
            )
        self.session.driver.check()
        self.replica.begin_step()
        if not self.session.method.servers_hold_model:
            self.replica.read = (self.replica.version,)
        point = at if isinstance(at, Tensor) else at.snapshot()
        samples = len(self._stage_batches.next_batch())
        coming = dict(self._stage_batches.coming)
        self.replica.late = min(min(coming), max(self._shape.lags()))
        gradient = Gradient()
        gradient.settle = lambda: self._compute_stage(gradient, point, coming, samples)
        return gradient

    def _compute_stage(
        self, gradient: Gradient, point: Tensor, coming: dict[int, Tensor], samples: int
    ) -> None:
        links = self._links
        began, waited = time.monotonic_ns(), links.waited_s
        seed, replica = self._settings.seed, self.session.grouping.number
        keys = {number: key_of(seed, replica, number) for number in coming}
        assert self._pipeline is not None
        value, loss = self._pipeline.step(point, coming, keys)
        number = min(coming)
        if self._stage == links.stages - 1 and self._stage:
            links.send(0, loss, ("loss", number))
        elif not self._stage and links.stages > 1:
            loss = links.wait(links.receive(links.stages - 1, ("loss", number)))
        if self.session.slowness is not None:
            taken = (time.monotonic_ns() - began) / SECOND - (links.waited_s - waited)
            self.session.slowness.lengthen(max(0.0, taken))
        ended = time.monotonic_ns()
        self._gradients += 1
        if self._stage:
            # A step of the replica counts once, at its first stage.
            self._observer.passed(self.rank, f"step {number}", (began, ended))
        else:
            work = ended - began - round((links.waited_s - waited) * SECOND)
            self._observer.computed(self.rank, (began, ended), work, samples, loss)
            self._report()
        gradient.resolve(value)

    # ------------------------------------------------------------------ what came out

    def _own_facts(self) -> dict[str, Any]:
        assert self._pipeline is not None
        versions = self._pipeline.most_versions
        return {"stage": [self._stage, self._layout.total, versions]}

    def own_output(self) -> Contribution:
        assert self._pipeline is not None
        return Contribution(*self.replica.for_others(), self._pipeline.buffers())

    def _held(self) -> Held:
        session, place = self.session, self.session.grouping
        while True:
            ranks = sorted(place.speaking(session.router.live))
            workers, servers = session.contributions(ranks)
            if len(workers) == len(ranks):
                return self._parts.joined(workers, servers)
            # One has died before it answered, and its replica does not count any more.
