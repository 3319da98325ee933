"""Models that are sharded over the processes of an island, by FSDP2 or by a plan of DTensors.

Inside of an island PyTorch does everything as without us. Between the islands the method couples,
for every process, the shards that it holds with the same shards of the other islands. To the method
these shards are a model, and an optimiser that stands for the user's own makes its steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.observe.callbacks import Callback
from gossamer.observe.run_observer import RunObserver
from gossamer.real.join.joined_worker import JoinedWorker
from gossamer.real.join.loop_session import LoopSession
from gossamer.real.join.servers import momentum_left_out
from gossamer.real.join.several_optimizers import SeveralModels
from gossamer.real.pipelines.island_session import check_coupling
from gossamer.real.transports.transport import Transport


def island_size(mesh: Any, rank: int, size: int) -> int:
    """How many processes an island has; they must be consecutive, and all islands alike."""
    ranks = [int(one) for one in mesh.mesh.flatten().tolist()]
    count = len(ranks)
    first = rank - rank % count
    if size % count or ranks != list(range(first, first + count)):
        raise ConfigurationError(
            f"mesh must hold the consecutive ranks of this process's island, {count} of {size} in "
            f"each, got the ranks {ranks} at rank {rank}; give the part of a device mesh over "
            "which the model is sharded, such as mesh['shard']"
        )
    return count


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class LocalShards(nn.Module):
    """What this process holds of a sharded model, in memory of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = (model,)
        """In a tuple, so that its parameters are not this module's, too."""
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Each sharded parameter, and what this process holds of it."""
        if not any(hasattr(p, "to_local") for p in model.parameters()):
            raise ConfigurationError(
                f"{type(model).__name__} has no sharded parameter; call fully_shard or "
                "parallelize_module before gossamer.join, or leave out mesh="
            )
        for name, parameter in model.named_parameters():
            own = _local(parameter.detach())
            if parameter.requires_grad and own.numel():
                shard = nn.Parameter(own.clone())
                self.register_parameter(name.replace(".", "_"), shard)
                self.pairs.append((parameter, shard))
        for name, buffer in model.named_buffers():
            self.register_buffer(name.replace(".", "_"), _local(buffer))

    def take_gradients(self) -> None:
        """Let the gradients of the sharded parameters arrive here as by a backward pass."""
        found = [
            (shard * _local(parameter.grad)).sum()
            for parameter, shard in self.pairs if parameter.grad is not None
        ]  # fmt: skip
        if found:
            torch.stack(found).sum().backward()

    @torch.no_grad()
    def give_values(self) -> None:
        for parameter, shard in self.pairs:
            _local(parameter.detach()).copy_(shard)

    @torch.no_grad()
    def take_values(self) -> None:
        for parameter, shard in self.pairs:
            shard.copy_(_local(parameter.detach()))


class ShardOptimizer(torch.optim.Optimizer):
    """Stands for the user's optimiser, which steps on the sharded parameters."""

    def __init__(self, shards: LocalShards, chosen: torch.optim.Optimizer) -> None:
        self._shards, self._chosen = shards, chosen
        own = {id(parameter): shard for parameter, shard in shards.pairs}
        groups = [
            {**group, "params": [own[id(p)] for p in group["params"] if id(p) in own]}
            for group in chosen.param_groups
        ]
        super().__init__(groups, {})

    def follow(self) -> None:
        """Take over what a schedule has changed."""
        for mine, theirs in zip(self.param_groups, self._chosen.param_groups, strict=True):
            mine.update(_options(theirs))

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        chosen, shards = self._chosen, self._shards
        if not self.state:
            chosen.state.clear()
        shards.give_values()
        for parameter, shard in shards.pairs:
            if parameter.grad is not None and shard.grad is not None:
                _local(parameter.grad).copy_(shard.grad)
        before = [_options(group) for group in chosen.param_groups]
        for mine, theirs in zip(self.param_groups, chosen.param_groups, strict=True):
            theirs.update(_options(mine))
        try:
            chosen.step()
        finally:
            for kept, theirs in zip(before, chosen.param_groups, strict=True):
                theirs.update(kept)
        shards.take_values()
        for parameter, shard in shards.pairs:
            state = cast("dict[str, Any]", chosen.state.get(parameter, {}))
            self.state[shard] = {name: _local(value) for name, value in state.items()}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class IslandWorker(JoinedWorker):
    """What a user's loop works with in an island."""

    @property
    def _shards(self) -> LocalShards:
        return cast(LocalShards, self.model)

    def open(self) -> IslandWorker:
        super().open()
        self._shards.give_values()
        return self

    def close(self) -> None:
        super().close()
        self._shards.give_values()

    def _make_step(self, own: Any, scaled: Any = None) -> None:
        if not self._is_accumulating:
            cast(ShardOptimizer, self.own_optimizer).follow()
            self._shards.zero_grad()
            self._shards.take_gradients()
        super()._make_step(own, scaled)
        if not self._is_accumulating:
            self._shards.give_values()

    @contextlib.contextmanager
    def consensus(self) -> Generator[nn.Module]:
        with super().consensus():
            self._shards.give_values()
            yield self._shards.whole[0]
        self._shards.give_values()


def joined_island(
    transport: Transport, model: nn.Module, optimizer: torch.optim.Optimizer, spec: MethodSpec,
    mesh: Any, *, seed: int, steps: int, callbacks: Sequence[Callback],
) -> IslandWorker:  # fmt: skip
    """The worker of a loop whose model is sharded over the processes of a mesh."""
    check_coupling(spec)
    processes = island_size(mesh, transport.rank, transport.size)
    if isinstance(model, SeveralModels):
        raise ConfigurationError(
            "an island trains one model, got several; put them into one module"
        )
    shards = LocalShards(model)
    stand_in = ShardOptimizer(shards, optimizer)
    observer = RunObserver(transport.size, [transport.rank], callbacks=callbacks)
    coupling = LoopSession(
        transport, spec, shards, stand_in, observer, seed=seed, steps=steps, processes=processes
    )
    is_synchronous = coupling.session.is_synchronous
    notices = momentum_left_out(spec, stand_in, is_synchronous=is_synchronous)
    return IslandWorker(shards, stand_in, spec, coupling, seed, observer, notices)
