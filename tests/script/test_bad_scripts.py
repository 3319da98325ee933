"""A script that cannot be run ends in one sentence with the place, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scripts
from command_line import gossamer
from gossamer.script.fork_server import ForkServer
from scripts import HEAD, LOOP, written

STEP = """
with gossamer.join(model, optimizer) as worker:
    for number, (batch, wanted) in enumerate(worker.shard(loader)):
        {before}
        optimizer.zero_grad()
        cross_entropy(model(batch), wanted).backward()
        worker.step()
"""


def step(before: str) -> str:
    return HEAD + STEP.format(before=before)


CASES = {
    "raises in the third batch": (
        step("if number == 2: raise ValueError('a bad sample')"),
        1, "train.py:15: ValueError: a bad sample",
    ),
    "never joins": (HEAD, 2, "ended without calling gossamer.join"),
    "leaves before it joins": ("import sys; sys.exit(7)", 7, "before it joined: exit(7)"),
    "leaves by a number that the system takes for 0": (
        "import sys; sys.exit(256)", 2, "before it joined: exit(256)",
    ),
    "leaves in its loop": (
        step("if number == 1: sys.exit(5)"), 5, "before its loop was over: exit(5)",
    ),
    "leaves in its loop as if all were well": (
        step("if number == 1: sys.exit(0)"), 2, "before its loop was over",
    ),
    "is no Python": ("def def", 1, "train.py:1: SyntaxError"),
    "imports what is not there": (
        "import torch\nimport no_such_module", 1, "train.py:2: ModuleNotFoundError",
    ),
    "imports what is no Python": (
        "open('helper.py', 'w').write('def def')\nimport helper", 1, "helper.py:1: SyntaxError",
    ),
    "asks at the keyboard": (HEAD + "input()", 1, "train.py:12: EOFError"),
    "has a loss that is a vector": (
        (HEAD + LOOP).replace("wanted)", "wanted, reduction='none')"),
        1, "train.py:18: RuntimeError: grad can be implicitly created only for scalar outputs",
    ),
    "leaves with a text": (
        step("if number == 1: sys.exit('no data')"), 1, "before its loop was over: exit('no data')",
    ),
    "leaves without a word": (
        step("if number == 1: import os; os._exit(4)"), 4, "with exit code 4",
    ),
    "leaves behind its loop": (HEAD + LOOP + "sys.exit(3)", 3, "behind its loop, with exit code 3"),
    "raises behind its loop": (HEAD + LOOP + "raise ValueError('late')", 1, "ValueError: late"),
    "crashes": (
        step("if number == 1: import ctypes; ctypes.string_at(0)"), 139, "was ended by SIGSEGV",
    ),
    "interrupts itself": (step("if number == 1: raise KeyboardInterrupt"), 1, "KeyboardInterrupt"),
    "leaves a thread running": (
        HEAD + LOOP + "import threading; threading.Thread(target=threading.Event().wait).start()",
        2, "left the thread Thread-1",
    ),
    "makes no step": (
        HEAD + "with gossamer.join(model, optimizer) as worker: pass",
        2, "without a step of any worker",
    ),
    "has fewer batches than workers": (
        (HEAD + LOOP).replace("192", "6"), 2, "1 batches for 2 workers, and each needs one",
    ),
    "joins no model": (HEAD + "gossamer.join(3, optimizer)", 2, "as its model, or a list of them"),
    "joins no optimizer": (HEAD + "gossamer.join(model, None)", 2, "as its optimizer, or a list"),
    "trains nothing": (
        HEAD + "model.requires_grad_(False)" + LOOP, 2, "no trainable parameters",
    ),
    "steps outside of its loop": (
        HEAD + "gossamer.join(model, optimizer).step()", 2, "called outside of `with",
    ),
    "is killed": (
        step("if number == 1: import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        137, "was ended by SIGKILL",
    ),
    "joins twice": (
        HEAD + "gossamer.join(model, optimizer)\ngossamer.join(model, optimizer)",
        2, "joins a second time",
    ),
    "steps in a fork": (
        step("import os; number == 1 and os.fork() == 0 and worker.step()"), 2, "has forked",
    ),
    "has models of several kinds": (
        HEAD.replace("16", "(16 + int(__import__('os').environ['GOSSAMER_RANK']))")
        + "gossamer.join(model, optimizer)",
        2, "another than that of worker 0",
    ),
    "wants a GPU": (HEAD + "model.cuda()", 1, "scripts run on the CPU"),
    "shares a value that the others do not": (
        step("if number == 2 and worker.rank == 0: worker.mean(1.0)"),
        2, "waits in worker.mean() at train.py:15 for worker 1, whose loop goes on",
    ),
    "shares by another word than the others": (
        step("worker.any(1) if worker.rank == 0 else worker.mean(1.0)"),
        2, "as call 1 of these",
    ),
    "counts what the run counts": (
        step("worker.report(steps=3)"), 2, "counts by itself",
    ),
}  # fmt: skip
FIRST = ("raises in the third batch", "never joins", "leaves in its loop", "steps in a fork")


@pytest.mark.parametrize(
    "what", [pytest.param(c, marks=() if c in FIRST else pytest.mark.wide) for c in CASES]
)
def test_a_bad_script_ends_in_one_sentence(
    what: str, tmp_path: Path, commands: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line on standard error says what failed and where, the exit code is 2 or the
    script's own, and no process is left."""
    text, status, sentence = CASES[what]
    script = written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    said = gossamer(
        "simulate", script, "--workers", "2", "--method", "all_reduce", "--runs", "none"
    )
    last = said.err.strip().splitlines()[-1]
    assert said.status == status, said.err
    assert last.startswith("error: "), said.err
    assert sentence in last, said.err
    assert scripts.children(scripts.process_of(commands)) == []


