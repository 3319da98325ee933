"""One process of a group on MPI: `mpi_groups.py MAPPED scenario_a scenario_b ...`.

Beside the scenarios of every transport it knows those of MPI alone. Started by `test_mpi.py`,
which never imports this: importing it starts MPI.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref

import pytest
import torch

from gossamer.errors import ConfigurationError, PeerLost, ProtocolError
from gossamer.real.transports.conformance import death_laws, laws  # noqa: F401  # fill the table
from gossamer.real.transports.conformance.tools import (
    WIDTH,
    FrameRecorder,
    Tools,
    mean_of,
    run_laws,
    scenario,
)
from gossamer.real.transports.mpi import MpiTransport
from gossamer.real.transports.mpi.meeting import address_towards
from gossamer.real.transports.mpi.windows import places_of
from gossamer.real.transports.transport import StopToken, Transport, Window

MAPPED = {"mapped": True, "distant": False}


@scenario()
def scenario_results_leave_no_circles_behind(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The memory of a sum comes back without the garbage collector's help."""
    gc.collect()
    gc.disable()
    results: list[weakref.ref[torch.Tensor]] = []
    for _ in range(30):
        mean = mean_of(transport, torch.ones(50_000), range(size))
        results.append(weakref.ref(tools.wait(mean)))
    gc.enable()
    # Threads may still hold the last ones for a moment.
    assert sum(result() is not None for result in results) < 12


@scenario()
def scenario_an_addition_outside_of_a_window_is_refused(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Before anything is written, wherever the window is."""
    for start in (-1, WIDTH - 9):
        with pytest.raises(ProtocolError, match="do not fit"):
            transport.accumulate((rank + 1) % size, torch.ones(10), start)
    assert not tools.wait(transport.read((rank + 1) % size)).any()


@scenario()
def scenario_half_precision_and_empty_windows(
    transport: MpiTransport, rank: int, size: int, tools: Tools
) -> None:
    """A second transport beside the first: types that MPI cannot add, and processes without ends.

    Everything here is exact in eight bits of mantissa.
    """
    other = MpiTransport(mapped=transport.is_mapped)
    windows = {0: Window(100, torch.bfloat16, 0), 1: Window(100, torch.float16, 1)}
    windows[2] = Window(0, torch.float32, 1)
    initial = {end: torch.full((w.numel,), 1.0, dtype=w.dtype) for end, w in windows.items()}
    mine = {end: value for end, value in initial.items() if windows[end].process == rank}
    other.open(windows, mine, FrameRecorder(), StopToken())
    for end in (0, 1):
        for _ in range(5):
            tools.wait(other.accumulate(end, torch.ones(60), 40))
    mean = tools.wait(mean_of(other, torch.full((9000, 2), rank, dtype=torch.bfloat16), (0, 1, 2)))
    assert mean.shape == (9000, 2)
    assert torch.equal(mean, torch.ones(9000, 2, dtype=torch.bfloat16))
    tools.barrier("added")
    for end in (0, 1):
        seen = tools.wait(other.read(end)).float()
        assert seen.tolist() == [1.0] * 40 + [1.0 + 5 * size] * 60
    assert tools.wait(other.read(2)).numel() == 0
    other.close()


@scenario()
def scenario_places_and_addresses(transport: Transport, rank: int, size: int, tools: Tools) -> None:
    """Ends of one process follow each other, each with a cache line for its lock."""
    windows = {0: Window(3, torch.float32, 0), 1: Window(1, torch.float64, 1)}
    windows[2] = Window(17, torch.float32, 0)
    assert places_of(windows) == ({0: 0, 1: 0, 2: 128}, {0: 128 + 64 + 128, 1: 128})
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None


@scenario()
def scenario_there_is_no_choice_of_reductions(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """What is asked for is refused with a sentence, and not overlooked."""
    os.environ["GOSSAMER_REDUCTION"] = "engine"
    try:
        with pytest.raises(ConfigurationError, match="always adds in order of rank"):
            MpiTransport.from_environment()
    finally:
        del os.environ["GOSSAMER_REDUCTION"]


@scenario()
def scenario_who_has_left_the_sums_is_not_waited_for(
    transport: MpiTransport, rank: int, size: int, tools: Tools
) -> None:
    """Where memory is shared the others go on; between hosts they end with a sentence. What was
    begun before is whole, however late it is read. Nothing can be reduced behind this."""
    before = mean_of(transport, torch.full((9000,), float(rank)), range(size))
    if rank == 1:
        transport.leave_sums()
        if transport.is_mapped:
            tools.wait_for_arrivals("after", size - 1)
    assert tools.wait(before).tolist() == [1.0] * 9000
    if rank != 1:
        value = torch.full((9000,), float(rank + 1))
        if transport.is_mapped:
            for _ in range(20):  # so many that cells and memory are used again
                assert tools.wait(mean_of(transport, value, range(size))).tolist() == [2.0] * 9000
        else:
            with pytest.raises(PeerLost, match="worker 1 is lost: it has left its loop, and MPI"):
                tools.wait(mean_of(transport, value, range(size)))
        tools.arrive("after")
    tools.barrier("left")


@scenario(apart=True)
def scenario_a_process_fails_while_the_others_wait(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Nobody is left waiting for it: the job ends."""
    if rank == 1:
        raise RuntimeError("a bug in somebody's program")
    tools.wait(mean_of(transport, torch.ones(5), range(size)))


if __name__ == "__main__":
    run_laws(MpiTransport(mapped=MAPPED[sys.argv[1]]), sys.argv[2:])
