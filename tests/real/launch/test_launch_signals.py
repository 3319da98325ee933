"""The launcher and signals: who is told, who is ended, and what is tidied up."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from gossamer.real.launch import explanation
from gossamer.real.launch.explanation import Explanation
from gossamer.real.launch.launcher import Launcher
from launching import READY, WAIT, command, launched, pids, script, wait_until


def interrupting(tmp_path: Path, number: int, workers: int = 2) -> threading.Thread:
    """Sends this process a signal as soon as the workers are there."""

    def send() -> None:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == workers)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_ctrl_c_reaches_the_workers_as_sigint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They can tidy up; the exit code is 130."""
    text = f"try:\n    {READY}    {WAIT}\nexcept KeyboardInterrupt:\n    print('tidy')"
    thread = interrupting(tmp_path, signal.SIGINT)
    status, _ = launched(tmp_path, text, grace_s=20.0)
    thread.join()
    assert status == 130
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] tidy", "[1] tidy"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_that_ignore_signals_are_killed_in_the_end(tmp_path: Path) -> None:
    """Also one that is stopped."""
    text = (
        "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\n"
        f"{READY}if rank: os.kill(os.getpid(), signal.SIGSTOP)\n{WAIT}"
    )
    thread = interrupting(tmp_path, signal.SIGTERM)
    status, launcher = launched(tmp_path, text, grace_s=0.2)
    thread.join()
    assert status == 128 + signal.SIGTERM
    assert [end.status for end in launcher.ended] == [-9, -9]


ANSWER = (
    "import json, signal, time\n"
    "def answer(*_):\n"
    "    with open(os.environ['GOSSAMER_EXPLAIN_DIR'] + f'/{rank}.json', 'w') as file:\n"
    "        json.dump([{'waits_for': 'a reply', 'peer': 1 - rank, 'since_seconds': 12.34,\n"
    "                    'task': 'main'}] if rank else [], file)\n"
    "if rank < 2: signal.signal(signal.SIGUSR1, answer)\n"
)


def test_sigusr1_asks_the_workers_and_shows_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that would die of the signal are not sent it."""
    text = f"{ANSWER}{READY}" + "while not os.path.exists(f'{here}/shown'): time.sleep(0.01)"
    show = Explanation.show

    def shown(self: Explanation) -> None:
        show(self)
        (tmp_path / "shown").touch()

    monkeypatch.setattr(Explanation, "show", shown)
    monkeypatch.setattr(explanation, "_PATIENCE_S", 100.0)
    thread = interrupting(tmp_path, signal.SIGUSR1, workers=3)
    status, _ = launched(tmp_path, text, workers=3)
    thread.join()
    said = capsys.readouterr().err
    assert status == 0
    assert said.count("Who waits for what") == 1
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in said.splitlines()]
    assert ["1", "main", "a reply", "0", "12.3 s"] in rows
    assert ["0", "", "nothing: it computes", "", ""] in rows
    assert "does not say" in said


def test_a_deadline_explains_and_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has finished by then says so in the table."""
    reach = Launcher._reach_deadline

    def reach_when_one_waits_and_one_has_ended(self: Launcher) -> None:
        if self.ended and (tmp_path / "ready-1").exists():
            reach(self)

    monkeypatch.setattr(Launcher, "_reach_deadline", reach_when_one_waits_and_one_has_ended)
    monkeypatch.setattr(explanation, "_PATIENCE_S", 100.0)
    text = f"{ANSWER}{READY}if rank: {WAIT}"
    status, launcher = launched(tmp_path, text, deadline_s=0.1)
    said = capsys.readouterr().err
    assert status == 3
    assert "not finished within the deadline of 0.1 s" in said
    assert "a reply" in said
    assert "nothing: ended with exit code 0" in said
    assert len(launcher.ended) == 2


def test_no_worker_outlives_an_interrupted_or_a_killed_launcher(tmp_path: Path) -> None:
    """Of the real command: SIGINT ends it with 130; SIGKILL leaves it no time to do anything."""
    worker = script(tmp_path, f"{READY}{WAIT}")
    for number, expected in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        for file in tmp_path.glob("ready-*"):
            file.unlink()
        with command("-n", "2", *worker) as process:
            wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
            assert len(pids(tmp_path)) == 2
            process.send_signal(number)
            assert process.wait(timeout=300) == expected
            wait_until(lambda: pids(tmp_path) == [])


def test_signals_are_handled_before_anything_temporary_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the folder of answers is made would leave it behind."""
    seen: list[object] = []

    def make(**where: object) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        raise OSError("no folder today")

    monkeypatch.setattr("gossamer.real.launch.launcher.tempfile.TemporaryDirectory", make)
    with pytest.raises(OSError, match="no folder today"):
        launched(tmp_path, "pass")
    assert seen != [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
