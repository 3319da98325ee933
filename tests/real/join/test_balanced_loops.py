"""`balance=speed` in a loop of one's own: the samples of a round are cut by speed, nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from join_balance import BATCH, RATE, SAMPLES, data
from join_cases import loss_of, net
from programs import PROGRAMS, answers_of
from tiers import looks_at, wide

SIZE = 3
BALANCED = "all_reduce:balance=speed"
METHODS = ["sync_server:balance=speed", "sync_server:servers=2,balance=speed",
           "all_reduce:overlap=false,balance=speed"]  # fmt: skip
CASES = {
    "balance": 3, "balance_read_ahead": 3, "balance_with_a_small_last_batch": 3,
    "balance_accumulated": 3, "balance_and_leaving": 4, "balance_saved": 2, "balance_loaded": 2,
    "balance_refused": 1,
}  # fmt: skip
"""And over how many passes each goes."""
ALWAYS = ("balance_with_a_small_last_batch", "balance_and_leaving", "balance_refused")
RUNS = [
    *((f"case_of_{case}", SIZE, BALANCED) for case in CASES),
    *(("case_of_balance", SIZE, method) for method in METHODS),
    ("case_of_balance", SIZE, BALANCED, "torch"),
]
WIDE = [run for run in RUNS if run[0].removeprefix("case_of_") not in ALWAYS]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, ...], dict]:
    """All of them one after the other, in one program that imports torch once."""
    program, runs = PROGRAMS / "join_groups.py", looks_at(request, WIDE, RUNS)
    told = answers_of(program, json.dumps(runs), places=tmp_path_factory)
    return dict(zip(runs, told, strict=True))


def answers(found: dict, case: str, method: str = BALANCED, *transport: str) -> list[dict]:
    run = found[f"case_of_{case}", SIZE, method, *transport]
    assert run["ends"] == [0] * SIZE, run["written"]
    return run["answers"]


def rounds_of(ran: list[dict]) -> list[dict[int, list[int]]]:
    """The samples of each round, by rank, as long as anybody is there; all know the same shares."""
    found = []
    for step in range(max(len(own["seen"]) for own in ran)):
        parts = {r: own["seen"][step] for r, own in enumerate(ran) if step < len(own["seen"])}
        shares = {tuple(ran[rank]["shares"][step]) for rank in parts}
        assert len(shares) == 1
        assert all(len(part) == ran[rank]["shares"][step][rank] for rank, part in parts.items())
        found.append(parts)
    return found


def by_one(rounds: list[dict[int, list[int]]], together: int = 1) -> torch.Tensor:
    """The parameters of one process that descends along the mean over the samples of each round;
    along the weighted sum of several, where they are accumulated."""
    model, samples = net(0), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(0, len(rounds), together):
        optimizer.zero_grad()
        chosen = rounds[number : number + together]
        for rank in range(SIZE):
            present = [parts for parts in chosen if rank in parts]
            shares = [len(r[rank]) * len(r) / sum(map(len, r.values())) for r in present]
            for parts in chosen:
                if rank in parts:
                    weight = sum(shares) / len(shares) / len(parts) / together
                    _, inputs, targets = samples[parts[rank]]
                    (weight * loss_of(model, inputs, targets)).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def check_descent(ran: list[dict], *, together: int = 1) -> None:
    own = torch.tensor([one["parameters"] for one in ran])
    expected = by_one(rounds_of(ran), together).expand_as(own)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def check_passes(rounds: list[dict[int, list[int]]], passes: int) -> None:
    """No sample twice in a pass, and all rounds whole but for the loader's last batch."""
    length = len(rounds) // passes
    for first in range(0, len(rounds), length):
        seen = [one for r in rounds[first : first + length] for p in r.values() for one in p]
        assert len(seen) == len(set(seen)) > SAMPLES - SIZE * BATCH


@pytest.mark.parametrize(
    ("case", "method", "transport"),
    [
        ("balance_with_a_small_last_batch", BALANCED, ()),
        *(pytest.param("balance", method, (), marks=wide) for method in [BALANCED, *METHODS]),
        pytest.param("balance", BALANCED, ("torch",), marks=wide),
    ],
)
def test_a_step_is_along_the_mean_over_all_samples_of_the_round(
    found: dict, case: str, method: str, transport: tuple[str, ...]
) -> None:
    """The model is that of one process with all samples of each round; a worker that is four times
    slower has a quarter of what the fastest has, to a sample."""
    ran = answers(found, case, method, *transport)
    check_passes(rounds_of(ran), CASES[case])
    check_descent(ran)
    assert ran[0]["shares"][4] == [BATCH, BATCH, BATCH, 0]
    assert ran[0]["shares"][5] == [3, 13, 8, 0]


@wide
def test_what_a_loader_reads_ahead_confuses_nobody(found: dict) -> None:
    """Two loaders read four rounds ahead and one does not, and the first pass is left early. All
    cut the same rounds alike."""
    ran = answers(found, "balance_read_ahead")
    rounds = rounds_of(ran)
    assert len(rounds) == 7 + 2 * 7
    check_passes(rounds[7:], 2)
    check_descent(ran)
    assert len(set(map(tuple, ran[0]["shares"]))) > 1


@wide
def test_accumulated_batches_are_weighted_by_their_samples(found: dict) -> None:
    """Where shares are settled between two batches of one step, both count alike."""
    check_descent(answers(found, "balance_accumulated"), together=2)


def test_the_others_share_out_the_rounds_of_who_has_left(found: dict) -> None:
    """At once the mean is over the samples of those who are there; from the next settlement on
    they have whole rounds of their own."""
    ran = answers(found, "balance_and_leaving")
    assert [len(one["seen"]) for one in ran] == [32, 32, 12]
    check_descent(ran)
    shares = ran[0]["shares"]
    assert shares[19] == [3, 13, 8, 0]
    assert shares[20] == [3, 13, 0, 0]


@wide
def test_a_loaded_loop_goes_on_with_the_shares_it_had(found: dict) -> None:
    """Bit for bit."""
    assert answers(found, "balance_loaded") == answers(found, "balance_saved")
    assert answers(found, "balance_loaded")[0]["shares"][0] == [3, 13, 8, 0]


def test_what_cannot_be_cut_is_refused(found: dict) -> None:
    """In one sentence, inside the workers; they go on with a loader that can."""
    check_descent(answers(found, "balance_refused"))
