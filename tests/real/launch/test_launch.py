"""The launcher: what workers print, how they end, and that none of them outlives it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gossamer.config.faults import Fault, parse_faults
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.launch import launcher
from gossamer.real.launch.hosts import HostMeeting
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.launch.process import Ended, exit_code
from launching import WAIT, launched, script, wait_until

# ---------------------------------------------------------------------- how workers are started


def test_workers_are_of_the_launchers_session_in_groups_of_their_own(tmp_path: Path) -> None:
    """Of one session, so that they can give way to each other; apart from the terminal's group."""
    text = "open(f'{here}/of-{rank}', 'w').write(f'{os.getsid(0)} {os.getpgid(0)} {os.getpid()}')"
    launched(tmp_path, text)
    for rank in range(2):
        session, group, pid = map(int, (tmp_path / f"of-{rank}").read_text().split())
        assert session == os.getsid(0)
        assert group == pid


def test_where_the_launcher_has_a_terminal_its_workers_have_one_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts ask for it and die without; what they print comes through as it is, and nobody waits
    for what they could read."""
    monkeypatch.setattr(os, "isatty", lambda file: True)
    monkeypatch.setenv("COLUMNS", "97")
    monkeypatch.setenv("LINES", "31")
    text = (
        "import subprocess; size = os.get_terminal_size();"
        "print(size.columns, size.lines, repr(sys.stdin.read()));"
        "print(subprocess.run(['stty', 'size'], capture_output=True, text=True).stdout.strip());"
        "print('x' * 20_000, end=''); print('\\x1b[1mend')"
    )
    launched(tmp_path, text)
    seen = capsys.readouterr().out.splitlines()
    for rank in range(2):
        mine = [line for line in seen if line.startswith(f"[{rank}] ")]
        assert mine[:2] == [f"[{rank}] 97 31 ''", f"[{rank}] 31 97"]
        assert mine[2] == f"[{rank}] " + "x" * 20_000 + "\x1b[1mend"


class Counting(Launcher):
    """How often it looked around."""

    turns = 0

    def _turn(self) -> None:
        self.turns += 1
        super()._turn()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the launcher has to look")
def test_a_launcher_with_nothing_to_do_sleeps(tmp_path: Path) -> None:
    """Every look takes a core from the workers."""
    text = "import time; began = time.monotonic(); time.sleep(1); print(time.monotonic() - began)"
    launcher = Counting(Launch(script(tmp_path, text), 1, transport="torch"))
    assert launcher.run() == 0
    assert launcher.turns < 4 * launcher.ended[0].after_s + 10


def test_without_news_of_ends_the_launcher_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    status, launcher = launched(tmp_path, "print('here', rank)")
    assert status == 0
    assert [end.status for end in launcher.ended] == [0, 0]
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] here 0", "[1] here 1"]


# ---------------------------------------------------------------------- what workers print


def test_lines_carry_the_rank_and_stay_on_their_stream(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A last line without an end is shown too."""
    text = "print('out', rank); print('err', rank, file=sys.stderr); sys.stdout.write('end')"
    status, _ = launched(tmp_path, text)
    said = capfd.readouterr()
    assert status == 0
    assert sorted(said.out.splitlines()) == ["[0] end", "[0] out 0", "[1] end", "[1] out 1"]
    assert sorted(said.err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_lines_of_different_workers_are_never_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However large they are and in however many pieces they come."""
    text = "for n in range(30):\n    os.write(1, b'%d' % rank * 3000)\n    os.write(1, b'\\n')"
    launched(tmp_path, text, workers=3)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[{r}] {str(r) * 3000}" for r in range(3) for _ in range(30))


def test_rank0_shows_worker_zero_alone_and_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(tmp_path, "print('I am', rank)", output="rank0")
    assert capsys.readouterr().out == "I am 0\n"


def test_folder_keeps_every_stream_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte, and shows nothing; the table of explanations leaves no trace there."""
    folder = tmp_path / "run"
    folder.mkdir()
    text = "sys.stdout.write(f'a\\rb{rank}'); print('e', file=sys.stderr)"
    launched(tmp_path, text, output="folder", folder=folder)
    assert capsys.readouterr().out == ""
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "worker-0.out": b"a\rb0", "worker-0.err": b"e\n", "worker-1.out": b"a\rb1",
        "worker-1.err": b"e\n",
    }  # fmt: skip


