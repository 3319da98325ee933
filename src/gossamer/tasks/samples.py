"""Samples of whatever kind people have, as tensors in memory.

Tensors and numpy arrays, pairs of them, dictionaries of them by name; a map-style
`torch.utils.data.Dataset`, whose items are read once; a table of Hugging Face's `datasets`, which
is known by its `column_names`, so that nothing need be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.observe.progress import Reporter, is_watched
from gossamer.tasks.data import Data, Tensors, leaves, mapped

TARGETS = ("labels", "label", "targets", "target", "y")
"""What a column with the targets is called; the first that is there counts."""
_MOST_BYTES = 8 << 30
_PORTION = 1000
_SHOWN_FROM = 2000
"""Fewer items are read before anybody looks at a bar."""


@dataclass(frozen=True)
class Reading:
    """How samples are read."""

    limit: int | None = None
    """At most so many, drawn evenly from all of them; None: all."""
    inputs: tuple[str, ...] = ()
    """The columns of a table that the model gets; empty: all numeric ones but the targets."""
    targets: str = ""
    """The column with the targets; empty: one that is called so."""
    labels_as: str = ""


def read_samples(source: Any, what: str, reading: Reading) -> Data:
    """`source` as tensors; `what` says in errors which one it is, train or test."""
    if isinstance(source, Data):
        return _limited(source, reading)
    _check_one_table(source, what)
    if hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        return _from_items(_table_rows(source, what, reading), what, reading)
    if isinstance(source, Mapping):
        return _from_columns(cast(Mapping[str, Any], source), what, reading)
    if isinstance(source, Tensor | np.ndarray):
        alone = _tensor(source, what)
        return _limited(_data(alone, alone, what, reading), reading)
    if isinstance(source, tuple | list) and len(cast(Sequence[Any], source)) == 2:
        inputs, targets = cast(Sequence[Any], source)
        if _is_arrays(inputs) and _is_arrays(targets):
            read = _arrays(inputs, f"inputs of {what}"), _arrays(targets, f"targets of {what}")
            return _limited(_data(*read, what, reading), reading)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _from_items(_item_reader(source, what), what, reading)
    if hasattr(source, "__iter__"):
        raise ConfigurationError(
            f"{what} must say how many samples it has and give each by its number, got "
            f"{type(source).__name__}, which can only be iterated; give a map-style dataset, or "
            "tensors"
        )
    raise ConfigurationError(
        f"{what} must be a pair (inputs, targets) of tensors or arrays, a map-style dataset or a "
        f"table, got {type(source).__name__}"
    )


def _check_one_table(source: Any, what: str) -> None:
    """What looks like a table and gives no samples by their numbers."""
    if isinstance(source, Mapping):
        tables = cast(Mapping[str, Any], source)
        if any(hasattr(one, "column_names") for one in tables.values()):
            raise ConfigurationError(
                f"{what} is a dictionary of tables ({', '.join(map(str, tables))}); give one of "
                f"them, such as tables[{next(iter(tables))!r}]"
            )
    elif hasattr(source, "iloc"):
        raise ConfigurationError(
            f"{what} is a {type(source).__name__} of pandas; give arrays of it, such as "
            "(table[['a', 'b']].to_numpy(), table['label'].to_numpy())"
        )


# ---------------------------------------------------------------------- whole arrays


def _is_arrays(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_arrays, cast(Mapping[str, Any], value).values()))
    if isinstance(value, tuple):
        return all(map(_is_arrays, cast(tuple[Any, ...], value)))
    return isinstance(value, Tensor | np.ndarray)


def _arrays(value: Any, what: str) -> Tensors:
    if isinstance(value, Mapping):
        named = cast(Mapping[str, Any], value)
        return {name: _arrays(part, f"{what}, {name}") for name, part in named.items()}
    if isinstance(value, tuple):
        return tuple(_arrays(part, what) for part in cast(tuple[Any, ...], value))
    return _tensor(value, what)


def _tensor(value: Any, what: str) -> Tensor:
    """With numbers that a model of single precision and an embedding take."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"{what} cannot be read as numbers, got {type(value).__name__}"
        ) from None
    tensor = tensor.detach()
    if tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())
    return tensor.to(torch.int64) if tensor.dtype in (torch.int32, torch.int16) else tensor


