"""The shipped contract: a method that breaks one promise of its row is found out, by that promise.

That the methods of the table keep all of theirs is in `test_every_method.py`, by the same laws.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from gossamer.contract.laws import LAWS, check
from gossamer.contract.outer_laws import OUTER_LAWS
from gossamer.errors import ConfigurationError, PeerLost
from gossamer.methods import METHODS, Method, MethodSpec, parse_method
from gossamer.methods.method import method
from gossamer.precision import threads_of
from gossamer.replica import Replica
from gossamer.worker import Worker

ROW: dict[str, Any] = {
    "keeps_mean": True, "waits_for": "nobody", "models_per_step": 0.0, "staleness": "0",
}  # fmt: skip


@method(**ROW)
async def honest(w: Worker, x: Replica) -> None:
    """Workers that never meet, as the row says."""
    for _ in w.steps():
        x.descend_(await w.gradient(x))


@method(**ROW)
async def thief(w: Worker, x: Replica) -> None:
    """Takes from nobody what it adds."""
    for _ in w.steps():
        x.add_(0.01 * x.snapshot())
        x.descend_(await w.gradient(x))


@method(**ROW)
async def talker(w: Worker, x: Replica) -> None:
    """Reads a peer, of which the row knows nothing."""
    for _ in w.steps():
        if w.peers:
            try:
                await w.read(w.rng.choice(w.peers))
            except PeerLost:
                pass
        x.descend_(await w.gradient(x))


@method(**ROW)
async def waiter(w: Worker, x: Replica) -> None:
    """Waits for everyone, though the row says for nobody."""
    for _ in w.steps():
        x.descend_(await w.all_reduce(await w.gradient(x)))


@method(**{**ROW, "waits_for": "peer's card", "models_per_step": 1.0})
async def mourner(w: Worker, x: Replica) -> None:
    """Does not expect that a peer dies."""
    for _ in w.steps():
        if w.size > 1:
            await w.read((w.rank + 1) % w.size)
        x.descend_(await w.gradient(x))


OUTER: dict[str, Any] = {
    "keeps_mean": True, "waits_for": "everyone", "models_per_step": 0.5, "staleness": "0",
    "family": "local updates", "is_synchronous": True,
}  # fmt: skip


@method(**OUTER)
async def backwards(w: Worker, x: Replica, *, period: int = 3, outer_rate: float = 1.0) -> None:
    """An outer step of the wrong sign, away from the mean of the models."""
    start = x.snapshot()
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if (t + 1) % period == 0:
            start = start - outer_rate * (await w.all_reduce(x.snapshot()) - start)
            x.assign_(start)


@method(**OUTER)
async def forgetful(w: Worker, x: Replica, *, period: int = 3, outer_rate: float = 1.0) -> None:
    """Every worker goes half of the way from a model of its own."""
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if (t + 1) % period == 0:
            x.mix_(await w.all_reduce(x.snapshot()), 0.5 * outer_rate)


@method(**OUTER)
async def outer_thief(w: Worker, x: Replica, *, period: int = 3) -> None:
    """Takes from nobody what it adds to the mean."""
    for t in w.steps():
        x.descend_(await w.gradient(x))
        if (t + 1) % period == 0:
            x.assign_(1.01 * await w.all_reduce(x.snapshot()))


_GAMBLER = random.Random()


@method(**ROW)
async def gambler(w: Worker, x: Replica) -> None:
    """Draws from a generator that no seed fixes."""
    for _ in w.steps():
        gradient = await w.gradient(x)
        x.descend_(gradient * _GAMBLER.random())


@method(**ROW)
async def smuggler(w: Worker, x: Replica) -> None:
    """Applies gradients past the optimiser, so that nothing clips or counts them."""
    for _ in w.steps():
        x.add_(-x.learning_rate * (await w.gradient(x)))


BREAKS = {
    "thief": (thief, "keeps the mean"),
    "talker": (talker, "models sent per step"),
    "waiter": (waiter, "waits for"),
    "mourner": (mourner, "survives a death"),
    "mourner in storms": (mourner, "weathers storms of faults"),
    "gambler": (gambler, "a seed fixes the run"),
    "gambler alone": (gambler, "plain training with one worker"),
    "smuggler": (smuggler, "what it applies is clipped"),
    "smuggler counted": (smuggler, "staleness"),
    "backwards": (backwards, "moves the way its workers went"),
    "backwards compared": (backwards, "local_sgd at rate 1"),
    "backwards step by step": (backwards, "all_reduce at period 1"),
    "forgetful": (forgetful, "one outer model after a meeting"),
    "thief without gradients": (outer_thief, "nothing moves without gradients"),
}
QUICK = [
    promise for promise in LAWS
    if promise != "trains the digits on eight workers" and promise not in OUTER_LAWS
]  # fmt: skip


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_promise_is_found_out(case: str) -> None:
    """And says in a sentence how that was seen."""
    broken, promise = BREAKS[case]
    finding = check(MethodSpec(broken, {}), promise)
    assert finding.is_kept is False
    assert finding.found
    assert "\n" not in finding.found


@pytest.mark.parametrize("promise", QUICK)
def test_a_method_that_keeps_its_row_passes(promise: str) -> None:
    assert check(MethodSpec(honest, {}), promise).is_kept is True


def test_a_promise_of_bits_does_not_depend_on_the_threads_at_hand() -> None:
    """A machine of several cores computes with several threads unless it is told otherwise, and the
    run has one; sums of two threads have other last bits."""
    with threads_of(2):
        assert check(MethodSpec(honest, {}), "plain training with one worker").is_kept is True


def test_what_the_row_does_not_promise_is_not_checked() -> None:
    row = method(**ROW, is_plain_alone=False, survives_death=False)(honest.worker)
    for promise in ("plain training with one worker", "survives a death"):
        assert check(MethodSpec(row, {}), promise).is_kept is None


def test_a_mean_that_is_kept_by_accident_is_no_promise() -> None:
    """A row that denies a promise is held to it, too: else it would say nothing."""
    row = method(**{**ROW, "keeps_mean": False})(honest.worker)
    assert check(MethodSpec(row, {}), "keeps the mean").is_kept is False


# ---------------------------------------------------------------------- rows


async def no_default(w: Worker, x: Replica, *, beta: float) -> None:
    """An option must be given."""


async def no_replica(w: Worker) -> None:
    """Takes too little."""


async def taken(w: Worker, x: Replica, *, groups: int = 1) -> None:
    """An option that every method has."""


def plain_function(w: Worker, x: Replica) -> None:
    """No coroutine."""


BAD_ROWS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no default": (no_default, {}, "option beta needs a default"),
    "no replica": (no_replica, {}, "must take a worker and a replica"),
    "taken": (taken, {}, "option groups means something for every method"),
    "no coroutine": (plain_function, {}, "write async def"),
    "waits for": (honest.worker, {"waits_for": "evryone"}, "did you mean 'everyone'"),
    "output": (honest.worker, {"output": "centr"}, "did you mean 'centre'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_that_cannot_be_run_or_checked_is_refused(case: str) -> None:
    """With the line of the coroutine."""
    worker, changed, sentence = BAD_ROWS[case]
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        method(**(ROW | changed))(worker)
    assert "test_contract.py, line" in str(caught.value)


def test_a_method_of_ones_own_prints_and_parses_back(tmp_path: Any) -> None:
    """Its string carries the file, and options their values."""
    place = tmp_path / "own.py"
    place.write_text(
        "import gossamer\n"
        "@gossamer.method(keeps_mean=True, waits_for='nobody', models_per_step=0)\n"
        "async def mine(w, x, *, beta: float = 0.5):\n"
        "    for _ in w.steps():\n"
        "        x.descend_(await w.gradient(x))\n"
    )
    spec = parse_method(f"{place}:mine:beta=0.25,groups=2")
    assert str(spec) == f"{place}:mine:beta=0.25,groups=2"
    assert parse_method(str(spec)) == spec
    assert spec.method.promises.traffic == "0"
    assert isinstance(spec.method, Method)
    assert spec.method.name not in METHODS
