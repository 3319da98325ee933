"""The first door: a user's own loop, alone and coupled, with all that loops do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import ConfigurationError
from join_cases import batch, loss_of, net, optimizer_of
from programs import PROGRAMS, answers_of
from tiers import looks_at, only

STEADY = "case_of_a_steady_point"
STEADY_GROUPS = [
    (2, "ad_psgd"),
    (2, "ad_psgd:most=inf"),
    (2, "ad_psgd:paper"),
    (2, "ad_psgd", "torch"),
    (4, "ad_psgd"),
    (4, "ad_psgd:paper"),
]
GROUPS = [
    ("case_of_optimisers", 2, "all_reduce"),
    ("case_of_optimisers", 3, "all_reduce"),
    ("case_of_adam", 2, "all_reduce"),
    ("case_of_adamw", 2, "all_reduce"),
    ("case_of_odd_models", 2, "all_reduce"),
    ("case_of_odd_models", 3, "pull_gossip"),
    ("case_of_mixed_types", 2, "all_reduce"),
    ("case_of_mixed_types", 2, "ad_psgd"),
    ("case_of_half_precision", 2, "all_reduce"),
    ("case_of_compiling_afterwards", 2, "ad_psgd"),
    ("case_of_accumulation", 2, "all_reduce"),
    ("case_of_clipping", 2, "all_reduce"),
    ("case_of_local_clipping", 2, "all_reduce"),
    ("case_of_scaling", 2, "all_reduce"),
    ("case_of_scaling", 2, "pull_gossip"),
    ("case_of_scaling", 2, "ssp"),
    ("case_of_scaling", 2, "eamsgd"),
    ("case_of_consensus", 2, "all_reduce"),
    ("case_of_consensus", 3, "pull_gossip"),
    ("case_of_consensus", 2, "push_sum"),
    ("case_of_consensus", 2, "ad_psgd"),
    ("case_of_consensus", 2, "easgd"),
    ("case_of_shards", 2, "all_reduce"),
    ("case_of_shards", 3, "all_reduce"),
    ("case_of_shards", 2, "pull_gossip"),
    ("case_of_a_failing_loop", 3, "pull_gossip"),
    ("case_of_a_failing_loop", 3, "all_reduce"),
    ("case_of_ctrl_c", 2, "all_reduce"),
    ("case_of_no_interruption", 2, "all_reduce"),
    ("case_of_saving", 2, "all_reduce"),
    ("case_of_loading", 2, "all_reduce"),
    ("case_of_no_interruption", 2, "sync_server"),
    ("case_of_saving", 2, "sync_server"),
    ("case_of_loading", 2, "sync_server"),
    ("case_of_saving", 2, "ssp"),
    ("case_of_loading", 2, "ssp"),
    ("case_of_a_synchronous_server", 3, "sync_server"),
    ("case_of_a_synchronous_server", 2, "sync_server:servers=2"),
    ("case_of_an_adamw_server", 2, "sync_server"),
    ("case_of_an_asynchronous_server", 2, "downpour"),
    ("case_of_an_asynchronous_adam", 2, "downpour"),
    ("case_of_an_asynchronous_server", 2, "ssp"),
    ("case_of_an_asynchronous_server", 2, "easgd"),
    ("case_of_rates_that_fall_to_nothing", 2, "downpour"),
    ("case_of_what_is_accrued_at_the_end", 2, "downpour:n_push=4,n_fetch=4"),
    ("case_of_refusals", 2, "sync_server"),
    *((STEADY, *group) for group in STEADY_GROUPS),
]
FAILING = "case_of_a_failing_loop"
FEW_STEADY = [(2, "ad_psgd"), (4, "ad_psgd:paper")]
WIDE = {
    ("case_of_optimisers", 3, "all_reduce"),
    ("case_of_adam", 2, "all_reduce"),
    ("case_of_mixed_types", 2, "all_reduce"),
    ("case_of_consensus", 2, "all_reduce"),
    ("case_of_consensus", 2, "push_sum"),
    ("case_of_consensus", 2, "easgd"),
    ("case_of_shards", 2, "all_reduce"),
    ("case_of_no_interruption", 2, "all_reduce"),
    ("case_of_saving", 2, "all_reduce"),
    ("case_of_loading", 2, "all_reduce"),
    ("case_of_saving", 2, "ssp"),
    ("case_of_loading", 2, "ssp"),
    ("case_of_a_synchronous_server", 2, "sync_server:servers=2"),
    *((STEADY, *group) for group in STEADY_GROUPS if group not in FEW_STEADY),
}
"""What only `make test-all` looks at."""


_found: dict[tuple[str | int, ...], dict] = {}


@pytest.fixture(autouse=True, scope="session")
def run_groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All groups, one after the other, in one program that imports torch once."""
    program, groups = PROGRAMS / "join_groups.py", looks_at(request, WIDE, GROUPS)
    found = answers_of(program, json.dumps(groups), places=tmp_path_factory)
    _found.update(zip(groups, found, strict=True))


