"""Windows in a GPU's memory that several processes share, by CUDA's own handles.

A handle is a few numbers and bytes; it travels through the store as text and nothing is unpickled.
"""

from __future__ import annotations

import json
import time
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transport import StopToken, Store, Window


def publish(window: Window, value: Tensor, end: int, store: Store) -> Tensor:
    """Memory of this process on its GPU, filled, and its handle for the others."""
    data = torch.empty(window.numel, dtype=window.dtype, device=window.device)
    data.copy_(value.detach().reshape(-1))
    torch.cuda.synchronize(data.device)
    storage = cast(Any, data.untyped_storage())
    handle = [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]
    store.agree(f"cuda window {end}", json.dumps(handle))
    return data


def attach(window: Window, end: int, store: Store, stop: StopToken, *, patience: float) -> Tensor:
    """Another process's window, in its own memory."""
    until = time.monotonic() + patience
    while (text := store.get(f"cuda window {end}")) is None:
        stop.check()
        if time.monotonic() > until:
            raise PeerLost(window.process, "it has not published its GPU memory")
        time.sleep(0.01)
    parts = json.loads(text)
    # The handles of the memory, of its reference count and of its event are bytes.
    handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in parts]
    storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(*handle)
    flat = torch.empty(0, dtype=window.dtype, device=storage.device)
    return flat.set_(storage, 0, (window.numel,), (1,))