def test_workers_are_told_who_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The variables, and none that another launcher had set."""
    text = (
        "import json; print(json.dumps({k: v for k, v in os.environ.items() if 'GOSSAMER' in k}))"
    )
    plan = FaultPlan(parse_faults(slow=["1=4"], pause=["0@50s+0.5s"], kill=["0@1m"]))
    launched(tmp_path, text, method="ad_psgd", seed=7, faults=plan, environment={"X": "1"})
    said = sorted(line.partition(" ")[2] for line in capsys.readouterr().out.splitlines())
    secrets: set[str] = set()
    for rank, line in enumerate(sorted(said, key=lambda line: json.loads(line)["GOSSAMER_RANK"])):
        told = json.loads(line)
        host, _, port = told.pop("GOSSAMER_STORE").rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert json.loads(told.pop("GOSSAMER_FAULTS")) == {
            "faults": ["kill 0@60s", "pause 0@50s+0.5s", "slow 1=4"],
            "bandwidth": float("inf"), "latency": 0.0,
        }  # fmt: skip
        assert told.pop("GOSSAMER_EXPLAIN_DIR")
        secrets.add(told.pop("GOSSAMER_SECRET"))
        assert told == {
            "GOSSAMER_RANK": str(rank), "GOSSAMER_SIZE": "2", "GOSSAMER_LOCAL_RANK": str(rank),
            "GOSSAMER_LOCAL_SIZE": "2", "GOSSAMER_TRANSPORT": "torch",
            "GOSSAMER_METHOD": "ad_psgd", "GOSSAMER_SEED": "7",
        }  # fmt: skip
    (secret,) = secrets
    assert len(secret) == 64


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("statuses", "expected", "tolerant"),
    [
        ([0, 0], 0, 0),
        ([0, 5, 7], 5, 5),
        ([-9, 0], 1, 0),
        ([-9, 5], 1, 5),
        (["kill", 0], 0, 0),
        (["kill", 4], 4, 4),
        (["kill", "kill"], 1, 1),
        ([-9, -15], 1, 1),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(
    statuses: list[int | str], expected: int, tolerant: int
) -> None:
    """Deaths on purpose are none; deaths by signals may be tolerated; somebody must finish."""
    ended = [
        Ended(rank, -9, rank, is_planned=True) if status == "kill" else Ended(rank, status, rank)
        for rank, status in enumerate(statuses)
    ]
    assert exit_code(ended, tolerates_deaths=False) == expected
    assert exit_code(ended, tolerates_deaths=True) == tolerant


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """What the launcher writes into the store about deaths."""
    deaths: dict[int, str] = {}
    monkeypatch.setattr(
        HostMeeting, "tell_dead", lambda _, rank, how, life: deaths.update({rank: how})
    )
    return deaths


def test_a_failure_is_told_to_the_others_and_shown_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: dict[int, str]
) -> None:
    """The others go on; the exit code is the failing one's."""
    text = (
        "if rank == 1:\n"
        "    try:\n        raise ValueError('bad thing')\n"
        "    except ValueError:\n        import traceback; traceback.print_exc(); sys.exit(4)\n"
        "import time\n"
        "while os.path.exists(f'{here}/pid-1') and os.path.exists('/proc/' + "
        "open(f'{here}/pid-1').read()): time.sleep(0.01)\n"
        "print('survived')"
    )
    status, _ = launched(tmp_path, text)
    said = capsys.readouterr()
    assert status == 4
    assert "[0] survived" in said.out
    lines = said.err.splitlines()
    assert lines.count("[1] ValueError: bad thing") == 2
    assert lines[-1] == "[1] ValueError: bad thing"
    assert sum("worker 1 ended with exit code 4" in line for line in lines) == 2
    assert told == {1: "ended with exit code 4"}


def test_a_death_on_purpose_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: dict[int, str]
) -> None:
    """And is told to the others as any death is."""
    text = f"if rank == 1:\n    {WAIT}"
    status, launcher = launched(tmp_path, text, faults=FaultPlan((Fault("kill", 0.2, worker=1),)))
    assert status == 0
    assert "worker 1 was killed by SIGKILL" in capsys.readouterr().err
    assert told == {1: "was killed by SIGKILL"}
    ends = {(end.rank, end.status, end.is_planned) for end in launcher.ended}
    assert ends == {(0, 0, False), (1, -9, True)}


@pytest.mark.parametrize(("tolerates", "expected"), [(False, 1), (True, 0)])
def test_a_death_from_outside_fails_the_run_unless_it_is_tolerated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerates: bool, expected: int
) -> None:
    """One sentence says who died of what, and when; the others have gone on."""
    text = f"if rank == 1:\n    os.kill(os.getpid(), 9)\n    {WAIT}\nprint('done')"
    status, _ = launched(tmp_path, text, tolerates_deaths=tolerates)
    said = capsys.readouterr()
    assert status == expected
    assert "[0] done" in said.out
    assert "worker 1 was killed by SIGKILL after " in said.err.splitlines()[-1]


def test_a_pause_stops_a_worker_and_wakes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one sees it stand still, and it ends well afterwards."""
    text = (
        "import time\n"
        "while rank and not os.path.exists(f'{here}/seen'): time.sleep(0.01)\n"
        "while not rank and not os.path.exists(f'{here}/pid-1'): time.sleep(0.01)\n"
        "def state():\n"
        "    pid = open(f'{here}/pid-1').read()\n"
        "    return open(f'/proc/{pid}/stat').read().split()[2]\n"
        "while not rank and state() != 'T': time.sleep(0.01)\n"
        "open(f'{here}/seen', 'w').close()\n"
    )
    # On a busy machine the first pause may be over before the other one looks.
    plan = FaultPlan(tuple(Fault("pause", 0.5 + 2 * n, 1.0, worker=1) for n in range(50)))
    status, launcher = launched(tmp_path, text, faults=plan)
    assert status == 0
    assert launcher.ended[1].rank == 1
    assert launcher.ended[1].after_s >= 1.5


def test_what_a_dead_worker_has_started_dies_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where a signal killed it, at the end of the run where it ended by itself."""
    monkeypatch.setattr(launcher, "_LEFTOVER_S", 0.1)
    text = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "open(f'{here}/pid-child-{rank}', 'w').write(str(child.pid))\n"
        "if rank: os.kill(os.getpid(), 9)"
    )
    status, _ = launched(tmp_path, text, tolerates_deaths=True)
    assert status == 0
    assert len(list(tmp_path.glob("pid-child-*"))) == 2


def test_an_unknown_program_is_one_sentence_of_each_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Launcher(Launch([str(tmp_path / "no-such-program")], 1, transport="torch"))
    assert launcher.run() == 127
    assert "no-such-program cannot be started: No such file" in capsys.readouterr().err


def test_the_launcher_can_run_again_and_leaves_no_open_files(tmp_path: Path) -> None:
    """Pipes, pids and folders are given back; only threads of the store may keep some."""
    launched(tmp_path, "pass")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        # Nothing is kept of it: a launcher that is held holds its store.
        assert launched(tmp_path, "pass")[0] == 0
    # A store's own sockets are closed by its threads, a little later.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2)
