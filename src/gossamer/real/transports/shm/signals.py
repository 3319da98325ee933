"""Words that the streams of a GPU set and wait for by themselves.

An event of CUDA's would do the same, but for one thing: that of a process which was killed is never
reached, and nobody can reach it in its place. These words lie in main memory that the processes
share. Whoever finds out that one will never be set sets it himself, without asking a GPU whose
streams all stand still.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gossamer.real.transports.shm.one_pass import Mean, mean_in_one_pass

_NO_WISHES = 0
"""Of CUDA: a stream goes on when a word is at least what it waits for."""
_NO_CONTEXT = 201


class Signals(Protocol):
    """What makes the streams of one GPU wait; a word is known by its number."""

    def present(self) -> int:
        """Which stream works now for this thread."""
        ...

    def set(self, word: int, value: int) -> None:
        """Once the present stream has come to it."""
        ...

    def wait(self, word: int, value: int) -> None:
        """The present stream goes on when the word is no less; the caller goes on at once."""
        ...

    def address(self, word: int) -> int:
        """Where kernels find it."""
        ...

    def copy(self, words: int, target: Tensor) -> None:
        """As many as there is room for, from that one on, once the present stream comes to it."""
        ...

    def mean(self) -> Mean | None:
        """What adds up vectors of 32 bits in the present stream; None where there is no way to."""
        ...


class CudaSignals:
    """By the driver's own calls: torch has no words for them."""

    def __init__(
        self, device: torch.device, driver: ctypes.CDLL, memory: mmap, start: int, length: int
    ) -> None:
        self._device = device
        index = cast(int | None, device.index)
        self._index = torch.cuda.current_device() if index is None else index
        self._set, self._wait = driver.cuStreamWriteValue64_v2, driver.cuStreamWaitValue64_v2
        for call in (self._set, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
        self._copy = driver.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._place = ctypes.c_char.from_buffer(memory, start)
        place, there = ctypes.c_void_p(ctypes.addressof(self._place)), ctypes.c_uint64()
        _check(driver.cuMemHostRegister_v2(place, ctypes.c_size_t(length), _NO_WISHES))
        self._unregister = driver.cuMemHostUnregister
        _check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(there), place, 0))
        self._here, self._there = ctypes.addressof(self._place), there.value
        self._context = ctypes.c_void_p()
        _check(driver.cuCtxGetCurrent(ctypes.byref(self._context)))
        self._drive = driver.cuCtxSetCurrent

    def present(self) -> int:
        return cast(Any, torch)._C._cuda_getCurrentRawStream(self._index)

    def set(self, word: int, value: int) -> None:
        self._ask(self._set, self.present(), self._there + 8 * word, value, _NO_WISHES)

    def wait(self, word: int, value: int) -> None:
        self._ask(self._wait, self.present(), self._there + 8 * word, value, _NO_WISHES)

    def address(self, word: int) -> int:
        return self._there + 8 * word

    def copy(self, words: int, target: Tensor) -> None:
        length = 8 * target.numel()
        self._ask(self._copy, target.data_ptr(), self._here + 8 * words, length, self.present())

    def mean(self) -> Mean | None:
        return mean_in_one_pass(self._device)

    def forget(self) -> None:
        """The memory is as any other again."""
        _check(self._unregister(ctypes.c_void_p(self._here)))

    def _ask(self, call: Callable[..., int], *arguments: int) -> None:
        if cast(Any, torch)._C._cuda_getDevice() != self._index:
            # A number of a stream means another one on another GPU.
            with torch.cuda.device(self._index):
                self._ask(call, *arguments)
            return
        result = call(*arguments)
        if result == _NO_CONTEXT:
            # The first that this thread asks of the GPU; torch would have seen to it by itself.
            _check(self._drive(self._context))
            result = call(*arguments)
        _check(result)


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"CUDA refused to let streams wait for each other (error {result})")


def _try_out(device: torch.device, driver: ctypes.CDLL) -> None:
    """Raises RuntimeError where a GPU has no such words: it need not."""
    memory = mmap(-1, PAGESIZE)
    tried = CudaSignals(device, driver, memory, 0, PAGESIZE)
    try:
        tried.set(0, 1)
        tried.wait(0, 1)
        torch.cuda.synchronize(device)
    finally:
        tried.forget()
    if memory[0] != 1:
        raise RuntimeError("a GPU has not set a word in main memory")


def cuda_signals(device: torch.device, memory: mmap, start: int, length: int) -> Signals | None:
    """Words in that memory; None where this GPU cannot have such."""
    try:
        torch.cuda.synchronize(device)  # from here on there is a context for it
        # These calls give the interpreter lock away: where much is asked of a GPU they wait for
        # room, and the thread that hears of deaths must not wait for them.
        driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(device):
            _try_out(device, driver)
            return CudaSignals(device, driver, memory, start, length)
    except (OSError, AttributeError, RuntimeError):
        return None
