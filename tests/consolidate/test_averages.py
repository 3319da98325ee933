"""Stochastic weight averages and soups: means of weights, measured as models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gossamer
from gossamer.config.settings import Settings, make_settings
from gossamer.consolidate.models import TrainedModels
from gossamer.consolidate.soup import greedy_choice, halves, mean_of
from gossamer.contract.small_worlds import cluster_of
from gossamer.errors import ConfigurationError, Unfinished
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.simulation import Simulation

SHORT = {"epochs": 2.0, "evaluations": 4}


def settings_of(method: str = "ad_psgd", **choices: object) -> Settings:
    return make_settings("digits-mlp", method, cluster_of(4), **{**SHORT, **choices})


def test_swa_is_the_mean_of_the_output_models_of_all_evaluations_from_its_share_on() -> None:
    """The averaged model is the mean of what the same run, without averaging, evaluates."""
    seen: list[torch.Tensor] = []
    plain = Simulation(settings_of())
    simulation = Simulation(
        settings_of(),
        on_row=lambda row: seen.append(
            simulation._evaluator.output_parameters(simulation.held()).clone()
        ),
    )
    plain_end = plain.run().parameters
    simulation.run()
    averaged = gossamer.simulate("digits-mlp", "ad_psgd", cluster_of(4), swa=0.5, **SHORT)
    assert averaged.parameters is not None
    assert plain_end is not None
    torch.testing.assert_close(averaged.parameters, torch.stack(seen[-3:]).mean(0))
    assert not torch.equal(averaged.parameters, plain_end)
    assert averaged.output == "averaged mean"


def test_swa_changes_nothing_that_happens_and_is_the_same_in_pieces(tmp_path: Path) -> None:
    """The digest of events is that of the run without it, and a resumed average has equal bits."""
    plain, whole = (Simulation(settings_of(swa=swa)).run() for swa in (None, 0.25))
    assert plain.digest == whole.digest
    place = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Unfinished):
        Simulation(settings_of(swa=0.25), piece=RunPiece(place, events=whole.events * 3 // 4)).run()
    resumed = Simulation(settings_of(swa=0.25), piece=RunPiece(place, resumes=True)).run()
    assert resumed.parameters_digest == whole.parameters_digest
    assert resumed.accuracy == whole.accuracy


def test_swa_of_an_ensemble_is_refused() -> None:
    """An ensemble has as many outputs as workers."""
    with pytest.raises(ConfigurationError, match="swa averages the output model"):
        settings_of("ensemble", swa=0.5)


def test_a_uniform_soup_is_the_mean_of_the_members(tmp_path: Path) -> None:
    """Its parameters are those of the mean, and its file loads into the task's own model."""
    result = gossamer.simulate("digits-mlp", "ensemble:shared=0.5", cluster_of(4), **SHORT)
    made = gossamer.soup(result, "uniform")
    members = TrainedModels.of(result).members
    model = made.task.make_model()
    model.load_state_dict(made.state_dict())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(flat, mean_of(members))
    assert len(made.chosen) == 4
    made.save(tmp_path / "soup.safetensors")
    again = TrainedModels.of(tmp_path / "soup.safetensors", task="digits-mlp")
    assert torch.equal(again.members[0].value, flat)


def test_a_greedy_soup_never_gets_worse_on_what_it_chooses_by() -> None:
    """Each model that joins leaves the score of the soup as good as before; one that ruins it
    stays outside."""
    result = gossamer.simulate("digits-mlp", "ensemble:shared=0.5", cluster_of(4), **SHORT)
    models = TrainedModels.of(result)
    bad = models.members[1]
    models.members[1] = type(bad)("bad", -bad.value, bad.buffers)
    data = halves(models.task.test)[0]
    ranked = [models.members[0], models.members[1], models.members[2], models.members[3]]
    chosen = greedy_choice(models, ranked, data)
    assert "bad" not in [one.name for one in chosen]
    worth = [
        models.score(mean_of(chosen[:n]), bad.buffers, data)[1] or 0.0
        for n in range(1, len(chosen) + 1)
    ]
    assert worth == sorted(worth)


def test_members_of_an_ensemble_with_a_shared_past_are_one_model_until_they_part() -> None:
    """With `shared` of the whole run every member is the model that all_reduce trains."""

    def ran(method: str) -> gossamer.Result:
        return gossamer.simulate(
            "digits-mlp", method, cluster_of(2), engine="loop", split="sharded", **SHORT
        )

    members = TrainedModels.of(ran("ensemble:shared=1.0")).members
    assert torch.equal(members[0].value, members[1].value)
    apart = TrainedModels.of(ran("ensemble")).members
    assert not torch.equal(apart[0].value, apart[1].value)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["nowhere"], "has no model.safetensors"),
        ([], "no model was given"),
    ],
)
def test_what_has_no_model_is_refused_in_one_sentence(sources: list[str], said: str) -> None:
    """Nothing is made of nothing."""
    with pytest.raises(ConfigurationError, match=said):
        gossamer.soup(sources)
