"""What the recording of a model's gradients depends on, as one text.

Two models with the same fingerprint have the same recording, in whichever process it was made. A
model has none if its code is not known to stay as it is: a layer or a loss of the user's own may
call whatever the user is about to change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.sim.forms.table import shipped_table
from gossamer.tasks.flat_model import FlatModel

_OWN = (
    "replica.py",
    "precision.py",
    "pipeline/chain.py",
    "sim/pipelines/split_point.py",
    "sim/engine.py",
    "sim/traced.py",
    "sim/forms",
    "sim/traces",
    "tasks",
)
"""The code of this package that decides what is recorded."""
_MOST_FIXED_BYTES = 1 << 24
"""The most bytes of tensors that are not trained, whose values are part of a recording."""


class _Unknown(Exception):
    """A part of a model that cannot be described."""


def model_fingerprint(model: FlatModel) -> str | None:
    """All that decides how the gradients of a model are computed, but for the shapes of a batch."""
    task = model.task
    try:
        parts = [
            torch.__version__, package_digest(), shipped_table().fingerprint, str(model.device),
            model.precision, task.train.labels_as, str(torch.get_default_dtype()),
            str(torch.are_deterministic_algorithms_enabled()),
            _callable(task.training_loss or task.loss),
            "" if task.augment is None else _callable(task.augment),
            _module(model.module), *_tensors(model),
        ]  # fmt: skip
    except _Unknown:
        return None
    return "\n".join(parts)


def _module(module: nn.Module) -> str:
    """The classes and the plain attributes of a module and of all modules inside it."""
    lines: list[str] = []
    for name, one in module.named_modules(remove_duplicate=False):
        kept = {key: value for key, value in vars(one).items() if key not in _TENSORS}
        lines.append(f"{name} {_named(type(one))} {_plain(kept)}")
    return "\n".join(lines)


_TENSORS = ("_parameters", "_buffers", "_modules")


def _tensors(model: FlatModel) -> Iterable[str]:
    """Names and kinds of all tensors; of those that nobody replaces, the values too."""
    module = model.module
    replaced = {*model.layout.names, *model.buffer_layout.names, *model.key_names}
    known: dict[int, str] = {}
    fixed = 0
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        first = known.setdefault(id(tensor), name)
        line = f"{name} {first} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        if first == name and name not in replaced:
            fixed += tensor.nbytes
            if fixed > _MOST_FIXED_BYTES:
                raise _Unknown
            line += f" {tensor_digest(tensor)}"
        yield line


def tensor_digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=16).hexdigest()


def _plain(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return "{" + ",".join(f"{_plain(key)}:{_plain(one)}" for key, one in items) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(_plain, cast(set[object], value)))) + "}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(_plain, cast(Sequence[object], value))) + ")"
    return _callable(value)


def _callable(value: object) -> str:
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return f"{_named(value)}{_plain(value.__defaults__)}{_plain(value.__kwdefaults__)}"
    raise _Unknown


def _named(thing: Any) -> str:
    """The name of a class or a function of torch or of this package."""
    if thing.__module__.partition(".")[0] not in ("torch", "gossamer"):
        raise _Unknown
    return f"{thing.__module__}.{thing.__qualname__}"


@cache
def package_digest() -> str:
    """A digest of the code that decides what is recorded, whatever version it calls itself."""
    digest = hashlib.blake2b(digest_size=16)
    root = files("gossamer")
    for name in _OWN:
        for file in _files_in(root.joinpath(name)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _files_in(place: Traversable) -> list[Traversable]:
    if place.is_file():
        return [place]
    inside = sorted(place.iterdir(), key=lambda one: one.name)
    return [one for one in inside if one.is_file() and one.name.endswith((".py", ".json"))]
