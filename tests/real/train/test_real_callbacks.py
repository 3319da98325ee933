"""What real runs tell: a user's own loop in its process, and `train` in that of its caller."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer.observe.callbacks import Callbacks
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.train.progress import RunListener, TrainingProgress
from gossamer.real.train.train import train
from join_cases import batch, loss_of, net
from launching import WAIT, script
from programs import PROGRAMS, answers_of

STEPS = 12
METHODS = {
    "all_reduce": 2, "pull_gossip": 3, "push_gossip": 3, "ad_psgd": 2, "d_psgd": 3,
    "downpour": 2, "ssp": 2, "backup_workers:backups=1": 3,
}  # fmt: skip
GROUPS = [
    *(("case_of_hearing", size, method) for method, size in METHODS.items()),
    ("case_of_silence", 2, "all_reduce"),
    ("case_of_a_death", 3, "pull_gossip"),
    ("case_of_asking", 2, "push_gossip"),
    ("case_of_asking", 2, "downpour"),
    ("case_of_errors", 2, "push_gossip"),
    ("case_of_a_failing_step", 2, "pull_gossip"),
]


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """All groups in one program that imports torch once."""
    program = PROGRAMS / "callback_groups.py"
    found = answers_of(program, json.dumps(GROUPS), places=tmp_path_factory)
    return {(case, method): group for (case, _, method), group in zip(GROUPS, found, strict=True)}


def answers(groups: dict, case: str, method: str, lost: int | None = None) -> list[dict[str, Any]]:
    """What the workers returned, after all but the lost one ended well."""
    group = groups[case, method]
    for rank, end in enumerate(group["ends"]):
        assert end == (-signal.SIGKILL if rank == lost else 0), group["written"]
    return [answer for answer in group["answers"] if answer is not None]


# ---------------------------------------------------------------------- a user's own loop


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_hears_its_steps_and_one_end(groups: dict, method: str) -> None:
    """Steps count from 1, each once; the summary counts what was told; nobody has died."""
    for rank, answer in enumerate(answers(groups, "case_of_hearing", method)):
        assert answer["step"] == [[rank, step] for step in range(1, STEPS + 1)]
        ((summary,),) = answer["end"]
        assert summary["steps"] == STEPS
        assert (summary["rank"], summary["workers"]) == (rank, METHODS[method])
        assert summary["method"].startswith(method.partition(":")[0])
        assert summary["dropped_gradients"] == len(answer["drop"])
        assert answer["membership"] == []
        values = [staleness for _, staleness in answer["staleness"]]
        if method in ("pull_gossip", "push_gossip", "ad_psgd", "d_psgd"):
            assert values == [0] * STEPS  # each gradient is applied before the next is begun
        # Absent where nothing is measured, as at the worker beside a server in another process.
        assert summary["max_staleness"] == max(values, default=None)
        mean = pytest.approx(sum(values) / len(values)) if values else None
        assert summary["mean_staleness"] == mean


@pytest.mark.parametrize("method", ["pull_gossip", "push_gossip", "ad_psgd", "d_psgd"])
def test_exchanges_name_who_got_whose_model(groups: dict, method: str) -> None:
    """Another worker's, always; told by whoever got it, but an average by the one who asked."""
    found = answers(groups, "case_of_hearing", method)
    for rank, answer in enumerate(found):
        assert all(worker != peer and age is None for worker, peer, age in answer["exchange"])
        if method != "ad_psgd":
            assert {worker for worker, _, _ in answer["exchange"]} <= {rank}
    told = Counter((who, whose) for answer in found for who, whose, _ in answer["exchange"])
    assert told.total() > 0
    if method == "pull_gossip":
        # One in each step but the first, and the one before the gradient that nobody gave.
        assert [len(answer["exchange"]) for answer in found] == [STEPS] * 3
    if method == "ad_psgd":
        assert told[0, 1] == told[1, 0]


def test_all_reduce_has_no_peer_and_tells_no_exchange(groups: dict) -> None:
    for answer in answers(groups, "case_of_hearing", "all_reduce"):
        assert answer["exchange"] == []


