"""What a loop's module and optimiser must be to be coupled."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.several_optimizers import SeveralModels, parts_of
from gossamer.real.launch.environment import discover
from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.transport import Store, Transport

T = TypeVar("T")


def check_joinable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for one in model if isinstance(model, SeveralModels) else [model]:
        _check_model(one)
    parts = parts_of(optimizer)
    if any(isinstance(part, torch.optim.LBFGS) for part in parts):
        raise ConfigurationError(
            "LBFGS evaluates the model several times in a step, and no method can come in between; "
            "use an optimiser that takes one gradient per step"
        )
    if len(parts) > 1 and any(isinstance(part, torch.optim.SparseAdam) for part in parts):
        raise ConfigurationError(
            "SparseAdam takes sparse gradients only, and several optimisers get dense ones; use "
            "Adam, or join SparseAdam alone"
        )
    known = set(model.parameters())
    others = sum(p not in known for group in optimizer.param_groups for p in group["params"])
    if others:
        raise ConfigurationError(
            f"the optimizer trains {others} parameters that are not the model's and would drift "
            "apart; join all models that hold them, as a list"
        )
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)


def _check_model(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        raise ConfigurationError(
            "the model is already compiled; join the plain module first and compile it afterwards"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigurationError(
            "the model is wrapped in DistributedDataParallel, which would couple it a second time; "
            "join the plain module"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigurationError(
            f"parameter {name} has no shape yet; run the model once on a batch before joining"
        )
    if parameter.is_complex():
        raise ConfigurationError(
            f"parameter {name} is complex ({parameter.dtype}), and only real numbers are averaged;"
            " keep it as torch.view_as_real of it"
        )


def check_apart(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """No two parameters may share memory: each gets its own, and they would come apart."""
    extents = sorted(
        ((*_extent(parameter), name) for name, parameter in named if parameter.numel()),
        key=lambda extent: extent[:2],
    )
    for (_, end, first), (start, _, second) in pairwise(extents):
        if start < end:
            raise ConfigurationError(
                f"parameters {first} and {second} share memory and are not the same parameter, so"
                " each would be trained apart; tie them by giving both modules one nn.Parameter"
            )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first element and behind the last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def check_alike(model: nn.Module, binding: ModuleBinding, store: Store, first: int = 0) -> None:
    """All models must have the same parameters and buffers, which are averaged by position; of a
    sharded model those that begin with the same process, the `first`."""
    key = f"model/{first}" if first else "model"
    parts = [f"{name} {tuple(shape)}" for name, shape in zip(
        binding.layout.names, binding.layout.shapes, strict=True
    )]  # fmt: skip
    parts += [f"{name} {tuple(buffer.shape)}" for name, buffer in model.named_buffers()]
    sizes = f"{binding.layout.total} trained numbers of {binding.dtype} and {len(parts)} tensors"
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    said = store.agree(key, json.dumps([digest, sizes]))
    try:
        agreed, theirs = json.loads(said)
    except (ValueError, TypeError):
        raise broken_value(key, said, "what the first worker's model is like") from None
    if agreed != digest:
        raise ConfigurationError(
            f"this worker's model is another than that of the first to come: it has {sizes}, that"
            f" one {theirs}; names and shapes must be the same on all workers"
        )


def check_one_optimiser(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """A parameter that this optimiser does not hold may belong to a second one, whose step a user
    leaves out as well. Then nobody would train it."""
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    names = {id(parameter): name for name, parameter in named if id(parameter) not in held}
    if names:
        gc.collect()  # an optimiser that nobody can reach any more does not count
    for other in _instances(torch.optim.Optimizer) if names else ():
        for parameter in parameters_of(other):
            if id(parameter) in names:
                raise second_optimiser(other, names[id(parameter)])


def second_optimiser(other: torch.optim.Optimizer, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"a second optimiser ({type(other).__name__}) holds the model's parameter {name}, and"
        " worker.step() makes the steps of the joined one only; join both as a list, give"
        " all parameters to one optimiser, in groups, or delete the second if it is not used"
        " any more"
    )


def check_not_wrapped(parameters: Sequence[nn.Parameter]) -> None:
    """DistributedDataParallel around the model would couple it a second time. It needs a process
    group; without one there is nothing to look for."""
    if not _is_in_a_process_group():
        return
    own = {id(parameter) for parameter in parameters}
    for wrapper in _instances(nn.parallel.DistributedDataParallel):
        if any(id(parameter) in own for parameter in wrapper.parameters()):
            raise ConfigurationError(
                "DistributedDataParallel is wrapped around the joined model and would couple it a"
                " second time; leave it out, and call the model itself"
            )


def is_alone(transport: str | Transport | None) -> bool:
    """Whether there is one worker. A loop says by a transport of its own how many there are, else
    a launcher does."""
    if transport is not None and not isinstance(transport, str):
        return transport.size == 1
    if discover().size > 1:
        return False
    check_alone()
    return True


def check_method(given: object) -> None:
    if given is None:
        raise ConfigurationError(
            "no method was given; write join(model, optimizer, method='ad_psgd') or start with "
            "gossamer run --method ad_psgd"
        )


def check_no_mesh(mesh: object) -> None:
    """In virtual time all workers live in one process, which shards nothing."""
    if mesh is not None:
        raise ConfigurationError(
            "gossamer simulate plays scripts whose model is on one worker; leave out mesh=, or "
            "start the script with gossamer run or torchrun"
        )


def check_alone() -> None:
    """Refuse a process of a group of which no launcher's variables tell: it would train alone."""
    if not _is_in_a_process_group():
        return
    size = torch.distributed.get_world_size()
    raise ConfigurationError(
        f"this is one of {size} processes of a torch.distributed group, but no launcher's variables"
        f" say so, and each would train alone; start the script with `gossamer run -n {size}` or"
        " torchrun, and leave mp.spawn and init_process_group out"
    )


def _is_in_a_process_group() -> bool:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _instances(kind: type[T]) -> Iterator[T]:
    """All objects of a type; `isinstance` would run code of proxies that pretend to be one."""
    for found in gc.get_objects():
        if issubclass(type(found), kind):
            yield found


def reported(values: Mapping[str, Any]) -> dict[str, float]:
    """What a loop has reported, as numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"worker.report() takes numbers, got {name}={value!r}; give a float, or a tensor "
                "of one number"
            ) from None
    if not found:
        raise ConfigurationError(
            "worker.report() was given nothing; name what was measured, as in "
            "worker.report(loss=0.31, accuracy=0.9)"
        )
    return found


def keep_report(row: Mapping[str, Any]) -> None:
    """Where a run folder is kept, a report is a line of its metrics."""
    folder = os.environ.get("GOSSAMER_RUN")
    if folder is not None:
        with (Path(folder) / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
