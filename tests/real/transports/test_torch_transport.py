"""The torch.distributed transport keeps the laws of every transport, under both launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import ConfigurationError, Error
from gossamer.real.transports.buffers import BufferPool
from gossamer.real.transports.conformance.group import SCENARIOS, Scenario
from gossamer.real.transports.torch import TorchTransport
from gossamer.real.transports.torch.departures import Departure, DepartureLog
from gossamer.real.transports.torch.reduce_state import contributors_of, parts_of
from gossamer.real.transports.torch.rendezvous import Meeting
from gossamer.real.transports.transport import StopToken
from programs import LIMIT_S, PROGRAMS, answers_of
from tiers import looks_at, only, wide

TOGETHER = [law.name for law in SCENARIOS.values() if not law.apart]
APART = [law for law in SCENARIOS.values() if law.apart]
MESSAGES = {"GOSSAMER_REDUCTION": "messages"}
WORDS = ("reduce", "survived", "gone")
OF_SUMS = [law for law in SCENARIOS.values() if any(word in law.name for word in WORDS)]
"""What sums have to do with."""
FEW_APART = ("noticed", "middle", "inside_guard", "while_others_wait", "gone", "in_an_all_reduce")
FEW_OF_SUMS = ("noticed", "in_order_of_rank", "gone")


def few(laws: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """Those that every `make test` looks at; over shared memory it looks at all of them."""
    return [law for law in laws if any(word in law.name for word in words)]


def shared(size: int) -> dict[str, str]:
    """What makes their sums be taken in memory: their launcher says that they are on one host."""
    return {"GOSSAMER_REDUCTION": "auto", "GOSSAMER_LOCAL_SIZE": str(size)}


def alone(law: Scenario) -> tuple[int, list[str], dict[str, str]]:
    return (law.size, [law.name], MESSAGES)


def in_memory(law: Scenario) -> tuple[int, list[str], dict[str, str]]:
    return (law.size, [law.name], shared(law.size))


GROUPS = [(3, TOGETHER, MESSAGES), *map(alone, APART), *map(in_memory, OF_SUMS)]
WIDE = [
    *(alone(law) for law in APART if law not in few(APART, FEW_APART)),
    *(in_memory(law) for law in OF_SUMS if law not in few(OF_SUMS, FEW_OF_SUMS)),
]
TOGETHER_OR_FEW = [law for law in SCENARIOS.values() if alone(law) not in WIDE]


def run(command: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
    """A program in a process group of its own, of which nothing is left afterwards."""
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    try:
        output, _ = running.communicate(timeout=LIMIT_S)
    finally:
        try:
            os.killpg(running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the usual case: everything has ended by itself
    return running.returncode, output


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Every group has been run, by one program; what its processes said, by group."""
    groups = looks_at(request, WIDE, GROUPS)
    program = PROGRAMS / "torch_groups.py"
    found = answers_of(program, json.dumps(groups), places=tmp_path_factory)
    return {json.dumps(group): answer for group, answer in zip(groups, found, strict=True)}


def check(law: Scenario, answer: Any) -> None:
    said = "\n".join(answer["written"])
    for rank in range(law.size):
        if rank in law.victims:
            assert answer["ends"][rank] == -signal.SIGKILL, said
        else:
            assert f"passed {law.name}\n" in answer["written"][rank], said
            assert answer["ends"][rank] == 0, said


@pytest.mark.parametrize("law", only(TOGETHER_OR_FEW, SCENARIOS.values()), ids=lambda law: law.name)
def test_torch_transport_keeps_the_law(law: Scenario, answers: dict[str, Any]) -> None:
    """Every survivor passed the scenario and ended well; victims, and only they, were killed."""
    group = next(group for group in GROUPS if law.name in group[1])
    check(law, answers[json.dumps(group)])


@pytest.mark.parametrize("law", only(few(OF_SUMS, FEW_OF_SUMS), OF_SUMS), ids=lambda law: law.name)
def test_sums_in_memory_that_is_shared_keep_the_law(law: Scenario, answers: dict[str, Any]) -> None:
    """Deaths, farewells and stops of processes whom Gloo connects reach the sums beside it."""
    check(law, answers[json.dumps(in_memory(law))])


