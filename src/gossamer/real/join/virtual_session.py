"""A user's loop as a worker of a simulation: the method runs elsewhere, this process computes.

`worker.step()` hands the gradient over and waits for the next point. What the method does to the
replica the coordinator does in memory that both see; only what needs the user's optimiser is done
here, with the same code as on real workers, so that the bits are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.groups import Grouping, Groups
from gossamer.methods import MethodSpec
from gossamer.observe.run_observer import RunObserver
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.changes import Changes
from gossamer.real.join.checks import LoopWatch
from gossamer.real.join.gradient import LoopGradient
from gossamer.real.join.handout import Handout
from gossamer.real.join.joined_worker import JoinedWorker
from gossamer.real.join.recalibration import Averages, Recalibration, combined_averages
from gossamer.real.join.server import momentum_left_out, worker_replica
from gossamer.real.join.step_guard import StepGuard, check_one_optimiser
from gossamer.real.join.virtual_loader import VirtualPasses, virtual_shard
from gossamer.real.join.virtual_server import fork_server_host, group_options
from gossamer.real.output_model import (
    Contribution,
    Untrained,
    pack_bytes,
    unpack_bytes_,
    untrained,
)
from gossamer.real.transports.transport import Store
from gossamer.replica import trainable
from gossamer.script.channel import Channel, Said, ScriptProcess
from gossamer.script.memory import MemoryPlan, ModelMemory, file_of, tensor_of


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
    check_one_optimiser(optimizer, trainable(model))
    binding = ModuleBinding(trainable(model))
    session = VirtualSession(channel, spec, model, binding, optimizer, steps, statistics_batches)
    left_out = momentum_left_out(spec, optimizer, is_synchronous=session.is_synchronous)
    session.notices = left_out
    worker = VirtualWorker(model, optimizer, spec, cast(Any, session), seed, observer)
    worker.attach(session)
    return worker


class VirtualWorker(JoinedWorker):
    """What the loop of a simulated worker holds on to."""

    def attach(self, session: VirtualSession) -> None:
        self.session = session
        self._passes = VirtualPasses()

    def shard(self, loader: Any) -> Any:
        return virtual_shard(loader, self.session, self.seed, self._passes)

    def report(self, **values: float) -> None:
        self.session.report(self._reported(values))


class VirtualHandout(Handout):
    """The output model of the virtual moment at which it is asked for."""

    def __init__(
        self, model: nn.Module, binding: ModuleBinding, session: VirtualSession,
        recalibration: Recalibration,
    ) -> None:  # fmt: skip
        self._model = model
        self._binding = binding
        self._session = session
        self.recalibration = recalibration
        self._most_behind = None
        self._own: Untrained | None = None

    @property
    def _warns(self) -> bool:
        return self._session.steps_made > 0 and self._session.is_main

    def _output(self, step: int = 0) -> Contribution:
        session = self._session
        session.ask("consensus", {"steps": session.steps_made}, "output")
        return session.given_output()


class VirtualSession:
    """Everything behind a `VirtualWorker`."""

    def __init__(
        self, channel: Channel, spec: MethodSpec, model: nn.Module, binding: ModuleBinding,
        optimizer: torch.optim.Optimizer, steps: int, statistics_batches: int,
    ) -> None:  # fmt: skip
        self.rank, self.size = (int(os.environ[f"GOSSAMER_{one}"]) for one in ("RANK", "SIZE"))
        self.spec, self.method = spec, spec.method
        self._channel = channel
        self._model = model
        self._binding = binding
        self._optimizer = cast(Any, optimizer)
        self._statistics_batches = statistics_batches
        self._process = os.getpid()
        self._main = 0
        self._has_left = False
        self._guard = StepGuard(optimizer, binding.named())
        self.gradients = SimpleNamespace(is_accumulating=False)
        self.store = cast(Store, SimpleNamespace(agree=self._agree))
        self.steps_made = 0
        self._hook: Any = None
        self._grants: list[int] = []
        self._granted_of = ""
        self._used = 0
        self._samples = 0
        self._samples_of_pass = 0
        self._options: list[dict[str, Any]] | None = None
        self.notices: list[str] = []
        """What the user must be told; the command says it."""
        self._meet(steps)

    def _meet(self, steps: int) -> None:
        own, layout = Untrained.of(self._model), self._binding.layout
        parts = [f"{name} {tuple(shape)}" for name, shape in zip(
            layout.names, layout.shapes, strict=True
        )]  # fmt: skip
        parts += [f"{name} {tuple(b.shape)}" for name, b in self._model.named_buffers()]
        self._statistics_type = own.statistics.dtype
        plan = MemoryPlan(
            self.size, layout.total, _name_of(self._binding.dtype),
            own.statistics.nbytes, own.counters.nbytes,
        )  # fmt: skip
        group = self._optimizer.param_groups[0]
        self._say("hello", {
            "digest": hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest(),
            "plan": plan.to_json(), "sizes": list(layout.sizes), "steps": steps,
            "method": str(self.spec), "optimiser": type(self._optimizer).__name__,
            "learning_rate": float(group["lr"]), "statistics_type": _name_of(own.statistics.dtype),
        })  # fmt: skip
        told = self._next("welcome")
        groups: Groups = tuple(tuple(group) for group in told["groups"])
        self._grouping = Grouping(self.rank, self.size, groups)
        self.group = self._grouping.group if groups else ()
        self.options = self.spec.resolve(self._grouping.ends, steps)
        self.is_synchronous = self.method.is_synchronous(self.options)
        self.memory = ModelMemory(MemoryPlan.from_json(told["plan"]), told.files[0])

    # ------------------------------------------------------------------ messages

    def _say(self, kind: str, values: Mapping[str, Any] | None = None, raw: bytes = b"") -> None:
        if os.getpid() != self._process:
            raise ConfigurationError(
                "the worker was used in a process that the script has forked, and only the one "
                "that called gossamer.join takes part; use the worker there"
            )
        self._channel.send(kind, values, raw)

    def _next(self, kind: str) -> Said:
        said = self._channel.receive()
        assert said.kind == kind, f"expected {kind}, got {said.kind}"
        return said

    def ask(self, kind: str, values: Mapping[str, Any], answer: str) -> Said:
        self._say(kind, values)
        return self._next(answer)

    def report(self, values: Mapping[str, float]) -> None:
        self._say("report", {"values": dict(values), "steps": self.steps_made})

    # ------------------------------------------------------------------ what sharding needs

    def take(self, epoch: str) -> int:
        if self._granted_of == epoch and self._used < len(self._grants):
            self._used += 1
            return self._grants[self._used - 1]
        said = self.ask("batch", {"pass": epoch, "used": self._used}, "position")
        if self._granted_of != epoch:
            self._granted_of, self._grants, self._used = epoch, [], 0
        return said["position"]

    def took(self, samples: int, of: int) -> None:
        self._samples += samples
        self._samples_of_pass = of

    def _agree(self, key: str, proposal: str) -> str:
        return self.ask("claim", {"key": key, "proposal": proposal}, "claimed")["value"]

    # ------------------------------------------------------------------ begin and end

    @property
    def is_main(self) -> bool:
        return self.rank == self._main

    def begin(self) -> None:
        self.memory.value[self.rank].copy_(self._binding.initial())
        self._publish_buffers()
        packed = pack_bytes(untrained(self._model))
        values = {"notices": self.notices}
        self._say("ready", values, raw=packed.numpy().tobytes() if self.rank == 0 else b"")
        told = self._next("begin")
        if told.raw:
            theirs = torch.frombuffer(bytearray(told.raw), dtype=torch.uint8)
            unpack_bytes_(untrained(self._model), theirs)
        window = self.memory.value[self.rank]
        ends, is_synchronous = self._grouping.ends, self.is_synchronous
        # Where others look at any moment, what the loop does to its parameters in between must not
        # be seen before the coordinator comes to it.
        self._binding.attach(window, is_private=self.method.shares_replica or not is_synchronous)
        lay_out_state(self._optimizer)
        self.replica = worker_replica(
            self.spec, self._binding, window, self._optimizer, None, lambda missed: None,
            ends=ends, is_synchronous=is_synchronous,
        )  # fmt: skip
        if told.files:
            fork_server_host(
                told.files[0], self._channel, self.spec, self.replica, self._binding,
                self._optimizer, self.memory, ends=ends, is_synchronous=is_synchronous,
            )  # fmt: skip
        self._watch = LoopWatch(self._model, self._binding)
        self._changes = Changes(self._model, self._binding, self.replica, self.method)
        self._changed: list[int] = []
        own = self.method.output == "ensemble"
        own = own or self.method.is_trained_itself(ends, self.options)
        batches = Recalibration(self._model, self._statistics_batches, is_needed=not own)
        self.handout = VirtualHandout(self._model, self._binding, self, batches)
        self._whole = LoopGradient.of(self._binding, range(len(self._binding.parameters)))
        self._guard.begin()
        self._obey()

    def finish(self) -> None:
        """The loop is over: wait for the others, then hold the output model."""
        self._guard.end()
        self._unhook()
        self._has_left = True
        needed = self.handout.recalibration.is_needed
        self._say("end", {"used": self._used, "recalibrates": needed})
        self._obey()
        self.handout.recalibration.close()
        output = self.given_output()
        averages: Averages | None = None
        if needed:
            with self.handout._visit(output):  # pyright: ignore[reportPrivateUsage]
                own = self.handout.recalibration.averages(warns=self.is_main)
            averages = self._combined(own)
        self.handout.put(output, averages)
        lay_out_state(self._optimizer)
        if self.is_main:
            self._hand_over_model()
        ScriptProcess.has_ended = True

    def _combined(self, own: Averages) -> Averages | None:
        self._say("averages", {"count": own.count}, own.values.numpy().tobytes())
        found: list[Averages] = []
        for _ in range(self._next("collected")["members"]):
            said = self._next("averages")
            values = torch.frombuffer(bytearray(said.raw), dtype=torch.float64)
            found.append(Averages(said["count"], values))
        combined = combined_averages(found)
        return combined if combined.count else None

    def _hand_over_model(self) -> None:
        state = {
            name: value for name, value in self._model.state_dict().items()
            if isinstance(value, Tensor)
        }  # fmt: skip
        described = [[name, _name_of(v.dtype), list(v.shape)] for name, v in state.items()]
        file = file_of(pack_bytes(state.values()))
        self._channel.send("model", {"tensors": described}, files=[file])
        os.close(file)

    def abandon(self) -> None:
        """The loop failed: the module keeps what this worker has."""
        self._guard.end()
        self._unhook()
        self.handout.recalibration.close()
        self._binding.detach(self.memory.value[self.rank] / self.replica.weight)

    def last_words(self, lost: PeerLost) -> PeerLost:
        return lost

    def summary(self) -> dict[str, Any]:
        return {"steps": self.steps_made}

    def given_output(self) -> Contribution:
        """What the coordinator has put into this worker's row."""
        statistics = self.memory.raw("output_statistics", self.rank).clone()
        return Contribution(
            self.memory.output[self.rank].clone(), 1.0, statistics.view(self._statistics_type),
            self.memory.raw("output_counters", self.rank).clone(),
        )  # fmt: skip

    # ------------------------------------------------------------------ the loop

    def step(self, *, skips_infinite: bool = False) -> None:
        """The gradient is there: hand it over, and wait for the next point."""
        if self.handout.is_visiting:
            raise ConfigurationError(
                "worker.step() was called inside worker.consensus(), where the model is the output"
                " and not what this worker trains; leave the `with` first"
            )
        self._unhook()
        self._watch.look()
        self._changed = self._changes.noticed()
        self.replica.skips_infinite = skips_infinite
        # A schedule must not complain where a server descends instead of this optimiser.
        self._optimizer._opt_called = True
        self._publish()
        self.steps_made += 1
        self._say("step", {
            "samples": self._samples, "of": self._samples_of_pass, "used": self._used,
            "changed": bool(self._changed), "learning_rate": self.replica.learning_rate,
            **self._new_options(),
        })  # fmt: skip
        self._samples = 0
        with self._guard:
            self._obey()

    def _publish(self) -> None:
        """The gradient, and the buffers as they are after it, where the coordinator sees them."""
        binding, row = self._binding, self.memory.gradient[self.rank]
        for piece, parameter in zip(binding.cut(row), binding.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                piece.zero_()
            else:
                piece.copy_(gradient.to_dense() if gradient.is_sparse else gradient.detach())
        has_servers = self.method.has_server
        skips = has_servers and self.replica.skips_infinite
        self.replica.skips_this = skips and not bool(torch.isfinite(row).all())
        if self.replica.skips_this:
            row.zero_()  # an infinite one would spoil what servers keep
        self._publish_buffers()

    def _publish_buffers(self) -> None:
        plan = self.memory.plan
        if plan.statistics or plan.counters:
            own = Untrained.of(self._model)
            statistics = own.statistics.view(torch.uint8)
            self.memory.raw("statistics", self.rank).copy_(statistics)
            self.memory.raw("counters", self.rank).copy_(own.counters)

    def _new_options(self) -> dict[str, Any]:
        """Of the optimiser's groups, where a server follows them and a schedule has changed them.
        They travel with the step."""
        if self.method.server is None:
            return {}
        options = group_options(self._optimizer)
        if options == self._options:
            return {}
        self._options = options
        return {"options": options}

    def _obey(self) -> None:
        """Do what the coordinator asks of this worker's replica, until the loop is to go on."""
        while True:
            said = self._channel.receive()
            if said.kind == "resume":
                self._resume(said)
                return
            if said.kind == "final":
                self._main = said["main"]
                return
            self._do(said)

    def _resume(self, said: Said) -> None:
        if said["is_elsewhere"]:
            point = self.memory.point[self.rank]
            self._binding.make_private()
            self._binding.load(point)
            self._changes.given(point)
        else:
            if self._binding.is_private:
                self._binding.load(self.replica.window)
            self._changes.given(None)
        self._main = said["main"]
        self._grants, self._granted_of, self._used = said["batches"], said["pass"], 0
        if said["weight"] != self.replica.weight:
            self.replica.weight = said["weight"]
        self._hook = register_module_forward_pre_hook(self._forward)

    def _forward(self, module: nn.Module, given: Any) -> None:
        """Gradients are recorded: what is left of the step is computing."""
        is_ours = os.getpid() == self._process and not self.handout.is_visiting
        if is_ours and torch.is_grad_enabled():
            self._unhook()
            self._say("begun")

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ------------------------------------------------------------------ the optimiser's part

    def _do(self, said: Said) -> None:
        deed: Callable[[Said], Mapping[str, Any] | None] = getattr(self, f"_do_{said.kind}")
        files: list[int] = []
        values = dict(deed(said) or {})
        if "file" in values:
            files.append(values.pop("file"))
        self._channel.send("done", values, files=files)
        for file in files:
            os.close(file)

    def _gradient(self, said: Said) -> Tensor:
        return self.memory.descent[self.rank] if said["is_given"] else self._whole

    def _point(self, said: Said) -> Tensor | None:
        return self.memory.point[self.rank] if said["has_point"] else None

    def _do_carry(self, said: Said) -> None:
        self._changes.publish(self._changed)

    def _do_descend(self, said: Said) -> None:
        self._binding.forget_flat_gradient()
        self.replica.descend_(self._gradient(said), at=self._point(said), share=said["share"])

    def _do_clip(self, said: Said) -> None:
        self._binding.forget_flat_gradient()
        found = self.replica.clipped(self._gradient(said))
        self.memory.descent[self.rank].copy_(_vector(found))

    def _do_penalise(self, said: Said) -> None:
        self._binding.forget_flat_gradient()
        point = self.memory.point[self.rank]
        found = self.replica.penalised(_vector(self._gradient(said)), point)
        self.memory.descent[self.rank].copy_(_vector(found))

    def _do_state(self, said: Said) -> Mapping[str, Any]:
        return {"file": file_of(self.replica.optimiser_state())}

    def _do_load(self, said: Said) -> None:
        self.replica.load_optimiser_state_(tensor_of(said.files[0], self._binding.dtype))

    def _do_reset(self, said: Said) -> None:
        self.replica.reset_optimiser_()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Nothing to go on with: a run in virtual time is repeated from its seed."""
        return {"method": f"{self.spec} in virtual time", "step": self.steps_made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ConfigurationError(
            "a run in virtual time begins at its beginning and loads no checkpoint; leave "
            "worker.load_state_dict() out there"
        )


def _vector(gradient: Tensor) -> Tensor:
    return gradient.vector() if isinstance(gradient, LoopGradient) else gradient


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