def _data(inputs: Tensors, targets: Tensors, what: str, reading: Reading) -> Data:
    counts = {len(leaf) if leaf.dim() else 0 for leaf in (*leaves(inputs), *leaves(targets))}
    if len(counts) > 1 or 0 in counts:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in (*leaves(inputs), *leaves(targets)))
        raise ConfigurationError(
            f"{what} needs as many targets as inputs, at least one, along the first dimension; got "
            f"tensors of shapes {shapes}"
        )
    return Data(inputs, mapped(targets, _class_numbers), reading.labels_as)


def _class_numbers(targets: Tensor) -> Tensor:
    """Losses want whole numbers of 64 bits."""
    return targets.to(torch.int64) if targets.dtype in (torch.uint8, torch.int8) else targets


def _from_columns(columns: Mapping[str, Any], what: str, reading: Reading) -> Data:
    """A dictionary of arrays, one of which is the targets."""
    arrays = {name: _tensor(value, f"{what}, {name}") for name, value in columns.items()}
    return _limited(_named(arrays, what, reading, is_table=False), reading)


def _named(columns: dict[str, Tensor], what: str, reading: Reading, *, is_table: bool) -> Data:
    chosen = reading.targets or next((name for name in TARGETS if name in columns), "")
    if chosen not in columns:
        raise ConfigurationError(
            f"{what} has the columns {', '.join(columns)}, of which none is called "
            f"{chosen or ', '.join(TARGETS)}; say which holds the targets by targets='NAME'"
        )
    names = reading.inputs or tuple(name for name in columns if name != chosen)
    for name in names:
        if name not in columns:
            raise ConfigurationError(f"{what} has no column {name!r}; it has {', '.join(columns)}")
    inputs: Tensors = {name: columns[name] for name in names}
    if not names:
        raise ConfigurationError(f"{what} has no column beside the targets, {chosen!r}")
    if is_table and len(names) == 1:
        inputs = columns[names[0]]
    return _data(inputs, columns[chosen], what, reading)


def _limited(data: Data, reading: Reading) -> Data:
    if reading.limit is None or reading.limit >= len(data):
        return data
    inputs, targets = data.at(torch.from_numpy(chosen_samples(len(data), reading.limit)))
    return Data(inputs, targets, data.labels_as)


