"""A model is cut into chunks of about equal work; what cannot be cut is refused with its name."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.errors import ConfigurationError
from gossamer.pipeline.chain import Part, chain_of
from gossamer.pipeline.stages import cut_bounds, cut_model, part_costs
from gossamer.tasks.models import lenet5, resnet20
from gossamer.tasks.text import CharacterTransformer

MODELS = {
    "lenet5": (lenet5, torch.randn(4, 1, 28, 28)),
    "resnet20": (resnet20, torch.randn(4, 3, 32, 32)),
    "transformer": (
        lambda: CharacterTransformer(65, 3, 2, 16, 8), torch.randint(0, 65, (4, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_is_the_model(name: str) -> None:
    """The parts one after the other give what the model gives, and own each parameter once."""
    make, sample = MODELS[name]
    model = make().eval()
    value: Tensor = sample
    for part in chain_of(model):
        value = part.run(value)
    torch.testing.assert_close(value, model(sample), rtol=0, atol=0)
    owned = sum(cost.parameters for cost in part_costs(model, sample))
    assert owned == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_measuring_leaves_no_trace(name: str) -> None:
    """Statistics, mode and parameters are as before."""
    make, sample = MODELS[name]
    model = make().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    cut_model(model, sample, 2)
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5))
def test_the_largest_chunk_is_as_small_as_can_be(work: list[int], chunks: int) -> None:
    """Compared with every other way to cut."""
    if chunks > len(work):
        return

    def largest(bounds: list[int]) -> float:
        return max(sum(work[start:end]) for start, end in pairwise(bounds))

    best = min(
        largest([0, *inner, len(work)]) for inner in combinations(range(1, len(work)), chunks - 1)
    )
    assert largest(cut_bounds([float(one) for one in work], chunks)) == best


def test_stages_hold_all_parameters_once() -> None:
    make, sample = MODELS["resnet20"]
    cut = cut_model(make(), sample, 4)
    ranges = sorted((s.start, s.stop) for chunk in range(4) for s in cut.slices(chunk))
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert sum(cut.shares) == pytest.approx(1.0)


class Tied(nn.Module):
    """Two parts with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def chain(self) -> list[Part]:
        return [Part("first", self.one, ("one",)), Part("second", self.one, ("one",))]


class Free(nn.Module):
    """Nobody knows in which order its modules run."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


@pytest.mark.parametrize(
    ("model", "chunks", "given_cut", "said"),
    [
        (Tied(), 2, (), "share the parameter one.weight"),
        (Free(), 2, (), "Free cannot be cut into stages"),
        (nn.Sequential(nn.Linear(2, 2)), 2, (), "1 parts cannot be cut into 2 chunks"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2, (1, 1), "needs 1 numbers"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2, (5,), "at 5"),
    ],
)
def test_what_cannot_be_cut_is_said(
    model: nn.Module, chunks: int, given_cut: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        cut_model(model, torch.randn(2, 2), chunks, given_cut)
