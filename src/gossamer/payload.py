"""What workers send to each other: registered dataclasses of scalars and tensors, never pickles.

A payload is `None`, a number, a string, a tensor, or a dataclass registered with `@payload` whose
fields are such values. On the wire it is a small header and raw bytes; `wire_bytes` is the length
of exactly that encoding, and it is what the simulated network charges for.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.errors import ProtocolError

_C = TypeVar("_C", bound=type[Any])
_TYPES: dict[str, type[Any]] = {}
_FIELDS: dict[type[Any], tuple[str, ...]] = {}
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NONE, _FALSE, _TRUE, _INT, _FLOAT, _TEXT, _TENSOR = range(7)


def payload(cls: _C) -> _C:
    """Register a dataclass, under its name, so that it may be sent."""
    known = _TYPES.get(cls.__name__, cls)
    if known.__module__ != cls.__module__:
        raise ProtocolError(f"two payloads are called {cls.__name__!r}; rename one of them")
    _TYPES[cls.__name__] = cls
    _FIELDS[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return cls


def wire_bytes(value: object) -> int:
    """Length of `encode(value)` without encoding it."""
    names = _FIELDS.get(type(value))
    if names is None:
        return 2 + _field_bytes(value)
    header = 2 + len(type(value).__name__.encode())
    return header + sum(_field_bytes(getattr(value, name)) for name in names)


def tensor_bytes(value: object) -> int:
    """The raw tensor bytes inside a payload, without headers."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    names = _FIELDS.get(type(value), ())
    return sum(tensor_bytes(getattr(value, name)) for name in names)


def encode(value: object) -> bytes:
    """Header plus raw bytes."""
    return b"".join(encode_parts(value))


def encode_parts(value: object) -> list[bytes | memoryview]:
    """The pieces of `encode`. A tensor in main memory is not copied: its piece is a view."""
    names = _FIELDS.get(type(value))
    if names is None:
        return [struct.pack("<H", 0), *_encode_field(value)]
    label = type(value).__name__.encode()
    parts: list[bytes | memoryview] = [struct.pack("<H", len(label)) + label]
    for name in names:
        parts += _encode_field(getattr(value, name))
    return parts


def decode(data: bytes | memoryview) -> Any:
    """The inverse of `encode`. Anything unknown is refused, and nothing is ever executed.

    Tensors are views of `data` if it is a writable memoryview, which nobody else may use then, and
    copies if it is `bytes`.
    """
    try:
        value, end = _decode(data)
    except (struct.error, IndexError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise ProtocolError(f"a damaged payload arrived: {error}") from None
    if end != len(data):
        raise ProtocolError(f"a payload of {end} bytes arrived in a message of {len(data)}")
    return value


def moved(value: Any, device: torch.device) -> Any:
    """The same payload with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    names = _FIELDS.get(type(value))
    if not names:
        return value
    return type(value)(*(moved(getattr(value, name), device) for name in names))


def _decode(data: bytes | memoryview) -> tuple[Any, int]:
    (length,) = struct.unpack_from("<H", data, 0)
    at = 2 + length
    if length == 0:
        return _decode_field(data, at)
    label = bytes(data[2:at]).decode()
    cls = _TYPES.get(label)
    if cls is None:
        raise ProtocolError(f"a payload of unknown type {label!r} arrived")
    values: list[object] = []
    for _ in _FIELDS[cls]:
        value, at = _decode_field(data, at)
        values.append(value)
    return cls(*values), at


def _field_bytes(value: object) -> int:
    if isinstance(value, Tensor) and value.dtype in _CODES:
        return 3 + 8 * value.dim() + value.numel() * value.element_size()
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, int | float):
        return 9
    if isinstance(value, str):
        return 5 + len(value.encode())
    raise _cannot_travel(value)


def _encode_field(value: object) -> list[bytes | memoryview]:
    if value is None:
        return [bytes([_NONE])]
    if isinstance(value, bool):
        return [bytes([_TRUE if value else _FALSE])]
    if isinstance(value, int):
        if value.bit_length() > 63:
            raise ProtocolError(f"a number of {value.bit_length()} bits cannot travel: 63 at most")
        return [struct.pack("<Bq", _INT, value)]
    if isinstance(value, float):
        return [struct.pack("<Bd", _FLOAT, value)]
    if isinstance(value, str):
        text = value.encode()
        return [struct.pack("<BI", _TEXT, len(text)) + text]
    if isinstance(value, Tensor) and value.dtype in _CODES:
        flat = _on_host(value.detach()).contiguous().reshape(-1)
        if flat.numel() <= 1:
            # A slice of at most one element counts as contiguous, whatever its stride is.
            flat = flat.clone(memory_format=torch.contiguous_format)
        head = struct.pack("<BBB", _TENSOR, _CODES[flat.dtype], value.dim())
        sizes = struct.pack(f"<{value.dim()}q", *value.shape)
        return [head + sizes, flat.view(torch.uint8).numpy().data]
    raise _cannot_travel(value)


def _on_host(value: Tensor) -> Tensor:
    """The tensor in main memory; pinned memory makes the copy from a GPU several times faster."""
    if not value.is_cuda:
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def _cannot_travel(value: object) -> ProtocolError:
    if isinstance(value, Tensor):
        return ProtocolError(f"a tensor of type {value.dtype} cannot travel")
    return ProtocolError(f"{type(value).__name__} cannot travel: register it with @payload")


def _decode_field(data: bytes | memoryview, at: int) -> tuple[object, int]:
    kind = data[at]
    if kind == _NONE:
        return None, at + 1
    if kind in (_FALSE, _TRUE):
        return kind == _TRUE, at + 1
    if kind == _INT:
        return struct.unpack_from("<q", data, at + 1)[0], at + 9
    if kind == _FLOAT:
        return struct.unpack_from("<d", data, at + 1)[0], at + 9
    if kind == _TEXT:
        (length,) = struct.unpack_from("<I", data, at + 1)
        end = at + 5 + length
        # A slice beyond the end is short; `decode` then refuses the whole by its length.
        return bytes(data[at + 5 : end]).decode(), end
    if kind != _TENSOR:
        raise ProtocolError(f"a payload with an unknown field kind {kind} arrived")
    dtype, dimensions = _DTYPES[data[at + 1]], data[at + 2]
    shape = struct.unpack_from(f"<{dimensions}q", data, at + 3)
    start = at + 3 + 8 * dimensions
    count = 1
    for size in shape:
        count *= size
    end = start + count * torch.empty((), dtype=dtype).element_size()
    if count == 0:
        return torch.empty(shape, dtype=dtype), end
    raw = data[start:end]
    if isinstance(raw, bytes) or raw.readonly or len(raw) < end - start:
        raw = bytearray(raw)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape), end
