"""A result outside of the process that made it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch

from gossamer import simulate
from gossamer.errors import ConfigurationError
from gossamer.runs.result import Result, digest_of
from gossamer.tasks import make_task

COPIES: dict[str, Callable[[Result], Result]] = {
    "pickled": lambda result: pickle.loads(pickle.dumps(result)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled and copied": lambda result: copy.deepcopy(pickle.loads(pickle.dumps(result))),
    "pickled twice": lambda result: pickle.loads(pickle.dumps(COPIES["pickled"](result))),
}


def assert_same(one: Result, other: Result) -> None:
    assert (one.history, one.summary, one.staleness) == (
        other.history, other.summary, other.staleness
    )  # fmt: skip
    assert one.parameters is not None
    assert digest_of(one.parameters) == one.parameters_digest == other.parameters_digest
    state, expected = one.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("method", ["ad_psgd:topology=complete", "ensemble"])
def test_a_result_survives_a_pickle_and_copies(
    copied: Callable[[Result], Result], method: str
) -> None:
    """Rows, summary, digest, parameters and model are the same to the bit, and so are the settings,
    though tasks and methods hold functions, which no pickle takes."""
    result = simulate("digits-mlp", method, epochs=0.1, seed=7)
    made = copied(result)
    assert_same(made, result)
    assert made.settings.as_dict() == result.settings.as_dict()
    assert repr(made) == repr(result)


def test_a_pickle_holds_each_number_once() -> None:
    """The tensors of a model are views of one vector, and each would bring the whole of it."""
    result = simulate("digits-mlp", "ensemble", epochs=0.1)
    held = sum(tensor.nbytes for tensor in (*result.state.values(), result.parameters))
    rows = len(pickle.dumps((result.history, result.summary)))
    assert len(pickle.dumps(result)) < 1.2 * held + 2 * rows + 20_000


def test_a_task_that_was_made_in_python_stays_behind() -> None:
    """All that was measured travels; only who asks for the settings is told what is missing."""
    task = dataclasses.replace(make_task("digits-logistic"))
    result = simulate(task, "all_reduce", epochs=0.2)
    made = pickle.loads(pickle.dumps(result))
    assert_same(made, result)
    with pytest.raises(ConfigurationError, match="made in Python, did not travel"):
        _ = made.settings
    assert copy.deepcopy(result).settings is result.settings
