"""A user's loop as a worker of a simulation: the method runs elsewhere, this process computes.

`worker.step()` hands the gradient over and waits for the next point. What the method does to the
replica the coordinator does in memory that both see. Only what needs the user's optimiser is done
here, with the same code as on real workers, so that the bits are the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.observe.run_observer import RunObserver
from gossamer.real.join.balance import LoopShares
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.checks import check_apart, check_one_optimiser, reported
from gossamer.real.join.gradient import LoopGradient
from gossamer.real.join.joined_worker import JoinedWorker
from gossamer.real.join.learning.lessons import Lessons
from gossamer.real.join.loop_session import LoopSession
from gossamer.real.join.loop_watch import LoopWatch
from gossamer.real.join.output import LoopOutput
from gossamer.real.join.recalibration import Averages, combined_averages
from gossamer.real.join.servers import momentum_left_out, worker_replica
from gossamer.real.join.virtual.virtual_loader import VirtualPasses, virtual_shard
from gossamer.real.join.virtual.virtual_server import fork_server_host, group_options
from gossamer.real.join.virtual.virtual_session import VirtualSession, VirtualValues, name_of
from gossamer.real.output_model import Contribution, pack_bytes, unpack_bytes_, untrained
from gossamer.real.session import Session
from gossamer.replica import trainable
from gossamer.script.channel import Channel, Said, ScriptProcess
from gossamer.script.memory import file_of, tensor_of


def virtual_worker(
    channel: Channel, model: nn.Module, optimizer: torch.optim.Optimizer, spec: MethodSpec | None,
    seed: int, steps: int, observer: RunObserver, statistics_batches: int,
) -> JoinedWorker:  # fmt: skip
    """What `join` returns in a process that a simulation drives."""
    if spec is None:
        raise ConfigurationError(
            "no method was given; write join(model, optimizer, method='ad_psgd') or add --method "
            "ad_psgd to the command"
        )
    if ScriptProcess.has_joined:
        raise ConfigurationError(
            "the script joins a second time, and a simulation is of one coupled loop; do all "
            "training in one `with gossamer.join(...)`"
        )
    elsewhere = [p.device for p in model.parameters() if p.device.type != "cpu"]
    if elsewhere:
        raise ConfigurationError(
            f"the model is on {elsewhere[0]}, and in virtual time scripts run on the CPU, because "
            "a forked process cannot use a GPU; leave the model on the CPU there"
        )
    ScriptProcess.has_joined = True
    named = trainable(model)
    check_one_optimiser(optimizer, named)
    check_apart(named)
    binding = ModuleBinding(named)
    session = VirtualSession(channel, spec, model, binding, optimizer, observer, steps)
    session.notices = momentum_left_out(
        spec, optimizer, is_synchronous=session.is_synchronous
    )  # fmt: skip
    loop = VirtualLoop(session, model, binding, optimizer, statistics_batches)
    worker = VirtualWorker(model, optimizer, spec, cast(Any, loop), seed, observer)
    worker.attach(session)
    return worker


class VirtualWorker(JoinedWorker):
    """What the loop of a simulated worker works with."""

    def attach(self, session: VirtualSession) -> None:
        self.session = session
        if not isinstance(self._passes, LoopShares):
            self._passes = VirtualPasses()

    def shard(self, loader: Any) -> Any:
        if isinstance(self._passes, LoopShares):
            return self._passes.shard(loader, self.session, self.seed)
        return virtual_shard(loader, self.session, self.seed, self._passes)

    def report(self, **values: float) -> None:
        self.session.say("report", {"values": reported(values)})

    def save(self, folder: Path | str, number: int, *, keep: int = 2, **others: Any) -> None:
        """Nothing: a run in virtual time is repeated from its seed."""

    def restore(self, folder: Path | str, **others: Any) -> int:
        """A run in virtual time begins at its beginning."""
        return 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ConfigurationError(
            "a run in virtual time begins at its beginning and loads no checkpoint; leave "
            "worker.load_state_dict() out there"
        )


class VirtualOutput(LoopOutput):
    """The output model of the virtual moment at which it is asked for."""

    def __init__(
        self, session: VirtualSession, loop: VirtualLoop, model: nn.Module, binding: ModuleBinding,
        most_batches: int,
    ) -> None:  # fmt: skip
        super().__init__(cast(Session, session), model, binding, loop.replica, most_batches)
        self._most_behind = None  # the coordinator waits for who is behind
        self._virtual = session

    @property
    def _warns(self) -> bool:
        return self._virtual.steps_made > 0 and self._virtual.is_lowest

    def _output(self, step: int = 0) -> Contribution:
        session = self._virtual
        session.ask("consensus", {"steps": session.steps_made}, "output")
        return session.given_output()

    def final(self) -> tuple[Contribution, Averages | None]:
        """Of all workers, after the coordinator has sent it."""
        session, output = self._virtual, self._virtual.given_output()
        if not self.recalibration.is_needed:
            return output, None
        with self._visit(output):
            own = self.recalibration.averages(warns=self._warns)
        session.say("averages", {"count": own.count}, own.values.numpy().tobytes())
        found: list[Averages] = []
        for _ in range(session.next("collected")["members"]):
            said = session.next("averages")
            values = torch.frombuffer(bytearray(said.raw), dtype=torch.float64)
            found.append(Averages(said["count"], values))
        combined = combined_averages(found)
        return output, combined if combined.count else None


class VirtualLoop:
    """Everything behind a `VirtualWorker`, as `LoopSession` is on real workers."""

    last_words, summary = LoopSession.last_words, LoopSession.summary

    def __init__(
        self, session: VirtualSession, model: nn.Module, binding: ModuleBinding,
        optimizer: torch.optim.Optimizer, statistics_batches: int,
    ) -> None:  # fmt: skip
        self.session = session
        self.shared = VirtualValues(session)
        self.gradients = SimpleNamespace(is_accumulating=False)
        # Only real workers come and go in a loop, so nobody need account for its batches.
        self.accounts, self.passes = None, list[dict[str, Any]]()
        balances = bool(session.spec.balance)
        self.shares = LoopShares(lambda: session.training, session.took) if balances else None
        self.lessons = Lessons(model, binding.layout, session.spec.name)
        """Never of any teachers: methods that have some are refused by the coordinator."""
        self._model = model
        self._binding = binding
        self._optimizer = cast(Any, optimizer)
        self._statistics_batches = statistics_batches
        self._hook: Any = None
        self._changed: list[int] = []
        self._options: list[dict[str, Any]] | None = None

    # ------------------------------------------------------------------ begin and end

    def begin(self) -> None:
        session, binding = self.session, self._binding
        session.memory.value[session.rank].copy_(binding.initial())
        session.publish_buffers(self._model)
        own = pack_bytes(untrained(self._model)).numpy().tobytes()
        values = {"notices": list(session.notices)}
        session.say("ready", values, own if session.rank == 0 else b"")
        told = session.next("begin")
        if told.raw:
            theirs = torch.frombuffer(bytearray(told.raw), dtype=torch.uint8)
            unpack_bytes_(untrained(self._model), theirs)
        # Where others look at any moment, what the loop does to its parameters in between must not
        # be seen before the coordinator comes to it.
        is_private = session.method.shares_replica or not session.is_synchronous
        binding.attach(session.memory.value[session.rank], is_private=is_private)
        lay_out_state(self._optimizer)
        self.replica = worker_replica(cast(Session, session), binding, self._optimizer)
        if told.files:
            fork_server_host(told.files[0], session, self.replica, binding, self._optimizer)
        self._watch = LoopWatch(
            self._model, binding, self._optimizer, self.replica, session.method
        )  # fmt: skip
        self.output = VirtualOutput(session, self, self._model, binding, self._statistics_batches)
        self._watch.begin()
        self._obey()

    def finish(self) -> None:
        """The loop is over: wait for the others, then hold the output model."""
        session, output = self.session, self.output
        self._watch.end()
        self._unhook()
        needed = output.recalibration.is_needed
        session.say("end", {"used": session.used, "recalibrates": needed})
        self._obey()
        output.recalibration.close()
        output.put(*output.final())
        lay_out_state(self._optimizer)
        if session.is_lowest:
            self._hand_over_model()
        ScriptProcess.has_ended = True

    def _hand_over_model(self) -> None:
        state = {
            name: value for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }  # fmt: skip
        described = [[name, name_of(v.dtype), list(v.shape)] for name, v in state.items()]
        file = file_of(pack_bytes(state.values()))
        self.session.channel.send("model", {"tensors": described}, files=[file])
        os.close(file)

    def abandon(self) -> None:
        """The loop failed: the module keeps what this worker has."""
        self._watch.end()
        self._unhook()
        self.output.recalibration.close()
        self._binding.detach(self._binding.window / self.replica.weight)

    # ------------------------------------------------------------------ the loop

    def step(self, *, skips_infinite: bool = False) -> None:
        """The gradient is there: hand it over, and wait for the next point."""
        session, watch = self.session, self._watch
        if self.output.is_visiting:
            raise ConfigurationError(
                "worker.step() was called inside worker.consensus(), where the model is the output"
                " and not what this worker trains; leave the `with` first"
            )
        self._unhook()
        watch.look()
        self._changed = watch.changed()
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        self._optimizer._opt_called = True
        if self.shares is not None:
            samples, seconds = session.pace
            self.shares.weigh(self._binding.parameters, seconds, samples)
        self._publish()
        session.steps_made += 1
        session.say("step", {
            "samples": session.samples, "of": session.samples_of_pass, "used": session.used,
            "changed": bool(self._changed), "learning_rate": self.replica.learning_rate,
            **self._new_options(),
        })  # fmt: skip
        session.samples = 0
        watch.is_stepping = True
        try:
            self._obey()
        finally:
            watch.is_stepping = False

    def _publish(self) -> None:
        """The gradient, and the buffers as they are after it, where the coordinator sees them."""
        session, binding = self.session, self._binding
        row = session.memory.gradient[session.rank]
        for piece, parameter in zip(binding.cut(row), binding.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                piece.zero_()
            else:
                piece.copy_(gradient.to_dense() if gradient.is_sparse else gradient.detach())
        self._own = LoopGradient.of(binding, range(len(binding.parameters)))
        skips = session.method.has_server and self.replica.skips_infinite
        self.replica.skips_this = skips and not bool(torch.isfinite(row).all())
        if self.replica.skips_this:
            row.zero_()  # an infinite one would spoil what servers keep
        session.publish_buffers(self._model)

    def _new_options(self) -> dict[str, Any]:
        """Of the optimiser's groups, where a server follows them and a schedule has changed them.
        They travel with the step."""
        if self.session.method.server is None:
            return {}
        options = group_options(self._optimizer)
        if options == self._options:
            return {}
        self._options = options
        return {"options": options}

    def _obey(self) -> None:
        """Do what the coordinator asks of this worker's replica, until the loop is to go on."""
        while True:
            said = self.session.channel.receive()
            if said.kind == "resume":
                self._resume(said)
                return
            if said.kind == "final":
                self.session.main = said["main"]
                return
            self._do(said)

    def _resume(self, said: Said) -> None:
        session, binding = self.session, self._binding
        point = session.memory.point[session.rank] if said["is_elsewhere"] else None
        if point is not None:
            binding.make_private()
            binding.load(point)
        elif binding.is_private:
            binding.load(self.replica.window)
        if binding.is_private or session.method.servers_hold_model:
            self._watch.given(point)
        session.main = said["main"]
        session.pace, session.training = tuple(said["pace"]), frozenset(said["training"])
        session.grant(said["batches"], said["pass"])
        if said["weight"] != self.replica.weight:
            self.replica.weight = said["weight"]
        self._hook = register_module_forward_pre_hook(self._forward)

    def _forward(self, module: nn.Module, given: Any) -> None:
        """Gradients are recorded: what is left of the step is computing."""
        is_ours = self.session.is_here and not self.output.is_visiting
        if is_ours and torch.is_grad_enabled():
            self._unhook()
            self.session.say("begun")

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ------------------------------------------------------------------ the optimiser's part

    def _do(self, said: Said) -> None:
        deed: Callable[[Said], Mapping[str, Any] | None] = getattr(self, f"_do_{said.kind}")
        values = dict(deed(said) or {})
        files = [values.pop("file")] if "file" in values else []
        self.session.channel.send("done", values, files=files)
        for file in files:
            os.close(file)

    def _descent(self) -> Tensor:
        return self.session.memory.descent[self.session.rank]

    def _gradient(self, said: Said) -> Tensor:
        return self._descent() if said["is_given"] else self._own

    def _do_carry(self, said: Said) -> None:
        self._watch.publish(self._changed)

    def _do_descend(self, said: Said) -> None:
        point = self.session.memory.point[self.session.rank] if said["has_point"] else None
        self.replica.descend_(self._gradient(said), at=point, share=said["share"])

    def _do_clip(self, said: Said) -> None:
        self._descent().copy_(_vector(self.replica.clipped(self._gradient(said))))

    def _do_penalise(self, said: Said) -> None:
        point = self.session.memory.point[self.session.rank]
        found = self.replica.penalised(_vector(self._gradient(said)), point)
        self._descent().copy_(_vector(found))

    def _do_state(self, said: Said) -> Mapping[str, Any]:
        return {"file": file_of(self.replica.optimiser_state())}

    def _do_load(self, said: Said) -> None:
        self.replica.load_optimiser_state_(tensor_of(said.files[0], self._binding.dtype))

    def _do_reset(self, said: Said) -> None:
        self.replica.reset_optimiser_()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to go on with: a run in virtual time is repeated from its seed."""
        spec = self.session.spec
        return {"method": f"{spec} in virtual time", "step": self.session.steps_made}


def _vector(gradient: Tensor) -> Tensor:
    return gradient.vector() if isinstance(gradient, LoopGradient) else gradient
