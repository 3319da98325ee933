"""What the optimisers of servers remember, where the loop's own optimiser is asked for its state.

With servers the loop's optimiser makes no steps and remembers nothing; a checkpoint of it would
lose Adam's moments. So before its state is taken, the servers' is put there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import PeerLost
from gossamer.methods import MethodSpec
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.replica import LoopReplica
from gossamer.real.output_model import pack_bytes
from gossamer.real.router import Addresses, Router

_LENGTH = 8


def packed_state(replica: LoopReplica) -> Tensor:
    """By name of the parameter: a head in JSON with what is a number, then the tensors."""
    head: dict[str, dict[str, Any]] = {}
    tensors: list[Tensor] = []
    for name, state in replica.optimiser_states():
        row = head.setdefault(name, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                row[key] = [str(value.dtype).removeprefix("torch."), list(value.shape)]
                tensors.append(value.detach())
            elif value is None or isinstance(value, int | float):
                row[key] = value
    text = json.dumps(head).encode()
    parts = [len(text).to_bytes(_LENGTH, "little"), text]
    front = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
    return torch.cat([front, pack_bytes(tensors)])


def unpacked_state(packed: Tensor) -> dict[str, dict[str, Any]]:
    """The inverse."""
    at = _LENGTH + int.from_bytes(packed[:_LENGTH].numpy().tobytes(), "little")
    head: dict[str, dict[str, Any]] = json.loads(packed[_LENGTH:at].numpy().tobytes())
    for row in head.values():
        for key, value in row.items():
            if isinstance(value, list):
                dtype, shape = getattr(torch, str(value[0])), torch.Size(value[1])
                end = at + shape.numel() * dtype.itemsize
                row[key] = packed[at:end].clone().view(dtype).view(shape)
                at = end
    return head


class ServerState:
    """The loop's optimiser as one that knows what the servers' do."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        binding: ModuleBinding,
        spec: MethodSpec,
        router: Router,
        last_words: Callable[[PeerLost], PeerLost],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = dict(binding.named())
        # Others hold parameters only, or descend with an optimiser of another kind.
        are_alike = spec.method.server is not None and not spec.server_optimiser
        self._addresses = router.addresses if are_alike else Addresses(router.addresses.size)
        self._router = router
        self._last_words = last_words
        self._own: dict[nn.Parameter, Any] = {}
        """What the loop's optimiser remembers itself, while its state is taken: a worker's own
        steps between two reads go on with it."""
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._lend),
            optimizer.register_state_dict_post_hook(self._give_back),
        ]

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        self._own = {p: optimizer.state.get(p) for p in self._parameters.values()}
        try:
            self.fetch()
        except PeerLost as lost:
            raise self._last_words(lost) from None

    def _give_back(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for parameter, own in self._own.items():
            if own is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = own

    def fetch(self) -> None:
        """From the servers, as it is now."""
        for end in range(self._addresses.size, self._addresses.ends):
            packed = self._router.ask(self._addresses.process_of(end), f"optimiser {end}", "output")
            for name, state in unpacked_state(packed).items():
                parameter = self._parameters[name]
                self._optimizer.state[parameter] = {
                    key: value.to(parameter.device)
                    if isinstance(value, Tensor) and value.dim()
                    else value
                    for key, value in state.items()
                }

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