def test_the_process_of_a_server_tells_of_stale_and_dropped_gradients(groups: dict) -> None:
    """By the number of the server's end; every gradient of every worker once."""
    with_server, without = answers(groups, "case_of_hearing", "downpour")
    assert [end for end, _ in with_server["staleness"]] == [2] * (2 * STEPS)
    assert without["staleness"] == []
    backups = answers(groups, "case_of_hearing", "backup_workers:backups=1")
    assert {end for answer in backups for (end,) in answer["drop"]} <= {3}
    assert not any(answer["drop"] for answer in backups[1:])


def test_listening_changes_no_bit(groups: dict) -> None:
    with_callbacks = answers(groups, "case_of_hearing", "all_reduce")
    without = answers(groups, "case_of_silence", "all_reduce")
    assert [one["digest"] for one in with_callbacks] == [one["digest"] for one in without]


def test_a_death_is_told_once_to_everyone_who_lives(groups: dict) -> None:
    for answer in answers(groups, "case_of_a_death", "pull_gossip", lost=1):
        assert answer == {"membership": [[1, False]], "living": 2}


@pytest.mark.parametrize("method", ["push_gossip", "downpour"])
def test_a_callback_may_ask_for_the_output_model(groups: dict, method: str) -> None:
    """It waits for the thread that receives, which never waits for it."""
    for answer in answers(groups, "case_of_asking", method):
        assert answer["steps"] == STEPS


def test_an_error_in_a_callback_ends_the_loop(groups: dict) -> None:
    """From the loop's thread as itself; from another as the cause of a failed run."""
    for answer in answers(groups, "case_of_a_failing_step", "pull_gossip"):
        assert answer == {"said": "three is enough", "steps": 2, "ends": 0}
    failed = [answer for answer in answers(groups, "case_of_errors", "push_gossip") if answer]
    assert failed
    for answer in failed:
        assert "no exchange rate" in answer["said"]
        assert answer["cause"] == "LookupError"


class Heard(gossamer.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        assert seconds >= 0
        self.events.append(("step", worker, step, loss))

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        assert seconds >= 0
        self.events.append(("membership", worker, is_alive))

    def on_evaluation(self, row: dict[str, Any]) -> None:
        self.events.append(("evaluation", row))

    def on_checkpoint(self, place: str, seconds: float) -> None:
        self.events.append(("checkpoint", Path(place).name))

    def on_end(self, summary: dict[str, Any]) -> None:
        self.events.append(("end", summary["steps"]))

    def told(self, kind: str) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] == kind]


def test_a_lone_worker_hears_steps_and_the_end() -> None:
    """Steps inside of accumulate() are none; a loop that raises has no end."""
    model = net(0)
    for is_broken in (False, True):
        heard = Heard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = gossamer.join(model, optimizer, callbacks=[heard])
        with contextlib.suppress(KeyError), worker:
            for step in range(4):
                loss_of(model, *batch(0, step)).backward()
                with worker.accumulate() if step % 2 == 0 else contextlib.nullcontext():
                    worker.step()
            if is_broken:
                raise KeyError
        steps = [("step", 0, 1, None), ("step", 0, 2, None)]
        assert heard.events == (steps if is_broken else [*steps, ("end", 2)])


def test_nothing_is_told_after_the_end() -> None:
    heard = Heard()
    callbacks = Callbacks([heard])
    callbacks.computed(0, (0, 1), 1, 8, None)
    callbacks.ended({"steps": 1})
    callbacks.lost(1, 2)
    assert heard.events == [("step", 0, 1, None), ("end", 1)]


# ---------------------------------------------------------------------- train


