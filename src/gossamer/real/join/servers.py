"""Servers in a user's loop: how they descend, and what their optimisers remember.

Each server descends with another optimiser of the user's class, which has the user's groups and
works on the server's slice, or with the optimiser that the method's options name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.methods import MethodSpec
from gossamer.optim.optimisers import make_optimiser
from gossamer.real.join.binding import ModuleBinding, lay_out_state
from gossamer.real.join.replica import LoopReplica, slowed
from gossamer.real.join.several_optimizers import SeveralOptimizers, parts_of
from gossamer.real.output_model import pack_bytes
from gossamer.real.replicas import Place, PublishedReplica, WindowReplica
from gossamer.real.session import Session

_LENGTH = 8


def momentum_left_out(
    spec: MethodSpec, optimizer: torch.optim.Optimizer, *, is_synchronous: bool
) -> list[str]:
    """What the user must be told about this optimiser's momentum."""
    groups: list[dict[str, Any]] = []
    for part in parts_of(optimizer):
        is_sgd = isinstance(part, torch.optim.SGD)
        spec.check_kind(is_sgd, type(part).__name__)
        groups += part.param_groups if is_sgd else []
    most = max((float(group["momentum"]) for group in groups), default=0.0)
    notice = spec.notice(most, is_synchronous=is_synchronous)
    return [] if notice is None else [notice]


def worker_replica(
    session: Session, binding: ModuleBinding, optimizer: torch.optim.Optimizer
) -> LoopReplica:
    """The replica of the loop's own worker. Between two reads of its servers it descends as they
    do."""
    place = session.place(session.rank)
    replica = LoopReplica(binding, place, optimizer)
    if session.spec.server_optimiser:
        rule = session.optimiser(make_optimiser(session.spec.server_optimiser))
        rule = rule.suited(binding.layout.shapes)
        silent = Place(place.window, place.guard)
        replica.rule = WindowReplica(silent, rule, lambda pace: replica.learning_rate)
    elif session.method.leaves_out_momentum:
        replica.momentum = session.momentum
    return replica


def server_replica(
    session: Session, end: int, worker: LoopReplica, binding: ModuleBinding,
    optimizer: torch.optim.Optimizer,
) -> PublishedReplica:  # fmt: skip
    """The replica of one server. The learning rate, and whatever else the user's schedule changes,
    follows that schedule, which runs in this process too, so it need not travel.

    Of torch's SGD the momentum is left that the method allows: momentum and delay multiply. Any
    other class stays as it is, because its learning rate would not suit plain SGD.
    """
    place, part = session.place(end), session.addresses.slice_of(end)
    if session.spec.server_optimiser:
        rule = session.optimiser(make_optimiser(session.spec.server_optimiser))
        rule = rule.suited(binding.layout.within(part).shapes)
        return WindowReplica(place, rule, lambda pace: worker.learning_rate)
    window, momentum = place.window, session.momentum
    own: list[tuple[str, nn.Parameter]] = []
    made: dict[nn.Parameter, nn.Parameter] = {}
    offset = 0
    for name, size, shape, parameter in zip(
        binding.layout.names, binding.layout.sizes, binding.layout.shapes, binding.parameters,
        strict=True,
    ):  # fmt: skip
        if part.start <= offset < part.stop:
            start = offset - part.start
            twin = nn.Parameter(window[start : start + size].view(shape))
            own.append((name, twin))
            made[parameter] = twin
        offset += size
    twins = [_Twin(part, made, momentum) for part in parts_of(optimizer)]
    found = [twin.optimizer for twin in twins if twin.optimizer is not None]

    def follow() -> None:
        for twin in twins:
            twin.follow()

    stands: torch.optim.Optimizer = found[0] if found else _idle()
    if len(twins) > 1 and found:
        stands = SeveralOptimizers(found, skips_zeros=True)
    twin_binding = ModuleBinding(own, is_server=True)
    twin_binding.attach(window, is_private=False)
    return LoopReplica(twin_binding, place, stands, follow)


