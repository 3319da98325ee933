"""The words that loops have beside `step`: shared values, opening and closing, rank and size."""

from __future__ import annotations

import json

import pytest
import torch

import gossamer
from gossamer.errors import ConfigurationError
from join_cases import batch, loss_of, net
from programs import PROGRAMS, answers_of

MATCHED, LATEST = "case_of_matched_values", "case_of_values_that_nobody_waits_for"
DEATH, STOPPING = "case_of_a_death_that_some_have_heard", "case_of_stopping_together"
OPENING, DRIVEN = "case_of_opening_and_closing", "case_of_a_driven_optimizer"
TAUGHT, UNASKED = "case_of_codistillation", "case_of_a_loop_that_does_not_ask"
POPULATION = "case_of_a_population"
LARGE = "case_of_one_large_batch"
GROUPS = [
    (MATCHED, 3, "all_reduce"),
    (MATCHED, 3, "local_sgd:period=2", "torch"),
    ("case_of_other_words", 2, "all_reduce"),
    (DEATH, 3, "all_reduce"),
    (LATEST, 2, "ad_psgd"),
    (LATEST, 2, "downpour", "torch"),
    (STOPPING, 3, "all_reduce"),
    (STOPPING, 3, "pull_gossip"),
    (OPENING, 2, "all_reduce"),
    (DRIVEN, 2, "all_reduce"),
    (DRIVEN, 2, "sync_server"),
    (TAUGHT, 2, "codistill:period=3,burn_in=0.5"),
    (TAUGHT, 2, "all_reduce"),
    (UNASKED, 2, "codistill:burn_in=0"),
    (UNASKED, 2, "pbt"),
    (POPULATION, 3, "pbt:period=2"),
    (LARGE, 3, "all_reduce"),
    (LARGE, 2, "all_reduce", "torch"),
    ("case_of_no_common_batch", 2, "ad_psgd"),
]
_found: dict[tuple[str | int, ...], dict] = {}


@pytest.fixture(autouse=True, scope="session")
def run_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All groups, one after the other, in one program that imports torch once."""
    program = PROGRAMS / "join_groups.py"
    found = answers_of(program, json.dumps(GROUPS), places=tmp_path_factory)
    _found.update(zip(GROUPS, found, strict=True))


def answers(*group: str | int) -> list[dict]:
    """What each worker returned, after all ended well."""
    assert _found[group]["ends"] == [0] * int(group[1]), _found[group]["written"]
    return _found[group]["answers"]


@pytest.mark.parametrize("group", GROUPS[:2], ids=str)
def test_synchronous_workers_share_the_values_of_matched_calls(group) -> None:
    """All get the same, in every step; who has left is left out, and its value with it."""
    zero, one, two = (answer["found"] for answer in answers(*group))
    assert zero[:2] == one[:2] == two
    assert zero == one
    assert len(zero) == 4
    assert zero[0] == [1.0, [1.0, 1.0], 1.0, [20, 20], "from 1", False]
    assert zero[1] == [1.0, [1.0, 1.0], 1.0, [20, 20], "from 1", True]
    assert zero[3] == [0.5, [0.5, 1.0], 0.5, [0, 0], "from 1", False]


def test_calls_that_do_not_match_are_refused() -> None:
    """Each worker says what it called and what the other did."""
    for rank, answer in enumerate(answers("case_of_other_words", 2, "all_reduce")):
        below, matched = answer["said"]
        assert "a rank below 2, got 2" in below
        words = ("any", "mean") if rank == 0 else ("mean", "any")
        assert f"worker {rank} called worker.{words[0]}() where worker {1 - rank}" in matched
        assert f"worker.{words[1]}()" in matched


def test_workers_agree_on_whose_value_counts_when_one_dies() -> None:
    """Worker 2 was heard by one of the others; its value counts for both, and later for nobody."""
    zero, one, _ = answers(DEATH, 3, "all_reduce")
    assert zero == one == {"mean": 2.0, "again": 0.5}


@pytest.mark.parametrize("group", [g for g in GROUPS if g[0] == LATEST], ids=str)
def test_asynchronous_workers_use_what_was_last_said(group) -> None:
    """A first call finds nobody; a flag that was up between two looks is seen; two places need
    names."""
    zero, one = answers(*group)
    assert zero["first"] == [0.0, False, 0.0]
    assert zero["now"] == [3.0, zero["now"][1], 6.0]
    assert True in zero["flags"]
    for answer in (zero, one):
        assert "give each a name" in answer["said"]
        assert answer["named"] == 1.0


@pytest.mark.parametrize("group", [g for g in GROUPS if g[0] == STOPPING], ids=str)
def test_any_lets_all_stop_together(group) -> None:
    """Synchronous workers in the same step, the others soon after they hear of it."""
    found = answers(*group)
    assert len({answer["digest"] for answer in found}) == 1
    made = [answer["made"] for answer in found]
    assert made[1] == 3
    if group[2] == "all_reduce":
        assert made == [3, 3, 3]
    assert max(made) < 100_000


def test_a_loop_may_open_and_close_its_worker() -> None:
    """It ends with one model, a second `close` does nothing, and a step afterwards is refused."""
    zero, one = answers(OPENING, 2, "all_reduce")
    assert zero == one
    assert "between worker.open() and worker.close()" in zero["said"]


@pytest.mark.parametrize("method", ["all_reduce", "sync_server"])
def test_what_drives_an_optimiser_drives_the_worker(method: str) -> None:
    """Every step is one of the method, also one with an infinite gradient, which is left out."""
    zero, one = answers(DRIVEN, 2, method)
    assert zero["digest"] == one["digest"]
    assert [zero["made"], one["made"]] == [7, 7]
    assert [zero["scale"], one["scale"]] == [64.0, 32.0]
    if method == "all_reduce":
        assert zero["moved"] == one["moved"] == [True, False, True]


# ---------------------------------------------------------------------- alone


@pytest.mark.parametrize("group", GROUPS[-3:-1], ids=str)
def test_batch_norm_over_all_workers_equals_one_large_batch(group) -> None:
    """Parameters and statistics are those of one worker with all batches; the rate rises over
    three steps to the workers' number times its value."""
    found, size = answers(*group), group[1]
    for answer in found:
        assert answer["layers"] == 1
        assert answer["apart"] < 1e-5
        rises = [0.01 * (1 + (size - 1) * min(step, 3) / 3) for step in range(5)]
        assert answer["rates"] == pytest.approx(rises, abs=2e-6)
    assert len({answer["digest"] for answer in found}) == 1


