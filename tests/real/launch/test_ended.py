"""Commands that a signal ends tidy up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gossamer.commands.cli import ended_by_signals
from launching import READY, WAIT, command, pids, script, wait_until


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGTERM])
def test_a_launcher_ended_by_a_signal_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Of the real command; its workers are ended, too."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with command("-n", "1", *script(tmp_path, READY + WAIT)) as process:
        wait_until(lambda: (tmp_path / "ready-0").exists())
        assert list(temporary.iterdir())
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert list(temporary.iterdir()) == []
    assert pids(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_ended_by_a_signal_tidies_up(number: signal.Signals) -> None:
    """Also while it launches nobody; afterwards the signal means what it meant, and where nobody
    listens to it, as under nohup, nobody does."""
    tidy: list[str] = []
    before = signal.signal(number, signal.SIG_IGN)

    def be_ended() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            tidy.append("tidy")

    try:
        with ended_by_signals():
            be_ended()
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit, match=str(128 + number)), ended_by_signals():
            be_ended()
        assert tidy == ["tidy", "tidy"]
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