class _Twin:
    """A server's instance of one of the user's optimisers, for the parameters that it has made."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, made: dict[nn.Parameter, nn.Parameter],
        momentum: Callable[[float], float],
    ) -> None:  # fmt: skip
        self._theirs, self._made, self._momentum = optimizer, made, momentum
        self._followed = [group for group in optimizer.param_groups if self._twins_of(group)]
        groups = [self._group(group) for group in self._followed]
        self.optimizer = _another(optimizer, groups) if groups else None
        self._known = len(optimizer.param_groups)
        if self.optimizer is not None:
            # A checkpoint of the loop's optimiser brings what the server's remembered.
            for parameter, twin in made.items():
                if optimizer.state.get(parameter):
                    self.optimizer.state[twin] = deepcopy(optimizer.state[parameter])
            lay_out_state(self.optimizer)

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        is_sgd = isinstance(self._theirs, torch.optim.SGD)
        return slowed(_options(group), self._momentum) if is_sgd else _options(group)

    def _twins_of(self, group: dict[str, Any]) -> list[nn.Parameter]:
        return [self._made[p] for p in group["params"] if p in self._made]

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**self._options_of(group), "params": self._twins_of(group)}

    def follow(self) -> None:
        """Take over what a schedule has changed, and groups that were added."""
        for group in self._theirs.param_groups[self._known :]:
            _add(self.optimizer, self._group(group))
            self._followed.extend([group] if self._twins_of(group) else [])
        self._known = len(self._theirs.param_groups)
        if self.optimizer is not None:
            for mine, theirs in zip(self.optimizer.param_groups, self._followed, strict=True):
                mine.update(self._options_of(theirs))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that a schedule may change."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _another(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Another optimiser of the same class. Some defaults, such as AdamW's decoupling, are set by
    the class itself, and its constructor does not take them."""
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    taken = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    try:
        return kind(groups, **defaults)
    except Exception as error:  # a class of the user's own may raise anything
        raise ConfigurationError(
            f"the server cannot make another {type(optimizer).__name__} ({error}); name its "
            "optimiser in the method, as in server_optimiser=sgd"
        ) from error


def _add(twin_optimizer: torch.optim.Optimizer | None, group: dict[str, Any]) -> None:
    """Follow a group that the user's optimiser got while training."""
    if not group["params"]:
        return
    if twin_optimizer is None:
        raise ConfigurationError(
            "a parameter group was added for a server that had nothing to train so far; give the "
            "optimizer all groups before gossamer.join, with the learning rate 0 until their time"
        )
    twin_optimizer.add_param_group(group)


def _idle() -> torch.optim.Optimizer:
    """An optimiser for a slice of which the user's optimiser trains nothing."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=0.0)


# ---------------------------------------------------------------------- what they remember


def packed_state(replica: LoopReplica) -> Tensor:
    """A replica's optimiser as bytes: what it remembers of each parameter by name."""
    return packed(replica.optimiser_states())


def packed(states: Iterable[tuple[str, Mapping[str, Any]]]) -> Tensor:
    """Named states as bytes: a head in JSON with their numbers, then the tensors."""
    head: dict[str, dict[str, Any]] = {}
    tensors: list[Tensor] = []
    for name, state in states:
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
    """The inverse of `packed`."""
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


def put_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], given: Tensor
) -> None:
    """Let an optimiser remember what was packed elsewhere."""
    for name, state in unpacked_state(given).items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
            for key, value in state.items()
        }


class ServerState:
    """Lets the loop's optimiser know what those of the servers remember.

    With servers the loop's optimiser makes no steps and remembers nothing, so that a checkpoint of
    it would lose Adam's moments. Before its state is taken, the servers' is put there.
    """

    def __init__(
        self, session: Session, binding: ModuleBinding, optimizer: torch.optim.Optimizer
    ) -> None:
        self._session = session
        self._optimizer = optimizer
        self._parameters = dict(binding.named())
        # Other servers hold parameters only, or descend with an optimiser of another kind.
        are_alike = session.method.server is not None and not session.spec.server_optimiser
        self._servers = session.addresses.servers if are_alike else range(0)
        self._own: dict[nn.Parameter, Any] = {}
        """What the loop's optimiser itself remembers, while its state is taken: a worker's own
        steps between two reads go on with it."""
        self._hooks: list[Any] = []
        for part in parts_of(optimizer):
            self._hooks.append(part.register_state_dict_pre_hook(self._lend))
            self._hooks.append(part.register_state_dict_post_hook(self._give_back))

    def _lend(self, _: torch.optim.Optimizer) -> None:
        optimizer = self._optimizer
        self._own = {p: optimizer.state.get(p) for p in self._parameters.values()}
        try:
            self.fetch()
        except PeerLost as lost:
            raise self._session.last_words(lost) from None

    def _give_back(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer = self._optimizer
        for parameter, own in self._own.items():
            if own is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = own

    def fetch(self) -> None:
        """Get the servers' state as it is now."""
        addresses, router = self._session.addresses, self._session.router
        for server in self._servers:
            end = addresses.acting(server, router.live)
            given = router.ask(addresses.process_of(end), f"optimiser {end}", "output")
            put_state(self._optimizer, self._parameters, given)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