def test_workers_out_of_step_have_no_common_batch() -> None:
    """One sentence, and the loop goes on."""
    for answer in answers("case_of_no_common_batch", 2, "ad_psgd"):
        assert "choose a synchronous method" in answer["said"]


def test_alone_nothing_is_scaled_and_batch_norm_stays() -> None:
    """One worker is bit for bit plain training; a scheduler that was made before is refused."""
    models = [torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    worker = gossamer.join(models[0], optimizers[0])
    assert worker.scale_lr("square_root") is None
    inputs = batch(0, 0)[0]
    with worker:
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[0](inputs).square().sum().backward()
        worker.step()
    models[1](inputs).square().sum().backward()
    optimizers[1].step()
    for ours, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.equal(ours, theirs)
    torch.optim.lr_scheduler.StepLR(optimizers[1], 1)
    late = gossamer.join(models[1], optimizers[1])
    with pytest.raises(ConfigurationError, match="comes too late"):
        late.scale_lr()


@pytest.mark.parametrize("is_fused", [False, True])
def test_alone_a_driven_optimiser_is_bit_for_bit_what_it_was(is_fused: bool) -> None:
    """With a closure, a scaler, and gradients that were infinite or unscaled beforehand."""
    found = []
    for is_joined in (False, True):
        model = net(0)
        own = torch.optim.Adam(model.parameters(), lr=0.1, fused=is_fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with gossamer.join(model, own) as worker:
            optimizer = worker.optimizer if is_joined else own
            for step in range(5):
                inputs, targets = batch(0, step)

                def closure(inputs=inputs, targets=targets, optimizer=optimizer, model=model):
                    optimizer.zero_grad()
                    loss = loss_of(model, inputs, targets)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                optimizer.zero_grad()
                weight = float("inf") if step == 2 else 1.0
                scaler.scale(loss_of(model, inputs * weight, targets)).backward()
                if step == 3:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        found.append((model.state_dict(), own.state_dict(), scaler.get_scale()))
    (plain, *rest), (joined, *others) = found
    assert str(rest) == str(others)
    assert all(torch.equal(value, joined[name]) for name, value in plain.items())


def test_alone_shared_values_are_what_was_given() -> None:
    """No copy is made, and nothing is sent."""
    model = net(0)
    worker = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"worker.close\(\) was called outside"):
        worker.close()
    with pytest.raises(ConfigurationError, match=r"worker.mean\(\) was called outside"):
        worker.mean(1.0)
    tensor = torch.ones(2)
    with worker:
        assert worker.mean(tensor) is tensor
        assert worker.broadcast(tensor) is tensor
        assert worker.mean(3) == 3
        assert worker.any(torch.tensor(1)) is True
        assert worker.any(0) is False


def test_rank_and_size_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before joining, from its variables; without a launcher there is one worker."""
    for name in ("GOSSAMER_RANK", "GOSSAMER_SIZE", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert (gossamer.rank(), gossamer.size()) == (0, 1)
    variables = {"RANK": "2", "WORLD_SIZE": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (gossamer.rank(), gossamer.size()) == (2, 5)


def test_a_loop_learns_what_others_predict() -> None:
    """From the end of the burn-in on; all hold the best worker's model in the end."""
    for answer in answers(TAUGHT, 2, "codistill:period=3,burn_in=0.5"):
        assert answer["added"][:6] == [0.0] * 6
        assert all(one > 0.0 for one in answer["added"][6:])
    zero, one = answers(TAUGHT, 2, "codistill:period=3,burn_in=0.5")
    assert zero["digest"] == one["digest"]


def test_with_any_other_method_there_is_nothing_to_learn_from_others() -> None:
    """The loop need not know its method."""
    assert all(set(answer["added"]) == {0.0} for answer in answers(TAUGHT, 2, "all_reduce"))


@pytest.mark.parametrize(
    ("method", "said"),
    [("codistill:burn_in=0", "worker.codistill(loss, output, inputs)"),
     ("pbt", "worker.report(loss=...)")],
)  # fmt: skip
def test_a_loop_is_told_what_its_method_needs(method: str, said: str) -> None:
    """In one sentence, at its first step."""
    assert all(said in answer["said"] for answer in answers(UNASKED, 2, method))


def test_a_population_of_loops_copies_its_best() -> None:
    """Whoever reports the least loss is copied, its own lives stay one, and the rate that the loop
    sees is its own between steps."""
    zero, *others = answers(POPULATION, 3, "pbt:period=2")
    assert [one["parent"] for one in zero["lineage"]] == [None]
    for answer in others:
        assert any(one["parent"] == 0 for one in answer["lineage"])
        assert answer["rates"] == [0.05]
        assert answer["digest"] == zero["digest"]