class Lines:
    """A diary whose lines are all there at the first look."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self._entries = list(entries)

    def new(self) -> Iterator[dict[str, Any]]:
        while self._entries:
            yield self._entries.pop(0)


def progress(steps: int) -> dict[str, Any]:
    return {"kind": "progress", "steps": steps, "seconds": 0.5, "training_loss": 1.5,
            "samples": 16 * steps}  # fmt: skip


def test_what_workers_write_down_is_told(tmp_path: Path) -> None:
    """Progress as steps, rows as evaluations, then deaths, and checkpoints that are whole."""
    for number in ("20", "100"):
        (tmp_path / "checkpoint" / number).mkdir(parents=True)
    (tmp_path / "checkpoint" / "20" / "manifest.json").touch()
    heard, deaths = Heard(), []
    row = {"kind": "row", "seconds": 1.0, "epochs": 0.5, "samples": 48}
    diaries = [Lines(progress(3), row), Lines(progress(4))]
    follower = TrainingProgress(tmp_path, diaries, RunListener(callbacks=[heard]), deaths=deaths)
    follower.catch_up()
    deaths.append(1)
    (tmp_path / "checkpoint" / "100" / "manifest.json").touch()
    follower.catch_up()
    follower.catch_up()
    assert heard.events == [
        ("step", 0, 3, 1.5),
        ("evaluation", {"seconds": 1.0, "epochs": 0.5, "samples": 48}),
        ("step", 1, 4, 1.5),
        ("membership", 1, False),
        ("checkpoint", "100"),
    ]


def test_after_an_error_nothing_is_called_and_everything_is_noted(tmp_path: Path) -> None:
    """The run is ended, the books stay complete, and leaving `with` raises the error."""

    class Broken(Heard):
        def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
            super().on_step(worker, step, seconds, loss)
            raise LookupError("a step too far")

    broken, ended = Broken(), []
    diaries = [Lines(progress(3), {"kind": "books", "steps": 5}), Lines(progress(4))]
    follower = TrainingProgress(
        tmp_path, diaries, RunListener(callbacks=[broken]), on_failure=lambda: ended.append(True)
    )
    with pytest.raises(LookupError, match="a step too far"), follower:
        follower.catch_up()
    assert broken.events == [("step", 0, 3, 1.5)]
    assert ended == [True]
    assert follower.latest.keys() == {0, 1}
    assert follower.books == {0: {"steps": 5}}


def test_the_launcher_counts_deaths_and_not_those_whom_it_ends(tmp_path: Path) -> None:
    """A worker that fails is one; those that are ended because a callback failed are none."""
    failing = script(tmp_path, "sys.exit(3 if rank == 1 else 0)")
    launcher = Launcher(Launch(failing, 2, transport="torch", tolerates_deaths=True))
    launcher.run()
    assert launcher.deaths == [1]
    waiting = Launcher(Launch(script(tmp_path, WAIT), 2, transport="torch", grace_s=1.0))
    waiting.end()
    assert waiting.run() == 128 + signal.SIGINT
    assert waiting.deaths == []


def test_train_tells_its_caller(tmp_path: Path) -> None:
    """The rows are the history, the last checkpoint is told, and the end comes last."""
    heard = Heard()
    result = train(
        "digits-logistic", "all_reduce", 2, epochs=2, evaluations=3, folder=tmp_path,
        checkpoint_every="40steps", callbacks=[heard],
    )  # fmt: skip
    assert [row for _, row in heard.told("evaluation")] == result.history
    assert {worker for _, worker, *_ in heard.told("step")} == {0, 1}
    for worker in (0, 1):
        numbers = [step for _, who, step, _ in heard.told("step") if who == worker]
        assert numbers == sorted(numbers)
        assert numbers[-1] <= result.steps_by_worker[str(worker)]
    newest = max((tmp_path / "checkpoint").iterdir(), key=lambda place: int(place.name))
    assert heard.told("checkpoint")[-1] == ("checkpoint", newest.name)
    assert heard.told("membership") == []
    assert heard.events[-1] == ("end", result.steps)


def test_every_row_of_a_real_run_is_measured_at_its_moment() -> None:
    """Workers that never exchange anything are apart in every row after the first steps, and a row
    has the samples of its epochs, not those that the workers last reported."""
    result = train("digits-mlp", "ensemble", 2, epochs=20, learning_rate=0.05)
    *before, last = result.history
    later = [row for row in before if row["epochs"] > 0.5]
    assert later
    assert all(row["consensus_distance"] > 0.01 for row in (*later, last))
    assert [row["samples"] for row in result.history] == [
        round(row["epochs"] * 1437) for row in result.history
    ]
    assert last["samples"] == result.samples


def test_an_error_in_a_callback_ends_the_training(tmp_path: Path) -> None:
    """The caller gets that very error, long before the run would have ended."""

    class Broken(Heard):
        def on_evaluation(self, row: dict[str, Any]) -> None:
            raise LookupError("no room on the paper")

    broken = Broken()
    with pytest.raises(LookupError, match="no room on the paper"):
        train("digits-logistic", "pull_gossip", 2, epochs=100_000, callbacks=[broken])
    assert broken.told("end") == []