def chosen_samples(samples: int, limit: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which of them are read: all, or so many drawn without order, the same ones every time."""
    if limit is None or limit >= samples:
        return np.arange(samples)
    if limit < 1:
        raise ConfigurationError(f"limit must be at least 1, got {limit}")
    return np.sort(np.random.default_rng(0).permutation(samples)[:limit])


# ---------------------------------------------------------------------- one item after the other


@dataclass(frozen=True)
class _Items:
    """Something that gives its samples by their numbers."""

    count: int
    read: Callable[[Sequence[int]], list[Any]]
    is_table: bool


def _item_reader(source: Any, what: str) -> _Items:
    def read(numbers: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        for number in numbers:
            try:
                found.append(source[number])
            except IndexError:
                raise ConfigurationError(
                    f"{what} says it has {len(source)} samples, but has no sample {number}"
                ) from None
        return found

    return _Items(len(source), read, is_table=False)


def _table_rows(source: Any, what: str, reading: Reading) -> _Items:
    wanted = [*reading.inputs, *([reading.targets] if reading.targets else [])]
    for name in wanted:
        if name not in source.column_names:
            raise ConfigurationError(
                f"{what} has no column {name!r}; it has {', '.join(source.column_names)}"
            )

    def read(numbers: Sequence[int]) -> list[Any]:
        return [source[int(number)] for number in numbers]

    return _Items(len(source), read, is_table=True)


def _portions(numbers: Sequence[int], what: str) -> Iterator[Sequence[int]]:
    """All numbers in parts of a readable size; reading many samples shows how far it is."""
    portions = [numbers[at : at + _PORTION] for at in range(0, len(numbers), _PORTION)]
    if len(numbers) < _SHOWN_FROM or not is_watched():
        yield from portions
        return
    with Reporter(len(numbers), what) as reporter:
        for portion in portions:
            yield portion
            reporter.finished(what, len(portion))


def _from_items(items: _Items, what: str, reading: Reading) -> Data:
    numbers = [int(number) for number in chosen_samples(items.count, reading.limit)]
    if not numbers:
        raise ConfigurationError(f"{what} is empty; give it at least one sample")
    first = items.read(numbers[:1])[0]
    kept = _numeric(first, reading) if isinstance(first, Mapping) else None
    shapes = [tuple(leaf.shape) for leaf in leaves(_sample(first, kept, what, numbers[0]))]
    size = sum(leaf.nbytes for leaf in leaves(_sample(first, kept, what, numbers[0])))
    if size * len(numbers) > _MOST_BYTES:
        raise ConfigurationError(
            f"{what} would take {size * len(numbers) / 1e9:.0f} GB of memory ({len(numbers)} "
            f"samples of {size} bytes); give limit={max(1, _MOST_BYTES // size // 1000 * 1000)} or "
            "less"
        )
    samples: list[Tensors] = []
    for portion in _portions(numbers, f"reading {what}"):
        for number, item in zip(portion, items.read(portion), strict=True):
            sample = _sample(item, kept, what, number)
            own = [tuple(leaf.shape) for leaf in leaves(sample)]
            if own != shapes:
                raise ConfigurationError(
                    f"{what}: sample {number} has shapes {own}, sample {numbers[0]} has {shapes}; "
                    "pad or crop them to one size"
                )
            samples.append(sample)
    whole = _stacked(samples)
    if isinstance(whole, Mapping):
        columns = cast(dict[str, Tensor], whole)
        return _named(columns, what, reading, is_table=items.is_table)
    if isinstance(whole, tuple):
        *parts, last = cast(tuple[Tensors, ...], whole)
        if parts:
            return _data(parts[0] if len(parts) == 1 else tuple(parts), last, what, reading)
        whole = last
    return _data(whole, whole, what, reading)


def _numeric(item: Mapping[str, Any], reading: Reading) -> tuple[str, ...]:
    """The columns that are asked for, else those that hold numbers; texts stay behind."""
    if reading.inputs:
        named = reading.targets or next((name for name in TARGETS if name in item), "")
        return (*reading.inputs, *([named] if named in item else ()))
    return tuple(name for name, value in item.items() if _is_numeric(value))


def _is_numeric(value: Any) -> bool:
    if isinstance(value, str | bytes) or value is None:
        return False
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple) and any(
        isinstance(part, Tensor) for part in cast(Sequence[Any], value)
    ):
        return False
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # parts of several lengths
        return False


def _sample(item: Any, kept: tuple[str, ...] | None, what: str, number: int) -> Tensors:
    where = f"sample {number} of {what}"
    if isinstance(item, Mapping):
        named = cast(Mapping[str, Any], item)
        names = [name for name in named if _is_numeric(named[name])] if kept is None else kept
        missing = [name for name in names if name not in named]
        if missing:
            raise ConfigurationError(f"{where} has no {missing[0]!r}, which the first one has")
        return {name: _tensor(named[name], f"{where}, {name},") for name in names}
    if isinstance(item, tuple) or (isinstance(item, list) and not _is_numeric(item)):
        return tuple(_sample(part, None, what, number) for part in cast(Sequence[Any], item))
    return _tensor(item, where)


def _stacked(samples: Sequence[Tensors]) -> Tensors:
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _stacked([one[name] for one in samples]) for name in cast(Any, first)}
    if isinstance(first, tuple):
        places = range(len(cast(tuple[Any, ...], first)))
        return tuple(_stacked([one[place] for one in samples]) for place in places)
    return torch.stack(list(samples))


def held_out(data: Data, share: float) -> tuple[Data, Data]:
    """Training and test data from one set: a share of it, drawn the same way every time."""
    if not 0 < share < 1:
        raise ConfigurationError(f"holdout must lie between 0 and 1, got {share}")
    count = max(1, round(share * len(data)))
    if count >= len(data):
        raise ConfigurationError(f"{len(data)} samples are too few to hold some of them out")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    test, train = (data.at(part.sort()[0]) for part in (order[:count], order[count:]))
    return Data(*train, data.labels_as), Data(*test, data.labels_as)