@wide
def test_torchrun_starts_it_with_its_own_store(tmp_path: Path) -> None:
    """`from_environment` needs nothing but what torchrun sets."""
    laws = ["scenario_a_read_sees_what_the_owner_wrote", "scenario_the_store_agrees_and_counts"]
    code, output = run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "gossamer.real.transports.conformance", "--member",
         "--transport", "gossamer.real.transports.torch:TorchTransport", *laws],
        {},
    )  # fmt: skip
    assert code == 0, output
    # The two write at once: the ends of their lines may come behind both.
    assert [output.count(f"passed {law}") for law in laws] == [2, 2]


def test_a_missing_environment_is_named() -> None:
    """Started by hand the transport says which variable it wants and who sets it."""
    with pytest.raises(ConfigurationError, match=r"RANK.*gossamer run"):
        Meeting.from_environment({})


def test_both_launchers_are_understood() -> None:
    """Ours wins where both are there: it was started inside."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Meeting.from_environment(torchrun) == Meeting(1, 4, "a", 7, "gossamer/2")
    ours = {"GOSSAMER_STORE": "[::1]:9", "GOSSAMER_RANK": "0", "GOSSAMER_SIZE": "2"}
    with pytest.raises(ConfigurationError, match=r"GOSSAMER_SECRET is not.*`gossamer run`"):
        Meeting.from_environment(torchrun | ours)
    ours["GOSSAMER_SECRET"] = "nobody else knows"
    meeting = Meeting.from_environment(torchrun | ours)
    secret = b"nobody else knows"
    assert meeting == Meeting(0, 2, "::1", 9, has_notices=True, secret=secret)
    assert "nobody" not in repr(meeting)
    near = torchrun | {"LOCAL_WORLD_SIZE": "4"}
    assert Meeting.from_environment(near).neighbours == 4
    assert Meeting.from_environment(near | ours | {"GOSSAMER_LOCAL_SIZE": "2"}).neighbours == 2


def test_an_unknown_reduction_is_refused_with_the_nearest_name() -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigurationError, match="messages"):
        TorchTransport(Meeting(0, 2, "127.0.0.1", 1), "mesages")


# --- the parts, without processes


class Shelf:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def agree(self, key: str, value: str) -> str:
        return self.values.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError

    def get(self, key: str) -> str | None:
        return self.values.get(key)


def test_departures_are_learnt_in_one_order_by_everybody() -> None:
    """Whoever noticed what first, all logs end up equal, and each departure is applied once."""
    shelf = Shelf()
    heard: list[list[tuple[int, int]]] = [[], []]

    def listener(mine: list[tuple[int, int]]) -> Any:
        return lambda epoch, departure: mine.append((epoch, departure.process))

    first, second = (DepartureLog(shelf, listener(mine), 4, StopToken()) for mine in heard)
    first.died(3)
    second.died(2)
    second.died(3)
    first.catch_up(2)
    first.died(2)
    assert heard == [[(1, 3), (2, 2)], [(1, 3), (2, 2)]]
    assert first.known == second.known


class BrokenShelf(Shelf):
    """A store whose host has been killed."""

    def agree(self, key: str, value: str) -> str:
        raise RuntimeError("connection reset by peer")

    def get(self, key: str) -> str | None:
        raise RuntimeError("connection reset by peer")


def heard_by(
    heard: list[tuple[int, bool]], shelf: Shelf, stop: StopToken | None = None
) -> DepartureLog:
    """The list of one of four processes."""
    return DepartureLog(
        shelf, lambda epoch, gone: heard.append((gone.process, gone.is_dead)), 4,
        stop or StopToken(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "[9, true, false, {}, false, 0, false]",
        "[1, 1, false, {}, false, 0, false]",
        '[1, true, true, {"0,1": "x"}, false, 0, false]',
        "[2",
        "{}",
        "[1, true, false, {}]",
        "[1, false, false, {}, false, -1, true]",
        "[1, false, false, {}, false, 1, 1]",
    ],
)
def test_a_forged_departure_is_one_sentence_and_changes_nothing(line: str) -> None:
    """Whoever waits next raises it; nobody is taken for dead, also not one who is none of them."""
    shelf, stop = Shelf(), StopToken()
    heard: list[tuple[int, bool]] = []
    shelf.values["departures/0"] = line
    log = heard_by(heard, shelf, stop)
    log.catch_up(1)
    log.died(2)
    assert heard == []
    with pytest.raises(
        Error, match=r"the store holds .* under 'departures/0' where one of 4 workers"
    ):
        stop.check()


def test_a_farewell_is_heard_without_the_store() -> None:
    """torchrun was killed, and its store with it: nobody may wait for one whom it would name."""
    heard: list[tuple[int, bool]] = []
    log = heard_by(heard, BrokenShelf())
    log.left(1, epoch=1)
    log.left(1, epoch=1)
    assert heard == [(1, True)]


def test_a_farewell_that_the_list_has_is_no_death() -> None:
    shelf = Shelf()
    heard: list[tuple[int, bool]] = []
    epoch = heard_by([], shelf).leaves(1, is_clean=True, finished={})
    log = heard_by(heard, shelf)
    log.left(1, epoch)
    assert heard == [(1, False)]


def test_an_old_death_says_nothing_of_a_new_life() -> None:
    """Whoever notices late that a connection broke finds that its process has come back."""
    shelf, heard = Shelf(), list[tuple[int, bool]]()
    slow = heard_by(heard, shelf)
    comer = heard_by([], shelf)
    comer.comes(1, life=1)
    slow.died(1, life=0)
    slow.catch_up()
    slow.died(1, life=0)
    assert heard == [(1, True), (1, False)]  # the newcomer itself has noticed the death
    assert slow.members.live == frozenset(range(4))
    slow.died(1)
    comer.catch_up()
    assert comer.members.dead == {1}
    assert [line.life for line in comer.known] == [0, 1, 1]


def test_who_left_stays_in_the_sums_it_finished() -> None:
    """A farewell excludes only from sums beyond it, unless a death makes them begin again."""
    members = (0, 1, 2, 3)
    left = Departure(1, is_dead=False, is_clean=True, finished={"5": 7})
    assert contributors_of(5, members, 6, [left]) == ((0, 1, 2, 3), 0)
    assert contributors_of(5, members, 7, [left]) == ((0, 2, 3), 1)
    dead = Departure(3, is_dead=True)
    assert contributors_of(5, members, 6, [left, dead]) == ((0, 2), 2)
    assert contributors_of(5, members, 6, [dead, left]) == ((0, 1, 2), 1)


@pytest.mark.parametrize("length", [1, 3, 4096, 4097, 100_000, 100_001])
@pytest.mark.parametrize("members", [(0, 1), (0, 2, 5), (4,)])
def test_the_parts_of_a_sum_cover_it_once(length: int, members: tuple[int, ...]) -> None:
    """Every element has exactly one owner, who is a member."""
    parts = parts_of(length, 4, members, turn=11)
    assert set(parts) <= set(members)
    covered = [i for part in parts.values() for i in range(part.start, part.stop)]
    assert sorted(covered) == list(range(length))


@pytest.mark.parametrize("added", [-2, -1, 0])
def test_memory_is_used_again_only_when_nobody_holds_a_view(
    added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view or an array of a tensor keeps its block, the tensor itself gone or not; whatever an
    interpreter adds to the references by counting them, which differs by version."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda block: count(block) + added)
    memory = BufferPool()
    tensor = memory.take(1 << 20)
    address = tensor.data_ptr()
    view = tensor[5:]
    array = view.numpy()
    del tensor, view
    assert memory.take(1 << 20).data_ptr() != address
    del array
    assert address in {memory.take(1 << 20).data_ptr() for _ in range(3)}
