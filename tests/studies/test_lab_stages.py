"""Late stages: predicted edges against known ones, against descent itself, and the command."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from command_line import gossamer
from gossamer import Task, simulate
from gossamer.config.cluster import Cluster
from gossamer.studies.lab.stage_edges import StageCurvature, stage_curvature
from gossamer.studies.lab.stage_study import StageRow, StageStudy, StageTrainer
from gossamer.studies.lab.theory import stability_edge
from gossamer.tasks import make_task
from gossamer.tasks.flat_model import FlatModel


def curvature(vectors: np.ndarray, values: list[float], sizes: list[int]) -> StageCurvature:
    """Of a quadratic with these eigenvectors (columns), cut into stages of these sizes."""
    parts = np.split(vectors, np.cumsum(sizes)[:-1])
    whole = vectors @ np.diag(values) @ vectors.T
    ends = np.cumsum([0, *sizes])
    blocks = [np.linalg.eigvalsh(whole[a:b, a:b]).max() for a, b in pairwise(ends)]
    return StageCurvature(
        max(values), tuple(blocks), np.array(values), tuple(part.T @ part for part in parts)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_stages_of_one_age_have_the_edge_of_one_delay(delay: int, momentum: float) -> None:
    """However the layers are coupled."""
    vectors, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))
    found = curvature(vectors, [3.0, 1.0], [2, 3, 1])
    edge = found.together((delay,) * 3, momentum)
    assert edge == pytest.approx(stability_edge(delay, momentum) / 3.0, rel=1e-3)


def test_stages_that_are_not_coupled_have_the_smallest_of_their_edges() -> None:
    found = curvature(np.eye(4)[:, :3], [1.0, 2.0, 4.0], [1, 1, 2])
    alone = [found.alone(stage, delay) for stage, delay in enumerate((2, 1, 0))]
    assert found.together((2, 1, 0)) == pytest.approx(min(alone), rel=1e-3)


class Shift(nn.Module):
    """Adds a multiple of its parameters, so that the loss of a chain of these is a quadratic."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.by = nn.Parameter(torch.ones(2))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.factor * self.by


def shifts() -> Task:
    data = torch.zeros(8, 2), torch.zeros(8, 2)
    return Task.of(
        lambda: nn.Sequential(*map(Shift, (2.0, 1.0, 3.0))), nn.functional.mse_loss, data, data,
        metric=None, name="shifts", batch=8, epochs=1, learning_rates=[0.01],
    )  # fmt: skip


def trainer_of(study: StageStudy) -> StageTrainer:
    model = FlatModel(study.task, torch.device("cpu"), seed=study.seed)
    return StageTrainer(study, model, study.cut(), lambda _: None)


@pytest.mark.parametrize("delays", [(2, 1, 0), (2, 2, 2), (0, 3, 0)])
@pytest.mark.parametrize("optimiser", ["sgd", "sgd:momentum=0.5"])
def test_descent_on_a_quadratic_fails_where_it_is_predicted(
    delays: tuple[int, ...], optimiser: str
) -> None:
    """Just below the edge the loss falls, just above it grows: all stages together, and each."""
    study = StageStudy(shifts(), 3, optimiser=optimiser, batch=8)
    model = FlatModel(study.task, torch.device("cpu"), seed=0)
    found = stage_curvature(model, study.cut(), model.initial)
    assert found is not None
    places = [(None, found.together(delays, study.momentum))]
    for stage, delay in enumerate(delays):
        held = torch.zeros(6)
        held[2 * stage : 2 * stage + 2] = 1.0
        places.append((held, found.alone(stage, delay, study.momentum)))
    rows = [StageRow(delays, factor * edge, held) for held, edge in places for factor in (0.9, 1.1)]
    runs = trainer_of(study).train(rows, 400)
    for at in range(0, len(runs), 2):
        below, above = runs[at], runs[at + 1]
        assert below.loss < 0.1 * 36 < 10 * 36 < above.loss  # all begin at 36


def test_its_runs_are_those_of_the_simulator() -> None:
    """A replica of two stages, never emptied, by the same batches."""
    choices = {"batch": 32, "seed": 3, "optimiser": "sgd", "learning_rate": 0.1}
    played = simulate(
        "digits-mlp", "all_reduce:stages=2,pipeline=pipedream", Cluster(workers=2),
        epochs=10 * 32 / 1437, evaluations=1, **choices,
    )  # fmt: skip
    trainer = trainer_of(StageStudy(make_task("digits-mlp"), 2, batch=32, seed=3))
    trainer.train([StageRow((1, 0), 0.1, None)], 10)
    torch.testing.assert_close(trainer.start, played.parameters, rtol=1e-5, atol=1e-6)


SMALL = ("--stages", "2", "--task", "digits-mlp:width=8", "--batch", "64")


def test_the_command_draws_edges_beside_losses(tmp_path: Path) -> None:
    said = gossamer(
        "lab", "stages", *SMALL, "--steps", "20", "--warmup", "20", "--pipelines",
        "pipedream,gpipe", "--runs", str(tmp_path), "--json",
    )  # fmt: skip
    assert said.status == 0, said.err
    lines = {(one["pipeline"], one["stage"]): one for one in said.json["lines"]}
    assert set(lines) == {("pipedream", None), ("gpipe", None), ("pipedream", 0), ("pipedream", 1)}
    assert lines["pipedream", None]["delays"] == [1, 0]
    own = said.json["curvature_by_stage"]
    assert lines["pipedream", 0]["predicted_edge"] == pytest.approx(1.0 / own[0])
    assert lines["pipedream", 1]["predicted_edge"] == pytest.approx(2.0 / own[1])
    assert all(len(one["runs"]) == 16 for one in lines.values())
    (picture,) = tmp_path.glob("*/stages.png")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stages", "4"), "3 parts cannot be cut into 4"),
        (("--stages", "1"), "stages must be at least 2"),
        (("--pipelines", "ampnet"), "no edge is known for it"),
        (("--pipelines", "pipedrem"), "did you mean 'pipedream'"),
        (("--optimiser", "adam"), "SGD with plain momentum"),
        (("--warmup", "-1"), "warmup must be at least 0"),
    ],
)
def test_what_the_laboratory_cannot_predict_is_said(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    found = gossamer("lab", "stages", *SMALL, *arguments, "--runs", str(tmp_path))
    assert (found.status, found.out) == (2, "")
    assert said in found.err
    assert not list(tmp_path.iterdir())
