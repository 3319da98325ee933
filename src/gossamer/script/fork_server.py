"""A process that has imported torch once and forks for every script that a simulation runs, and for
every process of a pool.

A fresh interpreter needs two seconds of a core until torch is there, a fork a hundredth of that.
The server also knows the end of every process that it has forked. What such a process leaves
behind, also what it has detached from itself, becomes the server's child and is ended with it.

    the coordinator                               the server                    a script's process
    start: arguments, variables, open files  -->  fork  ---------------------> runs as __main__
                                       started <--
                                          ended <--  waitpid <---------------- ends
    kill, sweep                              -->  kills it, or all of them
    (closed)                                 -->  kills all, and ends

A process of a pool runs a module of the package instead of a script.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gossamer.errors import ConfigurationError
from gossamer.script.channel import Channel, ChannelClosed, Said, ScriptProcess

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_IMPORTED = ("torch", "torch._dynamo", "torch.utils.data", "gossamer")
"""torch's optimisers import `torch._dynamo` at their first step, and vectorised gradients, too."""
_REFUSED = 2
_THREADS_END_S = 10.0
"""How long a script may go on in threads after its last line."""
Begun = tuple["subprocess.Popen[bytes]", socket.socket]
"""The process of a server, and this end of its channel."""


# ---------------------------------------------------------------------- in the coordinator


class HasFile(Protocol):
    def fileno(self) -> int: ...


class ForkServer:
    """Started when it is first needed; ends with `close`, or with the coordinator."""

    def __init__(self, module: str = "", begun: Begun | None = None) -> None:
        """It serves scripts, or processes of this module, whose `serve` gets the number of an open
        file. `begun` is one that was started before the package could be imported."""
        self._module = module
        self._variables = {} if module else _variables_of_scripts()
        self._early: list[Said] = []
        self._ends: dict[int, int] = {}
        if begun is not None:
            self._process, connection = begun
            self.channel = Channel(connection)
            return
        self.channel, theirs = Channel.pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gossamer.script.fork_server", str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                env=self._variables or None,
            )  # fmt: skip

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str], threads: int,
        channel: HasFile, out: int, err: int,
    ) -> int:  # fmt: skip
        """The number of the new process, whose end `ended` tells."""
        asked = {
            "arguments": list(arguments), "variables": {**self._variables, **variables},
            "folder": os.getcwd(), "threads": threads, "module": self._module,
        }  # fmt: skip
        self.channel.send("start", asked, files=[channel.fileno(), out, err])
        return self._answer("started")["process"]

    def wait_for(self, process: int, seconds: float) -> int | None:
        """How a process has ended; None where it has not within so many seconds."""
        until = time.monotonic() + seconds
        while process not in self._ends:
            left = max(0.0, until - time.monotonic())
            if not self._early and not select.select([self.channel], [], [], left)[0]:
                return None
            if (end := self.ended()) is not None:
                self._ends[end[0]] = end[1]
        return self._ends.pop(process)

    def ended(self) -> tuple[int, int] | None:
        """A process that has ended, and how: an exit code, or a signal as a negative number. Called
        when the channel can be read."""
        said = self._early.pop(0) if self._early else self.channel.receive()
        return (said["process"], said["status"]) if said.kind == "ended" else None

    @property
    def has_news(self) -> bool:
        return bool(self._early)

    def kill(self, process: int) -> None:
        self.channel.send("kill", {"process": process})

    def sweep(self) -> None:
        """End every process, and all that they have left behind."""
        self.channel.send("sweep")
        self._answer("swept")
        self._early.clear()

    def _answer(self, kind: str) -> Said:
        while (said := self.channel.receive()).kind != kind:
            self._early.append(said)
        return said

    def close(self) -> None:
        self.channel.close()
        self._process.wait()


def _variables_of_scripts() -> dict[str, str]:
    """Sets of texts are gone through in the same order in every run, and nobody finds a GPU: its
    driver does not survive a fork."""
    kept = {name: text for name, text in os.environ.items() if not _is_ours(name)}
    return {"PYTHONHASHSEED": "0", **kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _is_ours(name: str) -> bool:
    """Variables of a launcher around this process would tell scripts the wrong rank."""
    return name.startswith("GOSSAMER_") or name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    )  # fmt: skip


# ---------------------------------------------------------------------- in the server


