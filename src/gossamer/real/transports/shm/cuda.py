"""Memory and events of a GPU that several processes share, by CUDA's own handles.

A handle is a few numbers and bytes; it travels through the store as text and nothing is unpickled.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the order of what a GPU was asked to do."""

    def query(self) -> bool:
        """Whether the GPU has come that far."""
        ...


class OwnMark(Mark, Protocol):
    """One that can be set again, and that other processes may look at."""

    handle: str

    def record(self) -> None:
        """Set it behind all that the present stream was asked to do."""
        ...

    def precede(self) -> None:
        """What the present stream is asked to do from here on comes behind it."""
        ...


class Gpu(Protocol):
    """What is asked of a GPU; main memory can stand in for it."""

    device: torch.device

    def at(self, device: torch.device) -> Gpu:
        """The one on which a process's memory lies, where each has its own."""
        ...

    def allocate(self, length: int) -> Tensor: ...

    def handle(self, memory: Tensor) -> str:
        """By which other processes can open that memory."""
        ...

    def open(self, handle: str) -> Tensor:
        """The bytes of another process; raises RuntimeError where they cannot be had."""
        ...

    def finish(self) -> None:
        """Wait until all that the present stream was asked to do is done."""
        ...

    def mark(self) -> Mark:
        """Where the present stream is now."""
        ...

    def shared_mark(self) -> OwnMark:
        """Raises RuntimeError where such cannot be shared."""
        ...

    def open_mark(self, handle: str) -> Mark: ...


class Cuda:
    """A GPU of this machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = _Streams(device)
        self._waits: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """By stream: how many waits for it have begun, and the latest begun of those that ended."""

    def at(self, device: torch.device) -> Gpu:
        return Cuda(device)

    def allocate(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def handle(self, memory: Tensor) -> str:
        storage = cast(Any, memory.untyped_storage())
        parts = [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]
        return json.dumps(parts)

    def open(self, handle: str) -> Tensor:
        # The handles of the memory, of its reference count and of its event are bytes.
        parts = [
            bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)
        ]
        storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(*parts)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def finish(self) -> None:
        stream = self._streams.present()
        number = self._waits[stream.cuda_stream] = self.waits(stream) + 1
        stream.synchronize()
        self._ended[stream.cuda_stream] = max(number, self._ended.get(stream.cuda_stream, 0))

    def waits(self, stream: torch.cuda.Stream) -> int:
        return self._waits.get(stream.cuda_stream, 0)

    def has_ended(self, stream: torch.cuda.Stream, number: int) -> bool:
        """Whether a wait begun after so many others is over."""
        return self._ended.get(stream.cuda_stream, 0) > number

    def mark(self) -> Mark:
        return _StreamMark(self, self._streams.present())

    def shared_mark(self) -> OwnMark:
        return _CudaMark(self.device)

    def open_mark(self, handle: str) -> Mark:
        events: Any = torch.cuda.Event
        return events.from_ipc_handle(self.device, bytes.fromhex(handle))


class _Streams:
    """The present one: asking torch for it takes as long as starting a kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        index = cast(int | None, device.index)
        self._index = torch.cuda.current_device() if index is None else index
        self._known: dict[int, torch.cuda.Stream] = {}

    def present(self) -> torch.cuda.Stream:
        raw = cast(Any, torch)._C._cuda_getCurrentRawStream(self._index)
        known = self._known.get(raw)
        if known is None:
            known = self._known[raw] = torch.cuda.current_stream(self._device)
        return known


class _StreamMark:
    """Where a stream is now, without an event: reached when a wait for the stream that began later
    is over, or the stream is found with nothing to do."""

    def __init__(self, gpu: Cuda, stream: torch.cuda.Stream) -> None:
        self._gpu = gpu
        self._stream = stream
        self._begun = gpu.waits(stream)

    def query(self) -> bool:
        return self._gpu.has_ended(self._stream, self._begun) or self._stream.query()


class _CudaMark:
    """An event; CUDA keeps one that was never recorded as reached."""

    def __init__(self, device: torch.device) -> None:
        self._streams = _Streams(device)
        self._recorded_in: torch.cuda.Stream | None = None
        with torch.cuda.device(device):
            event: Any = torch.cuda.Event(interprocess=True)
            self.handle: str = event.ipc_handle().hex()
        self._event = event

    def record(self) -> None:
        self._recorded_in = self._streams.present()
        self._event.record(self._recorded_in)

    def precede(self) -> None:
        stream = self._streams.present()
        # A stream does everything in order anyway.
        if stream is not self._recorded_in:
            stream.wait_event(self._event)

    def query(self) -> bool:
        return self._event.query()


def gpu_for(device: torch.device) -> Gpu | None:
    """What to ask for memory of that kind, where it is a GPU's."""
    return Cuda(device) if device.type == "cuda" else None