def answers(case: str, size: int, method: str, *transport: str) -> list[dict]:
    """What each worker returned, after all ended well."""
    group = _found[case, size, method, *transport]
    assert group["ends"] == [0] * size, group["written"]
    return group["answers"]


@pytest.mark.parametrize(
    "group",
    only(set(GROUPS) - WIDE, [group for group in GROUPS if group[0] != FAILING], are_one=True),
    ids=lambda group: "-".join(map(str, group)),
)
def test_a_coupled_loop_holds_its_laws_and_all_workers_end_with_one_model(group) -> None:
    """The checks inside the workers pass; leaving `with` gives everybody the same bits."""
    digests = [answer.get("digest") for answer in answers(*group)]
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    "group",
    only(FEW_STEADY, STEADY_GROUPS, are_one=True),
    ids=lambda group: "-".join(map(str, group)),
)
def test_no_model_changes_between_forward_and_backward(group) -> None:
    """Where others change a worker's parameters, its gradients are taken at a copy of its own."""
    found = answers(STEADY, *group)
    assert [answer["moved"] for answer in found] == [0] * len(found)
    assert sum(answer["exchanges"] for answer in found) > 0
    assert not any(answer["is_in_window"] for answer in found)


@pytest.mark.parametrize("method", ["pull_gossip", "all_reduce"])
def test_a_loop_that_raises_ends_alone(method: str) -> None:
    """The others are told, go on, and end with one model."""
    group = _found[FAILING, 3, method]
    assert group["ends"] == [0, 1, 0], group["written"]
    assert "worker 1 has had enough" in group["written"]
    assert group["answers"][0] == group["answers"][2]


def test_batch_norm_statistics_are_averaged_where_all_train_the_output() -> None:
    """All-reduce has the mean of the workers' running means; a mean of models that are apart has
    statistics of its own."""
    for size, method in ((2, "all_reduce"), (3, "pull_gossip")):
        found = answers("case_of_odd_models", size, method)
        own = torch.tensor([answer["own"] for answer in found])
        is_mean = torch.allclose(torch.tensor(found[0]["mean"]), own.mean(0))
        assert is_mean == (method == "all_reduce")
        assert not torch.equal(own[0], own[1])


def test_clipping_is_of_the_own_or_of_the_combined_gradient() -> None:
    """Globally the step has the wanted norm; locally the mean of clipped gradients is shorter."""
    for answer in answers("case_of_clipping", 2, "all_reduce"):
        assert answer["norm"] == pytest.approx(0.01, rel=1e-3)
    for answer in answers("case_of_local_clipping", 2, "all_reduce"):
        assert answer["norm"] < 0.0099


def test_an_infinite_gradient_is_skipped_by_everybody_who_would_use_it() -> None:
    """All-reduce: by all. Elsewhere by its owner; only its scale goes down."""
    for answer in answers("case_of_scaling", 2, "all_reduce"):
        assert answer["moved"] == [True, False, True, True]
    for method in ("all_reduce", "pull_gossip", "ssp", "eamsgd"):
        assert [a["scale"] for a in answers("case_of_scaling", 2, method)] == [64.0, 32.0]


