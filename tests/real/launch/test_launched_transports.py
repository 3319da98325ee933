"""Workers over a transport under the launcher: they meet, and hear of a death at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from launching import pids, script

MEET = """
import time, torch
from gossamer.real.launch.environment import connect
from gossamer.real.launch.selftest import finished
from gossamer.real.transports.transport import StopToken, Window

class Heard:
    lost_now = set()
    def frame(self, source, data): pass
    def lost(self, process): self.lost_now.add(process)
    def joined(self, process): pass
    def closed(self, process): pass

transport = connect()
heard = Heard()
windows = {end: Window(4, torch.float32, end) for end in range(transport.size)}
transport.open(windows, {rank: torch.full((4,), float(rank))}, heard, StopToken())
if rank == 1:
    os.kill(os.getpid(), 9)
while 1 not in heard.lost_now: time.sleep(0.005)
mean = torch.tensor([float(rank)])
finished(transport.all_reduce([mean], [0, 1, 2]))
print(transport.name, sorted(transport.lost), mean.item())
transport.close()
"""


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_survivors_hear_of_a_death_and_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    """Before they ask for anything; the mean is then over those who live."""
    command = [part for part in script(tmp_path, MEET) if part != "-S"]
    launch = Launch(
        command, 3, transport=transport, tolerates_deaths=True, deadline_s=300.0,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    status = Launcher(launch).run()
    said = capsys.readouterr()
    assert status == 0, said.err
    expected = f"{transport} [1] 1.0"
    assert sorted(said.out.splitlines()) == [f"[0] {expected}", f"[2] {expected}"]
    assert "worker 1 was killed by SIGKILL" in said.err
    assert pids(tmp_path) == []