class _Forks:
    """The processes of one server."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._running: set[int] = set()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._sources = selectors.DefaultSelector()
        self._sources.register(channel, selectors.EVENT_READ)
        self._sources.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> Said:
        """Returns in forks only: with what the fork is to be."""
        while True:
            for key, _ in self._sources.select():
                if key.fileobj is self._wake:
                    self._wake.recv(1 << 12)
                    self._tell_ends()
                    continue
                try:
                    said = self._channel.receive()
                except ChannelClosed:
                    self._sweep()
                    os._exit(0)
                if said.kind == "kill":
                    _kill_group(said["process"])
                elif said.kind == "sweep":
                    self._sweep()
                    self._tell("swept", {})
                elif self._is_fork(said):
                    return said

    def _is_fork(self, said: Said) -> bool:
        process = os.fork()
        if process:
            self._running.add(process)
            for file in said.files:
                os.close(file)
            self._tell("started", {"process": process})
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._sources.close()
        for ours in (self._channel, self._wake, self._waker):
            ours.close()
        return True

    def _tell(self, kind: str, values: Mapping[str, Any]) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(kind, values)

    def _tell_ends(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            if process in self._running:
                self._running.discard(process)
                code = os.waitstatus_to_exitcode(status)
                self._tell("ended", {"process": process, "status": code})

    def _sweep(self) -> None:
        """Who loses its parent becomes a child of this process, so nobody escapes."""
        while True:
            for process in _children() | self._running:
                _kill_group(process)
            try:
                self._running.discard(os.waitpid(-1, 0)[0])
            except ChildProcessError:
                self._running.clear()
                return


def _kill_group(process: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _children() -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name, in parentheses, may hold anything.
            parent = entry.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(entry.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ---------------------------------------------------------------------- in a fork


def _become(asked: Said, server: int) -> None:
    """A session, open files, variables and a folder of its own."""
    os.setsid()
    _prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != server:
        os._exit(1)
    _, out, err = asked.files
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])


def _become_script(asked: Said) -> None:
    """What a fresh interpreter would be at the first line of the script."""
    for stream in (sys.stdout, sys.stderr):
        # What the script has printed is to be seen at once.
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    import numpy as np
    import torch

    torch.set_num_threads(asked["threads"])
    # torch begins with the same numbers in every process, these two do not.
    seed = random.Random(f"{os.environ.get('GOSSAMER_SEED')}/{os.environ.get('GOSSAMER_RANK')}")
    random.seed(seed.getrandbits(62))
    np.random.seed(seed.getrandbits(32))
    ScriptProcess.channel = Channel(socket.socket(fileno=asked.files[0]))
    arguments: list[str] = asked["arguments"]
    sys.argv = arguments
    sys.path[:0] = [str(Path(arguments[0]).resolve().parent)]


def _run_script() -> NoReturn:
    script = sys.argv[0]
    try:
        runpy.run_path(script, run_name="__main__")
        _wait_for_threads()
        status = 0
    except SystemExit as end:
        # As the system has it: 256 is 0.
        status = end.code & 255 if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        if not ScriptProcess.has_ended:
            _tell_failure(script, end, status)
    except BaseException as error:
        # Ours say in a sentence what is wrong; of others the user wants to see how they came about.
        is_refused = isinstance(error, ConfigurationError)
        if not isinstance(error, ChannelClosed):
            traceback.print_exc()
        status = _REFUSED if is_refused else 1
        _tell_failure(script, error, status)
    end_fork(status)


def end_fork(status: int) -> NoReturn:
    """End as an interpreter does, but for taking apart all that its parent had imported: that
    writes to hundreds of megabytes of memory, which are copied for it, and takes a quarter of a
    second."""
    if not _threads_left():
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    gc.collect()
    files = [one for one in gc.get_objects() if isinstance(one, io.IOBase)]
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(status)


def _threads_left() -> list[threading.Thread]:
    """The threads that the interpreter would wait for."""
    own = threading.main_thread()
    return [one for one in threading.enumerate() if one is not own and not one.daemon]


def _wait_for_threads() -> None:
    until = time.monotonic() + _THREADS_END_S
    while left := _threads_left():
        left[0].join(until - time.monotonic())
        if time.monotonic() >= until:
            raise ConfigurationError(
                f"the script has ended and left the thread {left[0].name} running, which does not "
                "end; join it, or make it a daemon"
            )


def _tell_failure(script: str, error: BaseException, status: int) -> None:
    channel = ScriptProcess.channel
    if channel is None:
        return
    is_exit = isinstance(error, SystemExit)
    text = str(error).strip().partition("\n")[0]
    what = f"exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
    values = {
        "status": status, "place": _place(script, error), "is_exit": is_exit,
        "is_refused": isinstance(error, ConfigurationError), "what": what,
        "text": "" if is_exit else text,
    }  # fmt: skip
    with contextlib.suppress(ChannelClosed, OSError):
        channel.send("failed", values)


def _place(script: str, error: BaseException) -> str:
    """The last line of the script itself that led there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = Path(script).resolve()
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve() == own:
            found = f"{script}:{frame.lineno}"
    return found or script


def main() -> None:
    channel, module = Channel(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]
    # What is imported stays. To go through it in search of garbage takes a third of a second, and
    # in a fork it would be copied.
    gc.disable()
    for name in (*_IMPORTED, *([module] if module else [])):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _prctl(_SET_CHILD_SUBREAPER, 1)
    if not sys.flags.safe_path:
        del sys.path[0]
    server = os.getpid()
    if module:
        # A process of a pool may be interrupted before its first line; it ends without a word.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked = _Forks(channel).serve()
    _become(asked, server)
    if module:
        importlib.import_module(module).serve(asked.files[0])
        end_fork(0)
    _become_script(asked)
    _run_script()


if __name__ == "__main__":
    # As a module of its own, so that what a script imports is what is set here.
    importlib.import_module("gossamer.script.fork_server").main()
