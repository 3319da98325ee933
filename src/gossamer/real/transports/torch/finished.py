"""Which sums a process has finished, as a message that survivors of a death send each other."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

Finished = dict[int, tuple[int, frozenset[int]]]
"""By group: all numbers below the first, and those of the set."""

_EPOCH = struct.Struct("<I")
_GROUP = struct.Struct("<QII")  # group, all below this number, how many more


def encode_finished(epoch: int, finished: Finished) -> Tensor:
    parts = [_EPOCH.pack(epoch)]
    for key, (low, done) in finished.items():
        parts.append(_GROUP.pack(key, low, len(done)))
        parts.append(struct.pack(f"<{len(done)}I", *sorted(done)))
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def decode_finished(body: Tensor) -> tuple[int, Finished]:
    data = body.numpy().tobytes()
    (epoch,) = _EPOCH.unpack_from(data)
    at, finished = _EPOCH.size, Finished()
    while at < len(data):
        key, low, count = _GROUP.unpack_from(data, at)
        at += _GROUP.size
        finished[key] = (low, frozenset(struct.unpack_from(f"<{count}I", data, at)))
        at += 4 * count
    return epoch, finished
