"""The driver's calls behind signals, with a driver that only notes them."""

from __future__ import annotations

import ctypes
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.commands import doctor
from gossamer.real.transports.shm import signals as signals_module
from gossamer.real.transports.shm.signals import CudaSignals, cuda_signals

DEVICE = torch.device("cuda", 1)
STREAM = 77
_NO_CONTEXT = 201


class Driver:
    """Answers with the given numbers, and then with 0."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.contexts = 0
        self.can_register = True
        self.sets_words = False
        self.unregistered = 0
        self.place = 0
        self.cuStreamWriteValue64_v2 = self._noting("set")
        self.cuStreamWaitValue64_v2 = self._noting("wait")
        self.cuMemcpyHtoDAsync_v2 = self._noting("copy")

    def _noting(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name == "set" and self.sets_words:
                ctypes.c_uint64.from_address(self.place).value = arguments[2]
            return self.answers.pop(0) if self.answers else 0

        return call

    def cuMemHostRegister_v2(self, place: Any, length: Any, flags: int) -> int:
        self.place = place.value
        return 0 if self.can_register else 1

    def cuMemHostUnregister(self, place: Any) -> int:
        self.unregistered += 1
        return 0

    def cuMemHostGetDevicePointer_v2(self, there: Any, place: Any, flags: int) -> int:
        there._obj.value = 1 << 40
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts += 1
        return 0


class Gpus:
    """Which one torch has chosen for this thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.present = 1
        self.visited: list[int] = []
        c: Any = torch._C
        patch.setattr(c, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        patch.setattr(c, "_cuda_getDevice", lambda: self.present, raising=False)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "device", self._at)

    def _at(self, device: Any) -> Any:
        gpus, index = self, device if isinstance(device, int) else device.index

        class Visit:
            def __enter__(self) -> None:
                self.before, gpus.present = gpus.present, index
                gpus.visited.append(index)

            def __exit__(self, *error: object) -> None:
                gpus.present = self.before

        return Visit()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def _signals(driver: Driver) -> CudaSignals:
    return CudaSignals(DEVICE, driver, mmap(-1, 4096), 0, 4096)  # pyright: ignore[reportArgumentType]


def test_words_are_eight_bytes_apart(gpus: Gpus) -> None:
    driver = Driver()
    one = _signals(driver)
    one.set(3, 9)
    one.wait(2, 8)
    assert driver.calls == [
        ("set", STREAM, (1 << 40) + 24, 9, 0),
        ("wait", STREAM, (1 << 40) + 16, 8, 0),
    ]
    assert one.address(5) == (1 << 40) + 40


def test_a_thread_that_has_asked_the_gpu_nothing_yet_is_given_a_context(gpus: Gpus) -> None:
    """AD-PSGD's averaging loop is such a one; torch's own calls see to it by themselves."""
    driver = Driver()
    one = _signals(driver)
    driver.answers = [_NO_CONTEXT]
    one.set(0, 1)
    assert driver.contexts == 1
    assert [call[0] for call in driver.calls] == ["set", "set"]


def test_another_gpu_is_left_for_the_call(gpus: Gpus) -> None:
    """A stream's number means another stream there."""
    driver = Driver()
    one = _signals(driver)
    gpus.present = 0
    one.wait(0, 1)
    assert gpus.visited == [1]
    assert gpus.present == 0


def test_what_cuda_refuses_is_said(gpus: Gpus) -> None:
    driver = Driver()
    one = _signals(driver)
    driver.answers = [999]
    with pytest.raises(RuntimeError, match="error 999"):
        one.set(0, 1)


@pytest.mark.parametrize("fault", ["no driver", "no such calls", "no registering"])
def test_where_there_are_no_signals_nothing_fails(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Then every process waits for its stream, as it does without them."""
    driver = Driver()
    driver.can_register = fault != "no registering"

    def load(name: str) -> Any:
        if fault == "no driver":
            raise OSError(name)
        return SimpleNamespace() if fault == "no such calls" else driver

    monkeypatch.setattr(signals_module.ctypes, "CDLL", load)
    assert cuda_signals(DEVICE, mmap(-1, 4096), 0, 4096) is None


@pytest.mark.parametrize("has_them", [True, False])
def test_the_doctor_says_whether_there_are_signals(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, has_them: bool
) -> None:
    """Without them all is right too, and slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(doctor, "cuda_signals", lambda *where: object() if has_them else None)
    finding = doctor._PARTS["signals"]()
    assert finding.works == has_them
    assert ("go on" in finding.why) == has_them


def test_a_gpu_that_sets_no_word_has_no_signals(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried out before anybody relies on them."""
    driver = Driver()
    monkeypatch.setattr(signals_module.ctypes, "CDLL", lambda name: driver)
    assert cuda_signals(DEVICE, mmap(-1, 4096), 0, 4096) is None
    assert [call[0] for call in driver.calls] == ["set", "wait"]
    driver.sets_words = True
    assert cuda_signals(DEVICE, mmap(-1, 4096), 0, 4096) is not None
    assert driver.unregistered == 2


def test_a_copy_takes_as_many_words_as_there_is_room_for(gpus: Gpus) -> None:
    driver = Driver()
    target = torch.zeros(3, dtype=torch.int64)
    memory = mmap(-1, 4096)
    one = CudaSignals(DEVICE, driver, memory, 0, 4096)  # pyright: ignore[reportArgumentType]
    one.copy(4, target)
    here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert driver.calls == [("copy", target.data_ptr(), here + 32, 24, STREAM)]
