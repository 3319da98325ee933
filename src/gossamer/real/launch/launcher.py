"""The launcher starts the workers of one host, watches them, and ends them all.

A worker that dies does not end the run: the launcher tells the others, and they go on. No worker
outlives the launcher, whatever ends it.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gossamer.errors import ConfigurationError
from gossamer.real.faults.fault_plan import FAULTS_VARIABLE
from gossamer.real.launch.attachment import AttachedMeeting
from gossamer.real.launch.console import ConsoleOutput, put, say
from gossamer.real.launch.elastic import Revivals
from gossamer.real.launch.explanation import Explanation
from gossamer.real.launch.hosts import HostMeeting
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.process import (
    OVER_DEADLINE,
    Ended,
    Process,
    Shutdown,
    Terminal,
    exit_code,
    failures,
    signal_name,
)
from gossamer.real.launch.wakeup import Wakeup
from gossamer.real.transports.beginning import LIFE, PRESENT

if TYPE_CHECKING:
    from gossamer.real.transports.shm.memory import Segments

_TICK_S = 0.02
_SLEEP_S = 0.5
"""The longest time between two looks at things that cannot wake the launcher."""
_CHUNK = 1 << 16
_MOST_CHUNKS = 64
_LEFTOVER_S = 2.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Launcher:
    """One launch; `run` returns the exit code, and `ended` then says how each worker ended."""

    def __init__(self, launch: Launch) -> None:
        if launch.output == "folder" and launch.folder is None:
            raise ConfigurationError("output into files needs a run folder to put them in")
        self._launch = launch
        self._processes: list[Process] = []
        self._revivals = Revivals(1 if launch.elastic is None else launch.elastic.least)
        self._lives: dict[int, int] = {}
        self._started: dict[int, float] = {}
        """By rank: when its present life began, and how many it has had before."""
        self._noted: set[int] = set()
        """The numbers of the processes whose end has been dealt with."""
        self._ending = Shutdown(self._processes, launch.grace_s)
        self._output = ConsoleOutput(launch.output, launch.folder, launch.ranks)
        self._pipes = selectors.DefaultSelector()
        self._terminal = Terminal.own()
        self._wakeup = Wakeup(self._pipes)
        self._segments: Segments | None = None
        self._signals: list[int] = []
        self.deaths: list[int] = []
        """The ranks of workers that died or failed while the run went on; the list grows."""
        self._due = launch.faults.signals()
        self._explanation: Explanation | None = None
        self._is_over_deadline = False
        self._began = 0.0
        self.ended: list[Ended] = []
        """How the workers ended, in order of time."""

    def run(self) -> int:
        with ExitStack() as stack:
            stack.callback(self._close)
            self._meeting = self._meet()
            stack.callback(self._close_store)
            self._meeting.wait_for_all()
            folder = self._launch.folder
            # The stack unwinds in reverse: signals are handled until the folder of answers is gone.
            stack.enter_context(self._handled_signals())
            self._answers = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".explain-", dir=folder)
            )
            stack.callback(self._ending.finish)
            self._start()
            while self._revivals or any(one.poll() is None for one in self._processes):
                self._turn()
            self._notice_ends()
            self._sweep()
            status = self._conclude()
            elsewhere = self._meeting.leave(status, lambda: bool(self._signals))
        for sentence in elsewhere:
            say(sentence)
        return status or (1 if elsewhere else 0)

    def end(self) -> None:
        """End the run as Ctrl-C does. Any thread may call this."""
        self._signals.append(signal.SIGINT)
        self._wakeup.call()

    # ------------------------------------------------------------------ start

    def _meet(self) -> HostMeeting | AttachedMeeting:
        launch = self._launch
        if launch.attach is not None:
            return launch.attach.meeting
        return HostMeeting(launch.hosts, launch.workers, launch.elastic is not None)

    def _start(self) -> None:
        launch = self._launch
        if launch.chosen_transport == "shm" and launch.size > 1:
            # Imported here, because not every system supports it.
            from gossamer.real.transports.shm.memory import create_segments

            self._segments = create_segments(launch.size)
            for rank in range(launch.size):
                if launch.elastic is not None and rank not in launch.beginners:
                    self._segments.mark_dead(rank)
        self._began = time.monotonic()
        if launch.attach is not None:
            for rank in launch.ranks:
                self._start_worker(rank, self._meeting.next_life(rank))
            return
        for rank in launch.beginners:
            self._start_worker(rank, 0)
        for fault in launch.faults.of("arrive", "return"):
            self._revivals.at(fault.worker, self._began + fault.at)
        if launch.elastic is not None:
            self._meeting.tell_job(launch.size, launch.ranks, launch.beginners, self._shared())

    def _start_worker(self, rank: int, life: int) -> None:
        """Start a worker of this host, or start it again."""
        launch = self._launch
        self._lives[rank] = life
        self._started[rank] = time.monotonic() - self._began
        if self._segments is not None and life:
            self._segments.renew(rank, life)
        fds = () if self._segments is None else tuple(self._segments.fds)
        variables = self._variables(rank, launch.ranks.index(rank), fds)
        process = Process(rank, launch.command, variables, fds, self._began, self._terminal)
        before = next((one for one in self._processes if one.rank == rank), None)
        if before is None:
            self._processes.append(process)
        else:
            self._forget(before)
            self._processes[self._processes.index(before)] = process
        self._wakeup.watch(process)
        for pipe, is_error in ((process.out, False), (process.err, True)):
            os.set_blocking(pipe.fileno(), False)
            self._pipes.register(pipe, selectors.EVENT_READ, (rank, is_error))

    def _forget(self, process: Process) -> None:
        """Another life takes the place of an ended worker."""
        for key in list(self._pipes.get_map().values()):
            if key.fileobj in (process.out, process.err):
                self._pipes.unregister(key.fileobj)
        process.close()

    def _shared(self) -> dict[str, str]:
        """What workers that attach to this run are told."""
        launch = self._launch
        told = {"GOSSAMER_METHOD": launch.method, "GOSSAMER_SEED": launch.seed}
        told |= {"GOSSAMER_TRANSPORT": launch.chosen_transport}
        told |= {FAULTS_VARIABLE: launch.faults.to_json()}
        return {key: str(value) for key, value in told.items() if value is not None}

    def _variables(self, rank: int, local_rank: int, fds: Sequence[int]) -> dict[str, str]:
        launch = self._launch
        given = {
            "GOSSAMER_RANK": rank,
            "GOSSAMER_SIZE": launch.size,
            "GOSSAMER_LOCAL_RANK": local_rank,
            "GOSSAMER_LOCAL_SIZE": len(launch.ranks),
            "GOSSAMER_STORE": self._meeting.address,
            "GOSSAMER_SECRET": self._meeting.secret,
            "GOSSAMER_TRANSPORT": launch.chosen_transport,
            "GOSSAMER_METHOD": launch.method,
            "GOSSAMER_REDUCTION": os.environ.get("GOSSAMER_REDUCTION"),
            "GOSSAMER_SHM_FDS": ",".join(map(str, fds)) or None,
            "GOSSAMER_SEED": launch.seed,
            FAULTS_VARIABLE: launch.faults.to_json(),
            "GOSSAMER_RUN": None if launch.folder is None else launch.folder.resolve(),
            "GOSSAMER_EXPLAIN_DIR": Path(self._answers).resolve(),
        }
        if launch.elastic is not None:
            given[PRESENT] = ",".join(map(str, launch.beginners))
            given[LIFE] = self._lives[rank]
        if launch.attach is not None:
            given |= {**launch.attach.told, LIFE: self._lives[rank]}
        # The variables of a launcher around this one would contradict these.
        kept = {key: text for key, text in os.environ.items() if not key.startswith("GOSSAMER_")}
        if self._terminal is not None and self._terminal.is_output:
            kept["TERM"] = "dumb"  # lines of several workers alternate, so none may move the cursor
        # Without this, Python would write lines to a pipe in blocks of kilobytes.
        kept.setdefault("PYTHONUNBUFFERED", "1")
        # Workers that each use all cores would hinder each other.
        kept.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // launch.workers)))
        set_now = {key: str(value) for key, value in given.items() if value is not None}
        return kept | set_now | dict(launch.environment)

    # ------------------------------------------------------------------ watch

    def _turn(self) -> None:
        """Sleep until something happens; handle output, deaths, faults, signals and deadlines."""
        self._wakeup.sleep(self._until_next())
        self._read(0.0)
        self._notice_ends()
        elapsed = time.monotonic() - self._began
        while self._due and self._due[0][0] <= elapsed:
            _, rank, number = self._due.pop(0)
            for process in self._processes:
                if process.rank == rank:
                    self._inject(process, number)
        for rank in self._revivals.take():
            if not any(one.rank == rank and one.poll() is None for one in self._processes):
                self._start_worker(rank, self._meeting.next_life(rank))
        while self._signals:
            self._obey(self._signals.pop(0))
        if self._explanation is not None and self._explanation.is_over:
            self._explanation.show()
            self._explanation = None
        if self._launch.deadline_s is not None and elapsed > self._launch.deadline_s:
            self._reach_deadline()
        if self._ending.status is None and (asked := self._meeting.beat()) is not None:
            say(f"{asked[1]}; the workers of this host are ended too")
            self._ending.begin(asked[0])
        self._ending.advance()

    def _until_next(self) -> float:
        is_ending = self._is_over_deadline or self._ending.status is not None
        if is_ending or self._explanation is not None or not self._wakeup.sees_all:
            return _TICK_S
        elapsed = time.monotonic() - self._began
        moments = [at for at, _, _ in self._due[:1]]
        if self._revivals:
            moments.append(self._revivals.next - self._began)
        if self._launch.deadline_s is not None:
            moments.append(self._launch.deadline_s)
        return max(0.0, min([_SLEEP_S, *(at - elapsed for at in moments)]))

    def _read(self, patience_s: float) -> None:
        if not self._pipes.get_map():
            time.sleep(patience_s)
            return
        for key, _ in self._pipes.select(patience_s):
            self._read_from(key)

    def _read_from(self, key: selectors.SelectorKey) -> bool:
        """Read from one pipe; return whether there was something."""
        rank, is_error = key.data
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # no process has the other end of the terminal any more
        if data:
            self._output.feed(rank, is_error, data)
            return True
        self._pipes.unregister(key.fileobj)
        self._output.end(rank, is_error)
        return False

    def _read_last_words(self, rank: int) -> None:
        """Show all that an ended worker has printed, before the launcher reports its end."""
        for key in [key for key in self._pipes.get_map().values() if key.data[0] == rank]:
            # More could come from processes that the worker has started, which may never end.
            for _ in range(_MOST_CHUNKS):
                if not self._read_from(key):
                    break

    def _notice_ends(self) -> None:
        for process in self._processes:
            if process.pid not in self._noted and (ended := process.poll()) is not None:
                self._noted.add(process.pid)
                self.ended.append(ended)
                self._read_last_words(ended.rank)
                if ended.status < 0 and process.has_left_others:
                    # At once, because they may keep the worker's GPU work alive.
                    process.signal(signal.SIGKILL)
                if self._segments is not None:
                    # Also after a good end: the worker may not have closed its transport.
                    self._segments.mark_dead(ended.rank)
                if ended.status != 0:
                    self._tell_others(process, ended)

    def _tell_others(self, process: Process, ended: Ended) -> None:
        self._meeting.tell_dead(ended.rank, ended.how, self._lives[ended.rank])
        if self._ending.status is not None:
            return
        self.deaths.append(ended.rank)
        cause = ", as asked" if ended.is_planned else ""
        others = "; the others go on" if self._launch.size > 1 else ""
        if self._is_revived(ended):
            others += ", and it comes back"
        say(f"{ended}{cause}{others}")
        if not self._output.shows(ended.rank) and not ended.is_planned:
            self._repeat(ended.rank)

    def _is_revived(self, ended: Ended) -> bool:
        """Whether a worker that has died comes back. It does not where the run is over or where
        nobody is left who could give it a model; and where too few are left, the run ends."""
        launch, rank = self._launch, ended.rank
        if launch.elastic is None and launch.attach is None:
            return False
        alive = [one for one in self._processes if one.poll() is None]
        if any(end.status == 0 for end in self.ended):
            self._revivals.clear()
            return False
        if not alive and not self._meeting.has_others():
            self._revivals.clear()
            return False
        if any(fault.worker == rank for fault in launch.faults.of("return")):
            return True  # at its own time
        if self._revivals.ended(rank, ended.after_s - self._started[rank]):
            return True
        gone = {one.rank for one in self._processes if one.poll() is not None}
        coming = len(self._revivals.ranks & gone)
        if launch.attach is None and len(alive) + coming < self._revivals.least:
            say(
                f"fewer than {self._revivals.least} workers are left, and none of the others comes "
                "back; the run ends"
            )
            self._ending.begin(1)
        return False

    def _inject(self, process: Process, number: int) -> None:
        if process.poll() is None:
            process.is_planned = process.is_planned or number == signal.SIGKILL
            process.signal(number)

    def _obey(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._explanation = Explanation(self._processes, Path(self._answers))
            return
        if self._ending.status is not None:
            # A second signal means that the end shall come faster.
            self._ending.hurry()
            return
        say(f"{signal_name(number)}: ending the workers")
        self._ending.begin(128 + number)
        if self._launch.hosts.count > 1:
            reason = f"node {self._launch.hosts.rank} was interrupted"
            self._meeting.end_everywhere(128 + number, reason)

    def _reach_deadline(self) -> None:
        """Show the table of who waits for what, then end the workers."""
        if not self._is_over_deadline:
            self._is_over_deadline = True
            say(f"not finished within the deadline of {self._launch.deadline_s:g} s")
            self._explanation = Explanation(self._processes, Path(self._answers))
        elif self._explanation is None:
            self._ending.begin(OVER_DEADLINE)

    # ------------------------------------------------------------------ end

    def _sweep(self) -> None:
        """Read last lines, and give processes that ended workers have started a moment to end."""
        until = time.monotonic() + _LEFTOVER_S
        while time.monotonic() < until and not self._signals:
            if not self._pipes.get_map() and not any(p.has_left_others for p in self._processes):
                break
            self._read(_TICK_S)
        self._ending.kill_leftovers()
        for key in list(self._pipes.get_map().values()):
            rank, is_error = key.data
            self._output.end(rank, is_error)

    def _conclude(self) -> int:
        """Return the exit code. Say at the very end, where a user looks first, what went wrong."""
        if self._ending.status is not None:
            return self._ending.status
        is_elastic = self._launch.elastic is not None or self._launch.attach is not None
        # Deaths and errors on the way are what an elastic run is for; its end counts.
        if is_elastic and any(end.status == 0 for end in self.ended):
            return 0
        tolerates = self._launch.tolerates_deaths
        for death in (end for end in self.ended if end.status < 0 and not end.is_planned):
            accepted = "" if tolerates else "; with --tolerate-deaths that is no failure of the run"
            say(f"{death}{accepted}")
        failed = failures(self.ended, tolerates_deaths=tolerates)
        first = next((end for end in failed if end.status > 0), None)
        if first is not None:
            has_spoken = any(self._output.last_words(first.rank))
            say(f"the first failure: {first}{', saying' if has_spoken else ' without a word'}")
            self._repeat(first.rank)
        if not failed and self._launch.hosts.count > 1:
            return 0
        return exit_code(self.ended, tolerates_deaths=tolerates)

    def _repeat(self, rank: int) -> None:
        for line in self._output.last_words(rank):
            put(sys.stderr, f"[{rank}] {line}\n")

    def _close_store(self) -> None:
        if (refusals := self._meeting.close()) is not None:
            say(refusals)

    def _close(self) -> None:
        for process in self._processes:
            process.close()
        self._wakeup.close()
        self._pipes.close()
        self._output.close()
        if self._segments is not None:
            self._segments.close()

    @contextmanager
    def _handled_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            # Python delivers signals only to the main thread; here the caller handles Ctrl-C.
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)
            self._wakeup.call()

        before = {number: signal.signal(number, note) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
