"""What others write, or try to write, where the workers of a run meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from gossamer.errors import Error
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.checks import check_alike
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.train.batches import LeasedBatches
from gossamer.real.transports.local import LocalStore
from gossamer.replica import trainable
from gossamer.tasks.split import Order
from launching import script, wait_until

NOBODY = 65534


class Attacker:
    """A process that is told an address later, and then does there what it can, as another user
    where this one may become one; forked before there are threads."""

    def __init__(self) -> None:
        reading, self._telling = os.pipe()
        self._answer, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                address = os.read(reading, 100).decode()
                if os.getuid() == 0:
                    os.setuid(NOBODY)
                os.write(writing, self._attack(address).encode())
            finally:
                os._exit(0)
        os.close(reading)
        os.close(writing)

    @staticmethod
    def _attack(address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=1))
            store.compare_set("launchers/end", "", "=1 a stranger says so")
            store.compare_set("dead/0", "", "=was killed")
            return f"it has {store.num_keys()} keys"
        except RuntimeError:
            return "refused"

    def attack(self, address: str) -> str:
        os.write(self._telling, address.encode())
        said = os.read(self._answer, 100).decode()
        os.waitpid(self.pid, 0)
        os.close(self._telling)
        os.close(self._answer)
        return said


def test_another_user_reaches_nothing_in_the_store_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither reads nor writes; the run goes on, and says at its end that somebody tried."""
    stranger = Attacker()
    text = (
        "open(f'{here}/store-{rank}', 'w').write(os.environ['GOSSAMER_STORE'])\n"
        "import time\nwhile not os.path.exists(f'{here}/go'): time.sleep(0.01)"
    )
    launcher = Launcher(Launch(script(tmp_path, text), 1, transport="torch"))
    statuses: list[int] = []
    running = threading.Thread(target=lambda: statuses.append(launcher.run()))
    running.start()
    try:
        address = tmp_path / "store-0"
        wait_until(lambda: address.exists() and ":" in address.read_text())
        assert stranger.attack(address.read_text()) == "refused"
        pid = int((tmp_path / "pid-0").read_text())
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        secret = next(one for one in given if one.startswith(b"GOSSAMER_SECRET=")).partition(b"=")[
            2
        ]
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        (tmp_path / "go").touch()
        running.join()
    assert statuses == [0]
    err = capsys.readouterr().err
    assert "of a stranger was refused" in err or "of strangers were refused" in err
    assert secret.decode() not in err


def forge_lease(store: LocalStore) -> None:
    store.agree("lease/0/0", "nobody")
    LeasedBatches(64, 16, 64, store, Order(64, 0, 16), 0, 2, lambda: frozenset({0})).open_step(0)


def forge_model(store: LocalStore) -> None:
    model = torch.nn.Linear(1, 1)
    store.agree("model", "[")
    check_alike(model, ModuleBinding(trainable(model)), store)


@pytest.mark.parametrize("forge", [forge_lease, forge_model])
def test_a_value_that_no_worker_has_written_is_one_sentence(
    forge: Callable[[LocalStore], None],
) -> None:
    """Where the launcher's store is not ours anybody may write: it is not believed."""
    with pytest.raises(Error, match=r"the store holds .* another program writes there"):
        forge(LocalStore())