GOOD = {
    "changes its folder": ("import os; os.chdir('/')\n" + HEAD + LOOP, "accuracy"),
    "has a generator as its data": (
        HEAD.replace("loader = DataLoader(", "every = DataLoader(") + "loader = iter(every)" + LOOP,
        "accuracy",
    ),
    "leaves a daemon behind": (
        HEAD + LOOP + "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "accuracy",
    ),
    "has a loss of NaN": (
        (HEAD + LOOP).replace("wanted).backward()", "wanted).mul(float('nan')).backward()"),
        "loss nan",
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("what", GOOD)
def test_an_odd_script_is_run_to_its_end(what: str, tmp_path: Path, commands: ForkServer) -> None:
    """It is no business of the simulation's, and the row says what came out."""
    text, sentence = GOOD[what]
    script = written(tmp_path, text)
    said = gossamer("simulate", script, "--workers", "2", "--runs", "none")
    assert said.status == 0, said.err
    assert sentence in said.err
    assert scripts.children(scripts.process_of(commands)) == []


@pytest.mark.wide
def test_ten_megabytes_of_output_are_no_obstacle(tmp_path: Path, commands: ForkServer) -> None:
    """What the processes print goes to files, which never fill up as pipes do."""
    noise = "print('x' * 10_000_000)"
    script = written(tmp_path, HEAD, noise, LOOP)
    runs = tmp_path / "runs"
    said = gossamer("simulate", script, "--workers", "2", "--runs", str(runs))
    assert said.status == 0, said.err[-500:]
    (out,) = runs.glob("*/outputs/worker-1.out")
    assert out.stat().st_size > 10_000_000


def test_what_a_script_leaves_behind_is_ended(tmp_path: Path, commands: ForkServer) -> None:
    """Also a process that has detached itself by two forks and a session of its own."""
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
"""
    script = written(tmp_path, HEAD, daemon, LOOP)
    said = gossamer("simulate", script, "--workers", "2", "--runs", "none")
    assert said.status == 0, said.err
    assert scripts.children(scripts.process_of(commands)) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere.py",), "does not exist"),
        (("{script}", "--lr", "0.1"), "--lr is for tasks"),
        (("{script}", "--method", "ad_pgsd"), "did you mean 'ad_psgd'?"),
        (("{script}", "--compute", "soon"), "--compute"),
    ],
)
def test_a_bad_command_is_refused(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, commands: ForkServer
) -> None:
    """Before anything is written."""
    script = written(tmp_path, HEAD, LOOP)
    runs = tmp_path / "runs"
    own = [part.format(script=script) for part in arguments]
    said = gossamer("simulate", *own, "--workers", "2", "--runs", str(runs))
    assert said.status == 2
    assert sentence in said.err
    assert not runs.exists()


@pytest.mark.wide
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """The command ends with 130, and with it everything that it has started."""
    endless = LOOP.replace("range(2)", "range(10**9)")
    script = written(tmp_path, HEAD, "print('begun', flush=True)", endless)
    command = subprocess.Popen(
        [sys.executable, "-m", "gossamer", "simulate", script, "--workers", "2", "--runs", "none"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert command.stderr is not None
    while "loss" not in command.stderr.readline():
        assert command.poll() is None
    (server,) = scripts.children(command.pid)
    command.send_signal(signal.SIGINT)
    rest = command.communicate(timeout=300)[1]
    assert command.returncode == 130, rest
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.wide
def test_a_coordinator_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    """The server of forks notices the end of the command by its connection."""
    script = written(tmp_path, HEAD, LOOP.replace("range(2)", "range(10**9)"))
    command = subprocess.Popen(
        [sys.executable, "-m", "gossamer", "simulate", script, "--workers", "2", "--runs", "none"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert command.stderr is not None
    while "loss" not in command.stderr.readline():
        assert command.poll() is None
    (server,) = scripts.children(command.pid)
    workers = scripts.children(int(server))
    command.kill()
    command.communicate()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{one}").exists() for one in [server, *workers]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