@pytest.mark.parametrize("size", only([3], [2, 3]))
def test_synchronous_workers_share_batches_equally(size: int) -> None:
    """Each batch at most once, the same number for all, less than a round left out."""
    found = answers("case_of_shards", size, "all_reduce")
    assert [answer["lengths"] for answer in found] == [[13 // size] * 2] * size
    check_shards(found, 13 - 13 % size)
    for answer in found:
        lengths = {len(epoch) for epoch in [*answer["epochs"], answer["listed"]]}
        assert lengths == {13 // size}


def test_asynchronous_workers_take_every_batch_exactly_once() -> None:
    """Whoever is ready takes the next ones; `len()` is what each may expect."""
    found = answers("case_of_shards", 2, "pull_gossip")
    check_shards(found, 13)
    assert [answer["lengths"] for answer in found] == [[7, 7]] * 2


def check_shards(found: list[dict], batches: int) -> None:
    orders = []
    for epoch in range(4):
        taken = [number for answer in found for pair in answer["epochs"][epoch] for number in pair]
        assert len(taken) == len(set(taken)) == 2 * batches
        orders.append(str([answer["epochs"][epoch] for answer in found]))
    assert len(set(orders)) == 4
    for kind in ("listed", "streamed"):
        taken = [number for answer in found for (number,) in answer[kind]]
        assert sorted(taken) == list(range(batches))


@pytest.mark.parametrize("method", only(["sync_server"], ["all_reduce", "sync_server"]))
def test_a_loaded_checkpoint_goes_on_as_if_nothing_had_happened(method: str) -> None:
    """Bit for bit for methods that depend on no timing, the server's momentum included."""
    through = answers("case_of_no_interruption", 2, method)
    assert answers("case_of_loading", 2, method) == through
    assert answers("case_of_saving", 2, method) != through


def test_a_server_has_the_users_optimiser() -> None:
    """Its class and groups; SGD leaves momentum out where the server waits for nobody."""
    for method in ("downpour", "ssp"):
        there, nowhere = answers("case_of_an_asynchronous_server", 2, method)
        assert there["kinds"] == ["SGD"]
        assert there["momenta"] == [0.0, 0.0]
        assert there["rates"][0] == pytest.approx(2.5 * there["rates"][1])
        assert nowhere["kinds"] == []
    assert answers("case_of_an_asynchronous_adam", 2, "downpour")[0]["kinds"] == ["Adam"]


def test_a_server_follows_the_schedule() -> None:
    """With rates of 0 its model stands still."""
    for answer in answers("case_of_rates_that_fall_to_nothing", 2, "downpour"):
        assert answer["before"] == answer["digest"]


def test_what_a_loop_has_accrued_at_its_end_reaches_the_server() -> None:
    """All gradients of both workers, though pushes are of four and each made six: four between two
    meetings count as one."""
    for answer in answers("case_of_what_is_accrued_at_the_end", 2, "downpour:n_push=4,n_fetch=4"):
        assert answer["steps"] == pytest.approx(12 / 4)


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    """In a coupled loop."""
    for answer in answers("case_of_refusals", 2, "sync_server"):
        expected = (
            "on its servers", "scope must be", "too late", "1 batches for 2 workers",
            "worker.step() was called outside", "worker.state_dict() was called outside",
            "used already",
        )  # fmt: skip
        assert len(answer["said"]) == len(expected)
        for sentence, words in zip(answer["said"], expected, strict=True):
            assert words in sentence
            assert "\n" not in sentence


# ---------------------------------------------------------------------- alone


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_alone_the_loop_is_bit_for_bit_what_it_was(name: str) -> None:
    """With a scaler, accumulation and clipping; no parameter is touched."""
    found = []
    for is_joined in (False, True):
        model = net(0)
        optimizer = optimizer_of(name, model)
        memory = [p.data_ptr() for p in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if is_joined:
            with gossamer.join(model, optimizer, method="ad_psgd") as worker:
                assert (worker.rank, worker.size, worker.is_main) == (0, 1, True)
                assert worker.shard(memory) is memory
                loop(worker, scaler)
                with worker.consensus() as seen:
                    assert seen is model
        else:
            loop(None, scaler, model, optimizer)
        assert [p.data_ptr() for p in model.parameters()] == memory
        found.append((model.state_dict(), optimizer.state_dict(), scaler.get_scale()))
    plain, joined = found
    assert str(plain) == str(joined)
    for name_of, value in plain[0].items():
        assert torch.equal(value, joined[0][name_of])


def loop(worker, scaler, model=None, optimizer=None) -> None:
    model, optimizer = (model, optimizer) if worker is None else (worker.model, worker.optimizer)
    for step in range(6):
        if step % 2 == 0:
            optimizer.zero_grad()
        inputs, targets = batch(0, step)
        inputs = inputs * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss_of(model, inputs, targets)).backward()
        if worker is not None and step % 2 == 0:
            with worker.accumulate():
                worker.clip_grad_norm_(0.5)
                worker.step(scaler)
        elif worker is not None:
            scaler.unscale_(optimizer)
            worker.clip_grad_norm_(0.5, "global")
            worker.step(scaler)
            scaler.update()
        elif step % 2 == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()


def test_alone_no_method_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to couple with; but what is given must exist."""
    monkeypatch.delenv("GOSSAMER_METHOD", raising=False)
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = gossamer.join(model, optimizer)
    worker.load_state_dict(worker.state_dict())
    with worker:
        worker.step()
    monkeypatch.setenv("GOSSAMER_METHOD", "easgd")
    assert gossamer.join(model, optimizer, "ad_psgd").method.name == "easgd"


class Alone:
    """As much of a transport as is looked at before anything is opened."""

    rank, size = 0, 2


def refused(words: str, model=None, optimizer=None, method=None, **choices) -> None:
    model = net(0) if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=words) as caught:
        gossamer.join(model, optimizer, method, **choices)
    assert "\n" not in str(caught.value)


def test_bad_choices_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, with the remedy."""
    monkeypatch.delenv("GOSSAMER_METHOD", raising=False)
    refused("no method was given; write join", transport=Alone())
    refused("did you mean 'ad_psgd'", method="ad_psg")
    refused("got groups=3 for 2 workers", method="all_reduce:groups=3", transport=Alone())
    compiled = net(0)
    compiled._orig_mod = None
    refused("already compiled", compiled, method="easgd")
    model = net(0)
    refused("LBFGS", model, torch.optim.LBFGS(model.parameters()))
    refused(
        "2 parameters that are not the model's", model[0], torch.optim.SGD(model.parameters(), 1.0)
    )
    frozen = net(0).requires_grad_(False)
    optimizer = torch.optim.SGD(net(0).parameters(), lr=0.1)
    optimizer.param_groups.clear()
    refused("no trainable parameters", frozen, optimizer, "easgd", transport=Alone())
    worker = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "easgd")
    with pytest.raises(ConfigurationError, match="outside of `with"):
        worker.step()
    with pytest.raises(ConfigurationError, match="the checkpoint is of method 'ad_psgd'"):
        worker.load_state_dict({**worker.state_dict(), "method": "ad_psgd"})
